#include "exec/engine.h"

#include <cstring>

#include "exec/context.h"
#include "exec/test_oracle.h"
#include "hw/process_memory.h"
#include "kernels/attention/attention.h"
#include "kernels/gemm/gemm.h"

namespace mi::exec {
namespace {

using testing::ModelShape;
using testing::Oracle;
using testing::TestModel;
using artifact::Packing;

std::vector<int32_t> random_ids(uint64_t seed, int64_t n, int64_t vocab = 50) {
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < n; ++i) ids.push_back(int32_t(random_u64(seed, uint64_t(i)) % uint64_t(vocab)));
  return ids;
}

using Logits = std::vector<std::vector<float>>;   // by position

// Runs sequences through an engine in chunks; sequence i owns pages i, i + n, i + 2n, ...
struct Runner {
  Engine& engine;
  std::vector<std::vector<int32_t>> sequences;
  std::vector<std::vector<int32_t>> pages;
  std::vector<Logits> logits;

  Runner(Engine& e, std::vector<std::vector<int32_t>> s) : engine(e), sequences(std::move(s)), logits(sequences.size()) {
    const int64_t n = int64_t(sequences.size());
    for (int64_t i = 0; i < n; ++i) {
      pages.emplace_back();
      for (int64_t at = 0; at < int64_t(sequences[size_t(i)].size()); at += 64) pages.back().push_back(int32_t(i + n * int64_t(pages.back().size())));
      std::reverse(pages.back().begin(), pages.back().end());
      logits[size_t(i)].resize(sequences[size_t(i)].size());
    }
  }
  struct Part { size_t sequence; int64_t start, count; };
  void step(const std::vector<Part>& parts) {
    Batch b;
    for (const Part& p : parts)
      b.chunks.push_back({std::span(sequences[p.sequence]).subspan(size_t(p.start), size_t(p.count)), p.start, pages[p.sequence], 0});
    const auto out = engine.run(b);
    const size_t vocab = size_t(engine.manifest().model.vocab);
    size_t at = 0;
    for (const Part& p : parts)
      for (int64_t i = 0; i < p.count; ++i, at += vocab) logits[p.sequence][size_t(p.start + i)].assign(out.begin() + long(at), out.begin() + long(at + vocab));
    ASSERT_EQ(at, out.size());
  }
  // `chunk` tokens of every sequence per step; 0: everything in one step.
  void run_all(int64_t chunk, bool together) {
    size_t longest = 0;
    for (const auto& s : sequences) longest = std::max(longest, s.size());
    if (chunk == 0) chunk = int64_t(longest);
    for (int64_t at = 0; at < int64_t(longest); at += chunk) {
      std::vector<Part> parts;
      for (size_t i = 0; i < sequences.size(); ++i)
        if (at < int64_t(sequences[i].size())) parts.push_back({i, at, std::min(chunk, int64_t(sequences[i].size()) - at)});
      if (together)
        step(parts);
      else
        for (const Part& p : parts) step({p});
    }
  }
};

void expect_same_bits(const std::vector<Logits>& a, const std::vector<Logits>& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t s = 0; s < a.size(); ++s)
    for (size_t t = 0; t < a[s].size(); ++t)
      ASSERT_EQ(std::memcmp(a[s][t].data(), b[s][t].data(), a[s][t].size() * 4), 0) << what << ": sequence " << s << " position " << t;
}

constexpr float kSomeRows = 0.012f;  // a scale that some rows of the test models exceed and others do not

std::vector<std::pair<std::string, ModelShape>> shapes() {
  std::vector<std::pair<std::string, ModelShape>> all;
  ModelShape s;
  s.moe = false;
  all.emplace_back("dense float", s);
  s = {};
  s.extras = s.sinks = true;
  s.window = 20;
  all.emplace_back("experts, sinks, window", s);
  s = {};
  s.index = s.interleaved = true;
  s.packing = Packing::kPackedBF16;
  all.emplace_back("block index, bf16", s);
  s = {};
  s.packing = Packing::kPackedI8;
  s.extras = s.softcap = true;
  all.emplace_back("int8", s);
  s = {};
  s.packing = Packing::kPackedI4;
  s.extras = true;
  all.emplace_back("int4", s);
  for (const bool saturate : {false, true}) {
    s = {};
    s.packing = saturate ? Packing::kPackedI8 : Packing::kPackedI4;
    s.stored_scale = kSomeRows;
    s.saturate = saturate;
    all.emplace_back(saturate ? "int8, scales that saturate" : "int4, static scales", s);
  }
  for (size_t i = 0, n = all.size(); i < n; ++i) {
    s = all[i].second;
    s.fused = true;
    all.emplace_back(all[i].first + ", fused", s);
  }
  return all;
}

std::vector<hw::CpuFeatures> builds() {
  const hw::CpuFeatures machine = hw::detect_cpu();
  std::vector<hw::CpuFeatures> all = {{}};
  if (machine.avx2) all.push_back({.avx2 = true});
  if (machine.avx512) all.push_back({.avx2 = true, .avx512 = true});
  all.push_back(machine);
  return all;
}

TEST(Engine, LogitsAreThoseOfTheSlowTwin) {
  hw::ThreadPool pool(2);
  for (const auto& [name, shape] : shapes()) {
    const TestModel model(shape);
    const auto engine = model.load(pool);
    const auto ids = random_ids(1, 90);
    Runner r(*engine, {ids});
    r.run_all(0, true);
    const auto exact = Oracle::run(model, ids);
    // Float: roundings of a few hundred operations in a row. int8 activations: now and then a value on the edge between two steps of the
    // grid falls to the other side, which moves everything after it: compared in the mean.
    double worst = 0, squares = 0, size = 0;
    for (size_t t = 0; t < exact.size(); ++t)
      for (size_t j = 0; j < exact[t].size(); ++j) {
        const double d = r.logits[0][t][j] - exact[t][j];
        worst = std::max(worst, std::abs(d));
        squares += d * d;
        size += exact[t][j] * exact[t][j];
      }
    if (shape.packing == Packing::kPackedI8 || shape.packing == Packing::kPackedI4)
      EXPECT_LT(std::sqrt(squares / size), 0.02) << name;
    else
      EXPECT_LT(worst, 1e-4) << name;
    EXPECT_GT(size / double(exact.size()), 1) << name << ": logits of nothing";
  }
}

TEST(Engine, SameBitsAloneOrTogetherInAnyChunksOnAnyThreads) {
  const std::vector<std::vector<int32_t>> sequences = {random_ids(2, 100), random_ids(3, 1), random_ids(4, 64), random_ids(5, 37)};
  for (const auto& [name, shape] : shapes()) {
    const TestModel model(shape);
    std::vector<Logits> expected;
    for (int threads : {1, 2, 3}) {
      hw::ThreadPool pool(threads);
      const auto engine = model.load(pool);
      for (int64_t chunk : {0, 1, 7, 64})
        for (bool together : {true, false}) {
          Runner r(*engine, sequences);
          r.run_all(chunk, together);
          if (expected.empty()) expected = r.logits;
          expect_same_bits(expected, r.logits, fmt::format("{}: {} threads, chunks of {}, {}", name, threads, chunk, together ? "together" : "alone"));
        }
    }
  }
}

TEST(Engine, AStoredScaleChangesTheRowsAboveItAndNoOthers) {
  hw::ThreadPool pool(2);
  const auto logits = [&](float stored, bool saturate, bool fused) {
    ModelShape s;
    s.packing = Packing::kPackedI8;
    s.stored_scale = stored;
    s.saturate = saturate;
    s.fused = fused;
    const TestModel model(s);
    const auto engine = model.load(pool);
    Runner r(*engine, {random_ids(8, 40)});
    r.run_all(0, true);
    return r.logits;
  };
  const auto differ = [](const std::vector<Logits>& a, const std::vector<Logits>& b) { return a != b; };
  for (const bool fused : {false, true}) {
    const auto high = logits(1e6f, true, fused);  // never reached
    EXPECT_TRUE(differ(logits(1e6f, false, fused), high));  // a static one loses everything
    EXPECT_FALSE(differ(logits(1e-4f, true, fused), logits(1e-4f, false, fused)));  // every row is above
    EXPECT_TRUE(differ(logits(kSomeRows, true, fused), high));
    EXPECT_TRUE(differ(logits(kSomeRows, true, fused), logits(kSomeRows, false, fused)));  // rows below keep their own
  }
}

TEST(Engine, SameBitsOnEveryIsaAndForFusedAndSingleOps) {
  const std::vector<std::vector<int32_t>> sequences = {random_ids(6, 70), random_ids(7, 20)};
  hw::ThreadPool pool(2);
  const auto all = shapes();
  for (const auto& [kv, order] : {std::pair("f32", "auto"), std::pair("bf16", "pairs"), std::pair("bf16", "tiles"), std::pair("int8", "auto")})
    for (size_t i = 0; i < all.size() / 2; ++i) {
      std::vector<Logits> expected;
      for (const auto& [name, shape] : {all[i], all[i + all.size() / 2]}) {
        const TestModel model(shape);
        for (const auto& cpu : builds()) {
          LoadOptions o;
          o.kv_type = kv;
          o.attention_order = order;
          o.cpu = cpu;
          const auto engine = model.load(pool, o);
          Runner r(*engine, sequences);
          r.run_all(16, true);
          if (expected.empty()) expected = r.logits;
          expect_same_bits(expected, r.logits, fmt::format("{}, {} cache, {}, {}", name, kv, order, hw::describe(cpu)));
        }
      }
    }
}

TEST(Engine, KvTypesStayNearTheFloatCache) {
  const TestModel model(ModelShape{});
  hw::ThreadPool pool(1);
  std::vector<Logits> all;
  for (const char* kv : {"f32", "bf16", "int8"}) {
    LoadOptions o;
    o.kv_type = kv;
    const auto engine = model.load(pool, o);
    Runner r(*engine, {random_ids(8, 60)});
    r.run_all(0, true);
    all.push_back(r.logits[0]);
  }
  for (size_t k : {1, 2}) {
    double d = 0, size = 0;
    for (size_t t = 0; t < 60; ++t)
      for (size_t j = 0; j < 50; ++j) {
        d += std::pow(all[k][t][j] - all[0][t][j], 2);
        size += std::pow(all[0][t][j], 2);
      }
    EXPECT_GT(d, 0);
    EXPECT_LT(std::sqrt(d / size), 0.05);
  }
}

TEST(Engine, LogitsOnlyForTheRowsAskedFor) {
  const TestModel model(ModelShape{});
  hw::ThreadPool pool(1);
  const auto engine = model.load(pool);
  const auto ids = random_ids(9, 30);
  Runner all(*engine, {ids});
  all.run_all(0, true);
  const std::vector<int32_t> pages = {5};
  const std::span<const int32_t> tokens(ids);
  EXPECT_TRUE(engine->run({{{tokens.first(20), 0, pages, 20}}}).empty()) << "a chunk in the middle of a prompt wants none";
  const auto last = engine->run({{{tokens.subspan(20), 20, pages, 8}}});
  ASSERT_EQ(last.size(), 2u * 50);
  for (size_t r = 0; r < 2; ++r) EXPECT_EQ(std::memcmp(last.data() + r * 50, all.logits[0][28 + r].data(), 200), 0);
  EXPECT_TRUE(engine->run({}).empty());
}

TEST(Engine, TapsSeeRowsAsFloats) {
  ModelShape shape;
  shape.packing = Packing::kPackedI8;
  shape.fused = true;
  const TestModel model(shape);
  hw::ThreadPool pool(1);
  const auto engine = model.load(pool);
  const auto ids = random_ids(10, 12);
  int layers = 0, routes = 0, quantized = 0;
  std::vector<float> residual;
  Tap tap;
  tap.want = [&](const artifact::Instr& i, bool input) { return input ? i.op == Op::kLinear : i.layer_output || i.op == Op::kRoute; };
  tap.see = [&](const TapEvent& e) {
    ASSERT_EQ(e.rows, 12);
    if (e.is_input) {
      if (e.operand->type.elem != Elem::kQ8) return;
      ++quantized;
      for (int64_t r = 0; r < e.rows; ++r) {      // 127 steps up to the largest
        float top = 0;
        for (int64_t j = 0; j < e.cols; ++j) top = std::max(top, std::abs(e.values[r * e.cols + j]));
        const float step = e.values[r * e.cols] / (top / 127);
        EXPECT_NEAR(step, std::round(step), 1e-3);
      }
    } else if (e.instr->op == Op::kRoute) {
      ++routes;
      for (int64_t r = 0; r < e.rows; ++r) {
        EXPECT_LT(e.ids[2 * r], e.ids[2 * r + 1]);
        EXPECT_NEAR(e.values[2 * r] + e.values[2 * r + 1], 1.5, 1e-5) << "renormalised, scaled by 1.5";
      }
    } else {
      ++layers;
      EXPECT_EQ(e.cols, 48);
      if (e.instr->layer == -1) residual.assign(e.values, e.values + e.rows * e.cols);
    }
  };
  engine->set_tap(&tap);
  Runner r(*engine, {ids});
  r.run_all(0, true);
  EXPECT_EQ(layers, 3);
  EXPECT_EQ(routes, 2);
  EXPECT_EQ(quantized, 4);
  const auto& table = model.values(model.manifest().program[0].weights[0].tensor);
  for (size_t t = 0; t < 12; ++t)
    for (size_t j = 0; j < 48; ++j) ASSERT_EQ(residual[t * 48 + j], table[size_t(ids[t]) * 48 + j]);
  engine->set_tap(nullptr);
  r.run_all(0, true);
  EXPECT_EQ(layers, 3) << "no tap, no events";
}

TEST(Engine, WeightsInMemoryOrMappedAreTheSame) {
  const TestModel model(ModelShape{});
  hw::ThreadPool pool(2);
  const auto ids = random_ids(5, 20);
  std::vector<Logits> found;
  for (const char* place : {"read", "map", "auto"}) {
    LoadOptions o;
    o.weights = place;
    const auto engine = model.load(pool, o);
    EXPECT_NE(engine->weights_place().find(std::string_view(place) == "map" ? "mapped" : "read into memory"), std::string::npos) << engine->weights_place();
    Runner r(*engine, {ids});
    r.run_all(0, true);
    found.push_back(r.logits[0]);
  }
  EXPECT_EQ(found[0], found[1]);
  EXPECT_EQ(found[0], found[2]);
}

TEST(Engine, StreamedExpertsGiveTheSameBitsFromACacheOfAnySize) {
  for (const auto& [name, shape] : shapes()) {
    if (!shape.moe) continue;
    const TestModel model(shape);
    hw::ThreadPool two(2);
    const auto in_memory = model.load(two);
    Runner whole(*in_memory, {random_ids(5, 20), random_ids(6, 9)});
    whole.run_all(1, true);
    LoadOptions o;
    o.expert_cache_bytes = int64_t(1) << 30;
    const int64_t all = model.load(two, o)->memory()[1].bytes;
    for (const int threads : {1, 3})
      for (const int64_t part : {1, 2, shape.fused ? 12 : 5}) {   // two layers of six experts: a twelfth is one of them
        hw::ThreadPool pool(threads);
        o.expert_cache_bytes = all / part;
        const auto engine = model.load(pool, o);
        Runner r(*engine, {random_ids(5, 20), random_ids(6, 9)});
        for (const int64_t chunk : {1, 7, 0}) {
          r.run_all(chunk, true);
          expect_same_bits(r.logits, whole.logits, name + ", a cache for one of " + std::to_string(part));
        }
        const StreamStats s = *engine->stream_stats();
        EXPECT_GT(s.misses, 0);
        EXPECT_EQ(s.held < s.experts, part > 1) << name << ": " << s.held << " of " << s.experts;
        if (part == 12) EXPECT_EQ(s.held, 1);
      }
  }
  const TestModel dense(ModelShape{.moe = false});
  hw::ThreadPool pool(1);
  LoadOptions o;
  o.expert_cache_bytes = 1 << 20;
  const auto refused = Engine::load(dense.dir(), o, pool);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.error().message().find("no experts to stream"), std::string::npos);
  o.expert_cache_bytes = 1;
  EXPECT_NE(Engine::load(TestModel(ModelShape{}).dir(), o, pool).error().message().find("are the least that works"), std::string::npos);
}

TEST(Engine, ExpertsInAnotherOrderGiveTheSameBits) {
  for (auto [name, shape] : shapes()) {
    if (!shape.moe) continue;
    hw::ThreadPool pool(2);
    const TestModel plain(shape);
    const auto by_number = plain.load(pool);
    Runner want(*by_number, {random_ids(5, 20), random_ids(6, 9)});
    want.run_all(1, true);
    shape.reordered = true;
    const TestModel model(shape);
    EXPECT_EQ(model.manifest().format_version, 5);
    LoadOptions o;
    o.expert_cache_bytes = int64_t(1) << 30;
    const int64_t all = model.load(pool, o)->memory()[1].bytes;
    for (const int64_t cache : {int64_t(0), all, all / 2}) {
      o.expert_cache_bytes = cache;
      const auto engine = model.load(pool, o);
      Runner r(*engine, {random_ids(5, 20), random_ids(6, 9)});
      for (const int64_t chunk : {1, 7, 0}) {
        r.run_all(chunk, true);
        expect_same_bits(r.logits, want.logits, name + ", a cache of " + std::to_string(cache));
      }
    }
  }
}

TEST(Engine, WeightsGoToMemoryNodesOrSayWhyNot) {
  const TestModel model(ModelShape{});
  hw::ThreadPool pool(1);
  LoadOptions o;
  o.weights = "read";
  const std::string refused = "placed by the kernel";
  o.weight_nodes = {5000};  // more nodes than a kernel can have
  EXPECT_NE(model.load(pool, o)->weights_place().find(refused), std::string::npos);
  o.weight_nodes = {5000, 5001};
  o.expert_chances[0] = std::vector<float>(6, 0.3f);
  EXPECT_NE(model.load(pool, o)->weights_place().find(refused), std::string::npos);
  o.weight_nodes = {0};
  EXPECT_EQ(model.load(pool, o)->weights_place().find("5000"), std::string::npos);
}

// Two nodes; the experts that most tokens choose stand in every second block, which dealing out in turn would put on one node.
TEST(Engine, BlocksOfEachLayerAreSharedOutByWhatIsReadOfThem) {
  ModelShape shape;
  shape.experts = 8;
  shape.hidden = shape.inner = 64;
  shape.fused = true;
  const TestModel model(shape);
  const artifact::Manifest& m = model.manifest();
  const int64_t block = 64 * 64 * 4;  // of an expert's matrix
  std::map<int32_t, std::vector<float>> chances;
  for (int32_t l = 0; l < 2; ++l) chances[l] = {0.9f, 0.1f, 0.9f, 0.1f, 0.9f, 0.1f, 0.9f, 0.1f};
  const std::vector<int> plan = plan_blocks(m, chances, {0, 1}, block);
  ASSERT_EQ(int64_t(plan.size()), (m.memory.weight_bytes + block - 1) / block);
  for (int32_t layer = 0; layer < 2; ++layer) {
    double read[2] = {}, in_turn[2] = {};
    for (const artifact::Instr& i : m.program)
      for (const artifact::InstrWeight& x : i.weights) {
        const artifact::WeightTensor& w = m.weights[size_t(x.tensor)];
        if (i.layer != layer || i.op != Op::kGroupedExperts || w.packing == Packing::kPlain) continue;
        for (int64_t e = 0; e < w.experts; ++e)
          for (int64_t at = w.offset + e * w.expert_stride; at < w.offset + (e + 1) * w.expert_stride; at += 64) {
            read[plan[size_t(at / block)]] += 64 * double(chances[layer][size_t(e)]);
            in_turn[at / block % 2] += 64 * double(chances[layer][size_t(e)]);
          }
      }
    EXPECT_NEAR(read[0] / (read[0] + read[1]), 0.5, 0.08) << "layer " << layer << "; in turn " << in_turn[0] << " and " << in_turn[1];
  }
  EXPECT_NEAR(double(std::count(plan.begin(), plan.end(), 0)), double(plan.size()) / 2, 3);
}

TEST(Engine, TimesCoverEveryInstructionOfEveryStep) {
  ModelShape shape;
  shape.packing = Packing::kPackedI8;
  shape.fused = true;
  const TestModel model(shape);
  hw::ThreadPool pool(2);
  const auto engine = model.load(pool);
  const auto ids = random_ids(11, 20);
  const std::vector<int32_t> pages = {0};
  const std::span<const int32_t> tokens(ids);
  Timing t;
  t.steps = 99;
  engine->set_timing(&t);
  const auto& program = model.manifest().program;
  ASSERT_EQ(t.instrs.size(), program.size());
  EXPECT_EQ(t.steps, 0) << "set_timing starts anew";
  const int64_t jobs = pool.jobs();
  engine->run({{{tokens.first(12), 0, pages, 12}}});      // no logits: the head is left out
  engine->run({{{tokens.subspan(12), 12, pages, 7}}});
  EXPECT_EQ(t.steps, 2);
  int64_t sum = 0, counted = 0, left_out = 0, last = -1;
  for (size_t n = 0; n < program.size(); ++n) {
    const bool head = program[n].out[0].type.rows == Rows::kLogit;
    EXPECT_EQ(t.instrs[n].calls, head ? 1 : 2) << program[n].name;
    EXPECT_GT(t.instrs[n].ns, 0) << program[n].name;
    EXPECT_GT(t.instrs[n].start_ns, last) << "in the order of the program";
    last = t.instrs[n].start_ns;
    sum += t.instrs[n].ns;
    counted += t.instrs[n].pool_jobs;
    left_out += head;
  }
  EXPECT_GT(left_out, 0);
  EXPECT_LE(sum, t.ns);
  EXPECT_EQ(counted, pool.jobs() - jobs) << "the pool works for instructions only";
  engine->set_timing(nullptr);
  engine->run({{{tokens.first(1), 0, pages, 0}}});
  EXPECT_EQ(t.steps, 2) << "no timing, no times";
}

TEST(Engine, SameLogitsWithTimes) {
  const TestModel model(ModelShape{});
  hw::ThreadPool pool(2);
  const auto engine = model.load(pool);
  Runner plain(*engine, {random_ids(12, 30)}), timed(*engine, {random_ids(12, 30)});
  plain.run_all(7, true);
  Timing t;
  engine->set_timing(&t);
  timed.run_all(7, true);
  expect_same_bits(plain.logits, timed.logits, "timed");
}

TEST(Engine, SaysWhichKernelRunsAnInstructionAndWhy) {
  ModelShape shape;
  shape.packing = Packing::kPackedI8;
  const TestModel model(shape);
  hw::ThreadPool pool(1);
  LoadOptions o;
  o.cpu = hw::CpuFeatures{};
  const auto engine = model.load(pool, o);
  const auto& program = model.manifest().program;
  int matrices = 0;
  for (size_t n = 0; n < program.size(); ++n) {
    const KernelChoice k = engine->kernel_choice(n);
    EXPECT_FALSE(k.kernel.empty());
    EXPECT_FALSE(k.why.empty());
    if (k.kernel.find("gemm_i8") == std::string::npos) continue;
    ++matrices;
    EXPECT_EQ(k.kernel, "int8 gemm_i8_scalar");
    EXPECT_NE(k.why.find("every CPU runs"), std::string::npos) << k.why;
    for (const kernels::GemmKernel& other : kernels::gemm_kernels()) {
      if (other.format == kernels::GemmFormat::kI8 && *other.needs) {
        EXPECT_NE(k.why.find(other.name), std::string::npos) << "why not " << other.name;
      }
    }
  }
  EXPECT_GT(matrices, 2);
}

TEST(Engine, TheOrderOfSumsOverABfloat16CacheIsChosenOnce) {
  const TestModel model(ModelShape{});
  hw::ThreadPool pool(1);
  const auto with = [&](const char* kv, const char* order, const hw::CpuFeatures& cpu) {
    LoadOptions o;
    o.kv_type = kv;
    o.attention_order = order;
    o.cpu = cpu;
    return model.load(pool, o);
  };
  const auto attention = [&](const Engine& e) {
    for (size_t n = 0; n < model.manifest().program.size(); ++n)
      if (model.manifest().program[n].op == Op::kAttention) return e.kernel_choice(n);
    return KernelChoice{};
  };
  const hw::CpuFeatures machine = hw::detect_cpu();
  hw::CpuFeatures plain = machine;
  plain.amx_bf16 = false;
  EXPECT_EQ(with("f32", "auto", machine)->options().attention_order, "ascending");
  for (const char* kv : {"", "f32", "int8"}) {
    LoadOptions o;
    o.kv_type = kv;
    o.attention_order = "tiles";
    const auto refused = Engine::load(model.dir(), o, pool);
    ASSERT_FALSE(refused.ok()) << kv;
    EXPECT_EQ(refused.error().code(), ErrorCode::kUsage);
    EXPECT_NE(refused.error().message().find("have one order"), std::string::npos) << refused.error().message();
  }
  LoadOptions again = with("f32", "auto", machine)->options();
  EXPECT_TRUE(Engine::load(model.dir(), again, pool).ok()) << "what was loaded loads again";
  again.kv_type = "bf16";
  EXPECT_FALSE(Engine::load(model.dir(), again, pool).ok());
  EXPECT_EQ(with("bf16", "auto", plain)->options().attention_order, "pairs");
  const bool amx = kernels::attention_uses_bf16(kernels::SumOrder::kTiles, machine);
  EXPECT_EQ(with("bf16", "auto", machine)->options().attention_order, amx ? "tiles" : "pairs");
  EXPECT_EQ(with("bf16", "pairs", machine)->options().attention_order, "pairs");
  const auto tiles = with("bf16", "tiles", plain);
  EXPECT_EQ(tiles->options().attention_order, "tiles");
  EXPECT_NE(attention(*tiles).why.find("no instruction (amx_bf16)"), std::string::npos) << attention(*tiles).why;
  if (amx) {
    const KernelChoice k = attention(*with("bf16", "auto", machine));
    EXPECT_EQ(k.kernel, "bf16 cache, amx_bf16");
    EXPECT_NE(k.why.find("tiles"), std::string::npos) << k.why;
  }
}

TEST(Engine, SaysWhereItsMemoryIs) {
  const TestModel model(ModelShape{});
  hw::ThreadPool pool(1);
  const auto engine = model.load(pool);
  const auto parts = engine->memory();
  ASSERT_EQ(parts.size(), 3u);
  EXPECT_EQ(parts[0].bytes, model.manifest().memory.weight_bytes);
  EXPECT_EQ(parts[1].bytes, engine->kv_pages() * engine->kv_page_bytes());
  EXPECT_EQ(parts[2].bytes, engine->arena_bytes());
  for (const MemoryPart& p : parts) EXPECT_NE(p.data, nullptr) << p.name;
}

TEST(Engine, RoomForHugeStepsTakesNoMemoryBeforeOneRuns) {
  const TestModel model(ModelShape{});
  hw::ThreadPool pool(1);
  LoadOptions o;
  const auto resident = [&](int64_t rows) {
    o.max_tokens_per_step = rows;
    const auto engine = model.load(pool, o);
    const std::vector<MemoryPart> parts = engine->memory();
    const auto r = hw::resident_part(parts[2].data, parts[2].bytes);
    EXPECT_TRUE(r.ok()) << r.error().message();
    return double(r->total()) / double(engine->arena_bytes());
  };
  EXPECT_GT(resident(0), 0.9) << "so that the first prompt does not pay for it";
  EXPECT_LT(resident(1 << 15), 0.1);
}

TEST(Engine, SaysWhatItLoadedAndRefusesWhatItCannot) {
  const TestModel model(ModelShape{});
  hw::ThreadPool pool(1);
  LoadOptions o;
  o.kv_pages = 3;
  o.max_tokens_per_step = 16;
  int64_t seen = 0, total = 0;
  o.progress = [&](int64_t d, int64_t t) {
    seen = d;
    total = t;
  };
  const auto engine = model.load(pool, o);
  EXPECT_EQ(seen, total);
  EXPECT_EQ(total, model.manifest().memory.weight_bytes);
  EXPECT_EQ(engine->kv_pages(), 3);
  EXPECT_EQ(engine->kv_page_bytes(), 2 * 64 * 2 * (16 + 16) * 4) << "layers * tokens * heads * (keys + values) * float";
  EXPECT_EQ(engine->arena_bytes(), 16 * model.manifest().memory.activation_bytes_per_token);
  const auto lines = engine->kernel_choices();
  ModelShape int4;
  int4.packing = Packing::kPackedI4;
  const auto other = TestModel(int4).load(pool)->kernel_choices();
  EXPECT_TRUE(std::any_of(other.begin(), other.end(), [](const std::string& l) { return l.find("int4 in groups of 32 gemm_i4") != std::string::npos; })) << other[0];
  EXPECT_TRUE(std::any_of(lines.begin(), lines.end(), [](const std::string& l) { return l.find("gemm_f32") != std::string::npos; })) << lines[0];

  o.max_tokens_per_step = 0;
  EXPECT_EQ(model.load(pool, o)->options().max_tokens_per_step, 2048) << "a small model's activations are small";
  o.kv_type = "fp4";
  auto refused = Engine::load(model.dir(), o, pool);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), ErrorCode::kUsage);
  EXPECT_NE(refused.error().message().find("f32, bf16 or int8"), std::string::npos);
  o = {};
  o.attention_order = "falling";
  refused = Engine::load(model.dir(), o, pool);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.error().message().find("auto, pairs or tiles"), std::string::npos);
  o = {};
  o.weights = "disk";
  refused = Engine::load(model.dir(), o, pool);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.error().message().find("auto, read or map"), std::string::npos);
  o = {};
  o.kv_pages = int64_t(1) << 45;
  refused = Engine::load(model.dir(), o, pool);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), ErrorCode::kEnvironment) << refused.error().message();
  EXPECT_FALSE(Engine::load("/nonexistent", {}, pool).ok());
}

TEST(EngineDeathTest, PreconditionsOfAStep) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const TestModel model(ModelShape{});
  hw::ThreadPool pool(1);
  LoadOptions o;
  o.kv_pages = 2;
  o.max_tokens_per_step = 80;
  const auto engine = model.load(pool, o);
  const std::vector<int32_t> ids(81, 1), bad = {50}, pages = {0, 1}, beyond = {2};
  EXPECT_DEATH(engine->run({{{ids, 0, pages, 0}}}), "more than 80 tokens");
  EXPECT_DEATH(engine->run({{{bad, 0, pages, 0}}}), "token 50");
  EXPECT_DEATH(engine->run({{{std::span(ids).first(1), 0, beyond, 0}}}), "page 2 of 2");
  EXPECT_DEATH(engine->run({{{std::span(ids).first(70), 0, std::span(pages).first(1), 0}}}), "1 pages for 70 tokens");
}

}  // namespace
}  // namespace mi::exec
