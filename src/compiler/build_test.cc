#include "compiler/build.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <csignal>

#include "artifact/layout.h"
#include "artifact/reader.h"
#include "compiler/testing.h"
#include "ir/pipeline.h"
#include "kernels/gemm/pack.h"

namespace mi::compiler {
namespace {

namespace fs = std::filesystem;

class Build : public ::testing::Test {
 protected:
  void SetUp() override {
    Progress::set_quiet(true);
    dir_ = fs::path(::testing::TempDir()) / fmt::format("mi-build-{}", getpid());
    fs::remove_all(dir_);
    fs::create_directories(dir_);
  }
  void TearDown() override { fs::remove_all(dir_); }

  BuildOptions options(const std::string& matrices,
                       const std::function<void(const std::string&, std::vector<float>&)>& change = {}) {
    return options_of_text(testing::tiny_mir(matrices), change);
  }
  BuildOptions options_of_text(const std::string& text,
                               const std::function<void(const std::string&, std::vector<float>&)>& change = {}) {
    BuildOptions o;
    o.model = dir_ / "mir";
    o.output = dir_ / "engine";
    fs::remove_all(o.model);
    const Status s = testing::write_tiny_mir(o.model, text, change);
    MI_CHECK(s.ok(), "{}", s.error().message());
    return o;
  }
  void failed(const Result<BuildReport>& r, ErrorCode code, const std::string& words) {
    ASSERT_FALSE(r.ok());
    EXPECT_EQ(r.error().code(), code);
    EXPECT_NE(r.error().message().find(words), std::string::npos) << r.error().message();
  }
  std::vector<std::string> names_in_dir() {
    std::vector<std::string> names;
    for (const auto& e : fs::directory_iterator(dir_)) names.push_back(e.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
  }

  Path dir_;
};

Result<artifact::LoadedArtifact> open_checked(const Path& dir) {
  MI_TRY(artifact::LoadedArtifact a, artifact::open_artifact(dir));
  MI_TRY_VOID(artifact::verify_weights(a, [](int64_t tasks, const auto& f) {
    for (int64_t i = 0; i < tasks; ++i) f(i, 0);
  }));
  return a;
}

const artifact::WeightTensor& tensor(const artifact::LoadedArtifact& a, const std::string& name) {
  for (const auto& w : a.manifest.weights)
    if (w.name == name) return w;
  MI_CHECK(false, "no tensor {}", name);
}

TEST_F(Build, EveryLevelAndFormatOpens) {
  for (const char* matrices : {"w8a8", "w4a8_g32", "bf16", "f32", "f16"})
    for (const int level : {0, 1, 2}) {
      BuildOptions o = options(matrices);
      o.opt_level = level;
      o.force = true;
      const auto r = build_engine(o);
      ASSERT_TRUE(r.ok()) << matrices << " O" << level << ": " << r.error().message();
      const auto a = open_checked(o.output);
      ASSERT_TRUE(a.ok()) << matrices << " O" << level << ": " << a.error().message();
      EXPECT_EQ(a->manifest.model.precision, std::string(matrices) == "w8a8"       ? "w8a8"
                                             : std::string(matrices) == "w4a8_g32" ? "w4a8"
                                             : std::string(matrices) == "bf16"     ? "bf16"
                                                                                   : "fp32");
      EXPECT_EQ(a->manifest.format_version, level == 0 ? (a->manifest.model.precision == "w4a8" ? 2 : 1) : 4);
      EXPECT_EQ(a->manifest.default_kv, a->manifest.model.precision == "fp32" ? "f32" : "bf16");
      EXPECT_EQ(a->manifest.options.at("opt_level"), fmt::format("O{}", level));
      for (const char* file : {"graph.mir", "report.html", "tokenizer/tokenizer.json"})
        EXPECT_TRUE(fs::exists(o.output / file)) << file;
      EXPECT_EQ(a->manifest.passes.size(), ir::passes().size());
      EXPECT_LE(r->peak_activation_bytes, a->manifest.memory.activation_bytes_per_token);
      EXPECT_LT(a->manifest.memory.activation_bytes_per_token, r->unshared_activation_bytes);
    }
}

TEST_F(Build, FusionShrinksTheProgram) {
  BuildOptions o = options("w8a8");
  o.force = true;
  o.opt_level = 0;
  const auto plain = build_engine(o);
  o.opt_level = 2;
  const auto fused = build_engine(o);
  o.disabled_passes = {"fuse_qkv"};
  const auto partly = build_engine(o);
  ASSERT_TRUE(plain.ok() && fused.ok() && partly.ok());
  EXPECT_LT(fused->manifest.program.size(), partly->manifest.program.size());
  EXPECT_LT(partly->manifest.program.size(), plain->manifest.program.size());
  EXPECT_TRUE(partly->manifest.passes[1].skipped);
  o.disabled_passes = {"fuse_everything"};
  failed(build_engine(o), ErrorCode::kUsage, "fuse_everything");
}

// Layers 1 and 2 of the tiny model: pairs that are no neighbours, always, or any two of the six experts.
artifact::ExpertProfile choices(bool pairs) {
  artifact::ExpertProfile p{"tiny", "test.jsonl", 600, {{1, 6, 2, {}}, {2, 6, 2, {}}}};
  for (auto& l : p.layers)
    for (uint64_t t = 0; t < 600; ++t) {
      const int32_t a = int32_t(random_u64(1, t) % 6), b = int32_t((uint64_t(a) + 1 + random_u64(2, t) % 5) % 6);
      const std::pair<int32_t, int32_t> ids = pairs ? std::pair(a % 3, a % 3 + 3) : std::pair(std::min(a, b), std::max(a, b));
      l.ids.insert(l.ids.end(), {ids.first, ids.second});
    }
  return p;
}

TEST_F(Build, ExpertsAreStoredByHowTheyAreChosenAndAreTheSameExperts) {
  for (const char* matrices : {"w8a8", "w4a8_g32", "bf16", "f32"})
    for (const int level : {0, 2}) {
      BuildOptions o = options(matrices);
      o.opt_level = level;
      o.force = true;
      ASSERT_TRUE(build_engine(o).ok());
      const auto plain = open_checked(o.output);
      ASSERT_TRUE(plain.ok());
      const Path profile = dir_ / "experts.json";
      ASSERT_TRUE(artifact::write_expert_profile(choices(true), profile, true).ok());
      o.expert_profile = profile;
      o.output = dir_ / "reordered";
      int replays = 0;
      o.replay_order = [&](const Path& weights, const artifact::Manifest& m, const artifact::ExpertProfile& p) -> Result<OrderReplay> {
        ++replays;
        EXPECT_EQ(int64_t(fs::file_size(weights)), m.memory.weight_bytes);
        return OrderReplay{p.tokens, 2, 1, 20, 10, "of a test"};
      };
      const auto r = build_engine(o);
      ASSERT_TRUE(r.ok()) << r.error().message();
      EXPECT_EQ(replays, 1);
      const auto a = open_checked(o.output);
      ASSERT_TRUE(a.ok()) << matrices << " O" << level << ": " << a.error().message();
      EXPECT_EQ(a->manifest.format_version, 5);
      EXPECT_EQ(a->manifest.options.at("expert_profile"), "600 tokens of test.jsonl");
      int moved = 0;
      for (const artifact::WeightTensor& t : a->manifest.weights) {
        const artifact::WeightTensor& was = tensor(*plain, t.name);
        const bool experts = t.packing != artifact::Packing::kPlain && t.experts == 6;
        EXPECT_EQ(!t.expert_slots.empty(), experts) << t.name;
        if (!experts) continue;
        const auto bytes = [](const artifact::LoadedArtifact& l, int64_t begin, int64_t size, int64_t at) {
          const std::byte* p = l.bytes.data() + begin + at * size;
          return std::vector<std::byte>(p, p + size);
        };
        const int64_t scales = t.scale_offset > 0 ? artifact::scale_bytes(t) / 6 : 0;
        for (int64_t e = 0; e < 6; ++e) {
          const int64_t slot = artifact::expert_slot(t, e);
          moved += slot != e;
          EXPECT_EQ(bytes(*a, t.offset, t.expert_stride, slot), bytes(*plain, was.offset, t.expert_stride, e)) << t.name << " " << e;
          EXPECT_EQ(bytes(*a, t.scale_offset, scales, t.packing == artifact::Packing::kPackedI4 ? slot : e), bytes(*plain, was.scale_offset, scales, e)) << t.name << " " << e;
          const int64_t sums = t.colsum_offset > 0 ? t.n_pad * 4 : 0;
          EXPECT_EQ(bytes(*a, t.colsum_offset, sums, e), bytes(*plain, was.colsum_offset, sums, e));
        }
      }
      EXPECT_GT(moved, 0);
      const std::string text = report_text(*r), html = read_file(o.output / "report.html").value();
      for (const std::string& page : {text, html}) {
        EXPECT_NE(page.find("layers 1-2 by how 600 tokens of test.jsonl choose"), std::string::npos) << page;
        EXPECT_NE(page.find("0.500 of the time"), std::string::npos) << page;
      }
      EXPECT_EQ(report_json(*r)["expert_order"]["measured"]["reads_learnt"], 10);
    }
}

TEST_F(Build, WithoutAPromiseTheEngineIsThePlainOne) {
  BuildOptions o = options("w8a8");
  ASSERT_TRUE(build_engine(o).ok());
  const Path plain = o.output, profile = dir_ / "experts.json";
  ASSERT_TRUE(artifact::write_expert_profile(choices(false), profile, true).ok());
  o.expert_profile = profile;
  o.output = dir_ / "kept";
  o.replay_order = [](const Path&, const artifact::Manifest&, const artifact::ExpertProfile&) -> Result<OrderReplay> { MI_CHECK(false, "nothing to measure"); };
  const auto r = build_engine(o);
  ASSERT_TRUE(r.ok()) << r.error().message();
  EXPECT_NE(report_text(*r).find("expert order  kept: by 600 tokens of test.jsonl"), std::string::npos) << report_text(*r);
  for (const char* file : {"weights.bin", "engine.json"}) EXPECT_EQ(read_file(plain / file).value(), read_file(o.output / file).value()) << file;

  artifact::ExpertProfile other = choices(true);
  other.layers[0].k = 1;
  ASSERT_TRUE(artifact::write_expert_profile(other, profile, true).ok());
  o.force = true;
  failed(build_engine(o), ErrorCode::kBadInput, "belongs to another model");
  ASSERT_TRUE(write_file(profile, "{\"format\": 3").ok());
  failed(build_engine(o), ErrorCode::kBadInput, "experts.json");
  ASSERT_TRUE(write_file(profile, "{\"format\": 3}").ok());
  failed(build_engine(o), ErrorCode::kBadInput, "no expert profile");
  EXPECT_TRUE(fs::exists(dir_ / "kept" / "engine.json")) << "what was there stays";
}

TEST_F(Build, Int8NumbersAreWhereTheLayoutSaysTheyAre) {
  const BuildOptions o = options("w8a8");
  ASSERT_TRUE(build_engine(o).ok());
  const auto a = open_checked(o.output);
  ASSERT_TRUE(a.ok());
  // q, k and v of a layer, stacked.
  const std::vector<std::pair<std::string, int64_t>> parts = {
      {"layers.1.attn.q.weight", 32}, {"layers.1.attn.k.weight", 16}, {"layers.1.attn.v.weight", 16}};
  const auto& t = tensor(*a, parts[0].first + "+" + parts[1].first + "+" + parts[2].first);
  const auto* w = reinterpret_cast<const int8_t*>(view_weight(*a, t));
  int64_t row = 0;
  for (const auto& [name, n] : parts)
    for (int64_t i = 0; i < n; ++i, ++row) {
      int32_t sum = 0;
      for (int64_t k = 0; k < t.k_pad; ++k) {
        const int8_t want = k < 24 ? testing::tiny_int8(name, i * 24 + k) : int8_t(0);
        ASSERT_EQ(w[kernels::packed_index(row, k, t.k_pad, 4)], want) << name << " " << i << " " << k;
        sum += want;
      }
      EXPECT_EQ(view_colsums(*a, t)[row], 128 * sum);
      EXPECT_EQ(view_scales(*a, t)[row], testing::tiny_value(name + "_scale", i));
    }
  // Experts behind each other; rows 20..31 are padding.
  const auto& g = tensor(*a, "layers.2.moe.experts.gate.weight");
  EXPECT_EQ(g.n_pad, 32);
  for (int64_t e = 0; e < 6; ++e)
    for (int64_t n = 0; n < 32; ++n) {
      const auto* we = reinterpret_cast<const int8_t*>(view_weight(*a, g) + e * g.expert_stride);
      for (int64_t k = 0; k < 24; ++k)
        ASSERT_EQ(we[kernels::packed_index(n, k, 64, 4)],
                  n < 20 ? testing::tiny_int8(g.name, (e * 20 + n) * 24 + k) : 0);
      EXPECT_EQ(view_scales(*a, g)[e * 32 + n], n < 20 ? testing::tiny_value(g.name + "_scale", e * 20 + n) : 0.0f);
    }
}

TEST_F(Build, Int4NumbersAreWhereTheLayoutSaysTheyAre) {
  const std::string gate = "layers.2.moe.experts.gate.weight";
  const BuildOptions o = options("w4a8_g32", [&](const std::string& n, std::vector<float>& v) {
    if (n == gate + "_scale")
      for (float& x : v) x = -to_f32(to_bf16(x));
  });
  ASSERT_TRUE(build_engine(o).ok());
  const auto a = open_checked(o.output);
  ASSERT_TRUE(a.ok());
  const auto number = [&](const artifact::WeightTensor& t, int64_t e, int64_t n, int64_t k) {
    const auto* w = reinterpret_cast<const uint8_t*>(view_weight(*a, t) + e * t.expert_stride);
    return (w[kernels::packed_i4_byte(n, k, t.k_pad)] >> (k % 8 < 4 ? 0 : 4) & 15) - 8;
  };
  // q, k and v of a layer, stacked. Their scales are no bfloat16 numbers, so they stay floats.
  const std::vector<std::pair<std::string, int64_t>> parts = {
      {"layers.1.attn.q.weight", 32}, {"layers.1.attn.k.weight", 16}, {"layers.1.attn.v.weight", 16}};
  const auto& t = tensor(*a, parts[0].first + "+" + parts[1].first + "+" + parts[2].first);
  EXPECT_EQ(t.group, 32);
  EXPECT_EQ(t.expert_stride, 64 * 64 / 2);
  EXPECT_EQ(t.scale_dtype, DType::kF32);
  EXPECT_EQ(view_colsums(*a, t), nullptr);
  int64_t row = 0;
  for (const auto& [name, n] : parts)
    for (int64_t i = 0; i < n; ++i, ++row) {
      for (int64_t k = 0; k < t.k_pad; ++k)
        ASSERT_EQ(number(t, 0, row, k), k < 24 ? testing::tiny_int4(name, i, 24, k) : 0) << name << " " << i << " " << k;
      EXPECT_EQ(view_scales(*a, t)[kernels::packed_scale_index(row, 0, 1)], testing::tiny_value(name + "_scale", i));
    }
  // Two groups in 40 columns.
  const std::string wide = "layers.0.mlp.down.weight";
  const auto& d = tensor(*a, wide);
  for (int64_t n = 0; n < 24; ++n)
    for (int64_t g = 0; g < 2; ++g)
      EXPECT_EQ(view_scales(*a, d)[kernels::packed_scale_index(n, g, 2)],
                testing::tiny_value(wide + "_scale", n * 2 + g));
  // Experts behind each other; rows 20..31 are padding. Scales of this one are bfloat16 numbers (below 0, too).
  const auto& g = tensor(*a, gate);
  EXPECT_EQ(g.scale_dtype, DType::kBF16);
  for (int64_t e = 0; e < 6; ++e)
    for (int64_t n = 0; n < 32; ++n) {
      for (int64_t k = 0; k < 64; ++k)
        ASSERT_EQ(number(g, e, n, k), n < 20 && k < 24 ? testing::tiny_int4(gate, e * 20 + n, 24, k) : 0);
      const float scale = to_f32(to_bf16(testing::tiny_value(gate + "_scale", e * 20 + n)));
      EXPECT_EQ(to_f32(BF16{view_scales_bf16(*a, g)[e * 32 + kernels::packed_scale_index(n, 0, 1)]}),
                n < 20 ? -scale : 0.0f);
    }
}

TEST_F(Build, FloatNumbersByPrecision) {
  BuildOptions o = options("f32");
  o.force = true;
  o.opt_level = 0;
  for (const char* precision : {"", "fp32", "bf16"}) {
    o.precision = precision;
    ASSERT_TRUE(build_engine(o).ok());
    const auto a = open_checked(o.output);
    ASSERT_TRUE(a.ok());
    const bool half = o.precision == "bf16";
    const std::string name = "layers.0.attn.o.weight", norm = "layers.0.attn.norm.weight",
                      router = "layers.1.moe.router.weight";
    const auto &t = tensor(*a, name), &v = tensor(*a, norm), &r = tensor(*a, router);
    for (int64_t n = 0; n < t.n; ++n)
      for (int64_t k = 0; k < t.k; ++k) {
        const float source = testing::tiny_value(name, n * t.k + k);
        const float got =
            half ? to_f32(BF16{
                       reinterpret_cast<const uint16_t*>(view_weight(*a, t))[kernels::packed_index(n, k, t.k_pad, 2)]})
                 : reinterpret_cast<const float*>(view_weight(*a, t))[kernels::packed_index(n, k, t.k_pad, 1)];
        ASSERT_EQ(got, half ? to_f32(to_bf16(source)) : source);
      }
    for (int64_t i = 0; i < v.n_pad; ++i)
      EXPECT_EQ(reinterpret_cast<const float*>(view_weight(*a, v))[i], i < v.n ? testing::tiny_value(norm, i) : 0.0f);
    EXPECT_EQ(r.packing, artifact::Packing::kPackedF32);
    for (int64_t k = 0; k < r.k; ++k)
      EXPECT_EQ(reinterpret_cast<const float*>(view_weight(*a, r))[kernels::packed_index(3, k, r.k_pad, 1)],
                testing::tiny_value(router, 3 * 24 + k));
  }
}

TEST_F(Build, SameInputSameBytes) {
  BuildOptions o = options("w4a8_g32");
  ASSERT_TRUE(build_engine(o).ok());
  const auto first = read_file(o.output / "weights.bin");
  o.output = dir_ / "again";
  ASSERT_TRUE(build_engine(o).ok());
  EXPECT_EQ(*first, *read_file(o.output / "weights.bin"));
}

TEST_F(Build, OptionsThatMakeNoSense) {
  BuildOptions o = options("bf16");
  const BuildOptions good = o;
  o.target = "tpu";
  failed(build_engine(o), ErrorCode::kUsage, "it builds for: cpu");
  o = good;
  o.opt_level = 3;
  failed(build_engine(o), ErrorCode::kUsage, "O0, O1 or O2");
  o = good;
  o.precision = "int4";
  failed(build_engine(o), ErrorCode::kUsage, "--precision int4");
  o = good;
  o.output = o.model;
  o.force = true;
  failed(build_engine(o), ErrorCode::kUsage, "own folder");
  o.output = dir_;
  failed(build_engine(o), ErrorCode::kUsage, "inside the output");
  o = good;
  o.model = dir_ / "missing";
  failed(build_engine(o), ErrorCode::kBadInput, "missing");
  EXPECT_EQ(names_in_dir(), (std::vector<std::string>{"mir"}));
}

TEST_F(Build, AnExistingEngineStaysUnlessForced) {
  BuildOptions o = options("bf16");
  ASSERT_TRUE(build_engine(o).ok());
  const auto before = *read_file(o.output / "engine.json");
  ASSERT_FALSE(build_engine(o).ok());
  EXPECT_EQ(*read_file(o.output / "engine.json"), before);
  o.force = true;
  o.precision = "fp32";
  ASSERT_TRUE(build_engine(o).ok());
  EXPECT_NE(*read_file(o.output / "engine.json"), before);
}

TEST_F(Build, BadNumbersAreNamedAndLeaveNothing) {
  for (const char* name : {"layers.1.attn.o.weight_scale", "layers.2.moe.norm.weight", "lm_head.weight"}) {
    const BuildOptions o = options("w8a8", [&](const std::string& n, std::vector<float>& v) {
      if (n == name) v[5] = NAN;
    });
    failed(build_engine(o), ErrorCode::kBadInput, fmt::format("'{}'", name));
    EXPECT_EQ(names_in_dir(), (std::vector<std::string>{"mir"}));
  }
  const BuildOptions o = options("w8a8", [&](const std::string& n, std::vector<float>& v) {
    if (n == "layers.0.attn.q.weight_scale") v[0] = -1;
  });
  failed(build_engine(o), ErrorCode::kBadInput, "negative scale");
  const std::string down = "layers.1.moe.experts.down.weight_scale";
  const BuildOptions int4 = options("w4a8_g32", [&](const std::string& n, std::vector<float>& v) {
    if (n == down) v[7] = INFINITY;
  });
  failed(build_engine(int4), ErrorCode::kBadInput, fmt::format("'{}'", down));
}

TEST_F(Build, AFullDiskIsSaidAndLeavesNothing) {
  const BuildOptions o = options("w8a8");
  const pid_t child = fork();
  if (child == 0) {
    // Files of this process may not grow beyond 8 KB: what a write sees on a full disk, where nothing else can be
    // filled.
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{8192, 8192};
    setrlimit(RLIMIT_FSIZE, &limit);
    const auto r = build_engine(o);
    _exit(!r.ok() && r.error().code() == ErrorCode::kEnvironment &&
                  r.error().message().find("cannot write") != std::string::npos
              ? 0
              : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(names_in_dir(), (std::vector<std::string>{"mir"}));
}

TEST_F(Build, StrictNamesEachFallback) {
  std::string text = testing::tiny_mir("w8a8");
  for (const auto& [from, to] : {std::pair<std::string, std::string>{"attn.o.weight : w8a8", "attn.o.weight : bf16"},
                                 {"linear oq, weight=attn.o", "linear o, weight=attn.o"},
                                 {"  oq = quantize o : q8[T, 32]\n", ""}})
    text.replace(text.find(from), from.size(), to);
  BuildOptions o = options_of_text(text);
  o.strict = true;
  failed(build_engine(o), ErrorCode::kCheckFailed, "layer 0: attn.o.weight");
  EXPECT_EQ(names_in_dir(), (std::vector<std::string>{"mir"}));
  o.strict = false;
  const auto r = build_engine(o);
  ASSERT_TRUE(r.ok()) << r.error().message();
  EXPECT_EQ(r->manifest.fallbacks.size(), size_t(1));
  EXPECT_NE(report_text(*r).find("attn.o.weight"), std::string::npos);
  const std::string page = read_file(o.output / "report.html").value();
  EXPECT_NE(page.find("layer 0: attn.o.weight"), std::string::npos);
  EXPECT_NE(page.find("<summary>moe: layers 1-2"), std::string::npos);
  EXPECT_EQ(report_json(*r)["fallbacks"].size(), size_t(1));

  o.force = true;
  o.allowed_fallbacks = {"attn.o.*"};
  failed(build_engine(o), ErrorCode::kUsage, "--strict, which is not given");
  o.strict = true;
  EXPECT_TRUE(build_engine(o).ok());
  o.allowed_fallbacks = {"attn.o.*", "mlp.*"};
  failed(build_engine(o), ErrorCode::kUsage, "--allow-fallback mlp.*: no fallback");
  o.allowed_fallbacks = {"attn.o"};
  failed(build_engine(o), ErrorCode::kUsage, "--allow-fallback attn.o: no fallback");
}

TEST_F(Build, GroupsOfExpertsByHand) {
  BuildOptions o = options("w8a8");
  o.force = true;
  o.expert_groups = {{{1}, 4, {}}, {{2}, 0, {{5, 0}, {1, 2, 3, 4}}}};
  const auto r = build_engine(o);
  ASSERT_TRUE(r.ok()) << r.error().message();
  const auto a = open_checked(o.output);
  ASSERT_TRUE(a.ok()) << a.error().message();
  std::vector<std::vector<std::vector<int32_t>>> found;
  for (const artifact::Instr& i : a->manifest.program)
    if (i.op == Op::kGroupedExperts) found.push_back(i.groups);
  EXPECT_EQ(found, (std::vector<std::vector<std::vector<int32_t>>>{{{0, 1, 2, 3}, {4, 5}}, {{5, 0}, {1, 2, 3, 4}}}));
  EXPECT_NE(report_text(*r).find("expert groups layer 2: 2 groups: [5 0], [1 2 3 4]"), std::string::npos) << report_text(*r);

  const auto wrong = [&](std::vector<ExpertGroups> groups, const std::string& words) {
    o.expert_groups = std::move(groups);
    failed(build_engine(o), ErrorCode::kBadInput, words);
  };
  wrong({{{0}, 2, {}}}, "layer 0 has no grouped experts");
  wrong({{{1}, 2, {}}, {{}, 2, {}}}, "layer 1 is given twice");
  wrong({{{1}, 0, {{0, 1, 2, 3, 4}}}}, "expert 5 of layer 1 is in no group");
  wrong({{{1}, 0, {{0, 1, 2, 3, 4, 5}, {0}}}}, "expert 0 of layer 1 is in two groups");
  wrong({{{1}, 0, {{0, 1, 2, 3, 4, 6}}}}, "layer 1 has experts 0 to 5, not 6");
  o.disabled_passes = {"group_experts"};
  wrong({{{}, 2, {}}}, "no layer has grouped experts");
}

TEST_F(Build, ConversionsAreListedWithTheirReasons) {
  EXPECT_TRUE(find_conversions(ir::parse(testing::tiny_mir("bf16")).value()).empty());
  BuildOptions o = options("w8a8");
  const auto fused = build_engine(o);
  o.force = true;
  o.opt_level = 0;
  const auto plain = build_engine(o);
  ASSERT_TRUE(fused.ok() && plain.ok());
  const auto own = [](const BuildReport& r) {
    int64_t n = 0;
    for (const Conversion& c : r.conversions) n += c.own_call ? c.times : 0;
    return n;
  };
  EXPECT_EQ(own(*plain), 4 * 3);  // of the norms, attention, activation
  EXPECT_EQ(own(*fused), 3);      // of attention
  int64_t floats = 0;
  for (const Conversion& c : fused->conversions) {
    EXPECT_FALSE(c.why.empty() || c.by.empty()) << c.where;
    floats += c.to_int8 ? 0 : c.times;
    if (c.own_call) {
      EXPECT_EQ(c.buffer_bytes, 32 * 4) << c.where;
      EXPECT_NE(c.why.find("different threads"), std::string::npos) << c.why;
    }
  }
  EXPECT_EQ(floats, 4 + 2 * 4);  // dense: qkv, o, gate_up, down; experts: qkv, o, gate with up, down
  EXPECT_NE(report_text(*fused).find("3 kernel calls of their own"), std::string::npos) << report_text(*fused);
  const Json j = report_json(*fused);
  EXPECT_EQ(j["conversions"].size(), fused->conversions.size());
  size_t placed = 0;
  for (const auto& p : j["arena"]["places"]) placed += p["buffers"].size();
  EXPECT_EQ(placed, fused->manifest.buffers.size());
  EXPECT_LT(j["arena"]["places"].size(), placed / 2);
}

TEST_F(Build, ShapesBeforeAndAfterEachPass) {
  BuildOptions o = options("w8a8");
  o.debug_shapes = true;
  const auto r = build_engine(o);
  ASSERT_TRUE(r.ok()) << r.error().message();
  for (const char* part : {"shapes before the passes\n  prologue\n", "shapes after fuse_qkv\n", "shapes after fold_constants: the same\n",
                           "+ qkv                      f32[T, 64]       linear\n", "- n                        f32[T, 24]\n"})
    EXPECT_NE(r->shapes.find(part), std::string::npos) << part << "\n" << r->shapes;
}

TEST_F(Build, AKernelThatThisCpuLacksIsAFallback) {
  const auto r = build_engine(options("w8a8"));
  ASSERT_TRUE(r.ok()) << r.error().message();
  const KernelFallbacks plain = find_kernel_fallbacks(r->manifest, hw::CpuFeatures{});
#if defined(MI_SCALAR_ONLY)
  EXPECT_TRUE(plain.list.empty()) << "this program has no other";
#else
  ASSERT_FALSE(plain.list.empty());
  EXPECT_EQ(plain.list[0].where, "layers 0-2: attn.q.weight+attn.k.weight+attn.v.weight");
  EXPECT_NE(plain.list[0].what.find("linear int8 product by gemm_i8_scalar, the reference"), std::string::npos) << plain.list[0].what;
  EXPECT_NE(plain.list[0].why.find("gemm_i8_avx2 (avx2)"), std::string::npos) << plain.list[0].why;
  EXPECT_EQ(plain.prompt_seconds, 0);
  EXPECT_TRUE(find_kernel_fallbacks(r->manifest, hw::CpuFeatures{.avx2 = true}).list.empty());
#endif
  EXPECT_TRUE(find_kernel_fallbacks(r->manifest, hw::detect_cpu()).list.empty() || !hw::detect_cpu().avx2);
}

TEST_F(Build, KernelCallsFollowThePasses) {
  const auto r = build_engine(options("w8a8"));
  ASSERT_TRUE(r.ok()) << r.error().message();
  ASSERT_EQ(r->kernel_calls.size(), r->manifest.passes.size() + 1);
  EXPECT_EQ(r->kernel_calls.back(), int64_t(r->manifest.program.size()));
  EXPECT_LT(r->kernel_calls.back(), r->kernel_calls.front());
  for (size_t i = 0; i < r->manifest.passes.size(); ++i)
    EXPECT_LE(r->kernel_calls[i + 1], r->kernel_calls[i]) << r->manifest.passes[i].name;
}

TEST_F(Build, KilledAtAnyMomentLeavesNoEngine) {
  const BuildOptions o = options("w8a8");
  int killed = 0;
  for (int delay_us = 0; delay_us < 6000; delay_us += 300) {
    const pid_t child = fork();
    if (child == 0) {
      (void)build_engine(o).ok();
      _exit(0);
    }
    usleep(useconds_t(delay_us));
    kill(child, SIGKILL);
    int status = 0;
    waitpid(child, &status, 0);
    killed += WIFSIGNALED(status);
    if (fs::exists(o.output)) {  // the child was done before the signal
      EXPECT_TRUE(open_checked(o.output).ok());
      fs::remove_all(o.output);
    }
  }
  EXPECT_GT(killed, 0);
  ASSERT_TRUE(build_engine(o).ok());  // and the next run clears what they left
  EXPECT_EQ(names_in_dir(), (std::vector<std::string>{"engine", "mir"}));
}

TEST_F(Build, ReportCountsParameters) {
  const auto r = build_engine(options("bf16"));
  ASSERT_TRUE(r.ok());
  const int64_t attention = 24 + (32 + 16 + 16) * 24 + 24 * 32, dense = 24 + 80 * 24 + 24 * 40, router = 24 + 6 * 24,
                expert = 3 * 20 * 24, table = 50 * 24, ends = 24 + 50 * 24;
  EXPECT_EQ(r->manifest.model.total_params, 3 * attention + dense + 2 * (router + 6 * expert) + table + ends);
  EXPECT_EQ(r->manifest.model.active_params, 3 * attention + dense + 2 * (router + 2 * expert) + ends);
  const std::string text = report_text(*r);
  EXPECT_NE(text.find("2 x 3 layers x 2 KV heads x 8 x 128 tokens x 32 sequences x 2 bytes = 786.43 kB"),
            std::string::npos)
      << text;
}

}  // namespace
}  // namespace mi::compiler
