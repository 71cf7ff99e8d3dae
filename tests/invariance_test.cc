// A request's greedy answer does not depend on what runs beside it, on how prompts are cut, on threads, or on the
// instruction set: byte for byte, on the bundled model, in each order in which attention may add over its bfloat16 cache.
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "base/sanitized.h"
#include "base/util.h"
#include "compiler/build.h"
#include "model/export.h"
#include "quant/quantize.h"
#include "runtime/generate.h"
#include "runtime/stepper.h"
#include "text/model_text.h"

namespace mi {
namespace {

namespace fs = std::filesystem;

constexpr int kRequests = kSanitized ? 6 : 32;
constexpr int64_t kAnswer = 24;

// The bundled model, exported once for all tests of this process; need() quantizes and builds it.
class Invariance : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    Progress::set_quiet(true);
    dir_ = fs::temp_directory_path() / ("mi_invariance_" + std::to_string(getpid()));
    fs::remove_all(dir_);
    fs::create_directory(dir_);
    model::ExportOptions e;
    e.model_dir = fs::path(MI_SOURCE_DIR) / "models/mini-m3";
    e.output = dir_ / "mir";
    ASSERT_TRUE(model::export_model(e).ok());
    read_prompts();
  }
  static void TearDownTestSuite() { fs::remove_all(dir_); }

  static std::vector<runtime::Request> all_requests() {
    std::vector<runtime::Request> all;
    for (const auto& p : prompts_) {
      runtime::Request r;
      r.prompt = p;
      r.sampling.temperature = 0;
      r.max_tokens = kAnswer;
      all.push_back(std::move(r));
    }
    return all;
  }

  // Makes the engine "int8", "int4" or "float" where no earlier test did.
  static void need(const std::string& engine) {
    if (fs::exists(dir_ / engine)) return;
    compiler::BuildOptions b;
    b.output = dir_ / engine;
    if (engine == "float") {
      b.model = dir_ / "mir";
      b.precision = "fp32";
    } else {
      b.model = dir_ / (engine + "-mir");
      quantize(engine == "int4" ? 4 : 8, b.model);
    }
    const auto built = compiler::build_engine(b);
    ASSERT_TRUE(built.ok()) << built.error().message();
  }
  static void quantize(int64_t bits, const fs::path& output) {
    quant::QuantizeOptions q;
    q.model = dir_ / "mir";
    q.output = output;
    q.calibration = fs::path(MI_SOURCE_DIR) / "models/mini-m3-eval/calib.jsonl";
    q.config.calibration_samples = kSanitized ? 4 : 32;
    q.config.weight_bits = bits;
    q.config.rounding = quant::Rounding::kNearest;  // which of two whole numbers a weight became is the same to all engines
    if (bits == 4) q.config.weights = quant::WeightScheme::kPerGroup, q.config.group_size = 64;
    q.compare = false;
    hw::ThreadPool pool(2);
    const auto quantized = quant::quantize(q, pool);
    ASSERT_TRUE(quantized.ok()) << quantized.error().message();
  }

  // Prompts of many lengths, some behind long beginnings, so that they cross KV pages and steps.
  static void read_prompts() {
    const auto text = text::load_model_text(dir_ / "mir" / "tokenizer").value();
    const Json reference = read_json(fs::path(MI_SOURCE_DIR) / "models/mini-m3-eval/results_reference.json").value();
    for (size_t i = 0; i < size_t(kRequests); ++i) {
      std::string prompt = reference["greedy"][i * 2 % 64]["prompt"].get<std::string>();
      if (i % 5 == 0) prompt = "<|begin|><|user|>" + std::string(40 * (i % 4 + 1), 'a') + " " + prompt;
      prompts_.push_back(text.tokenizer->encode(prompt, true).value());
    }
  }

  struct Setting { const char* engine; int threads; int64_t chunk; std::string isa; bool together; const char* order; };
  static std::vector<std::vector<int32_t>> answers(const Setting& s) {
    hw::ThreadPool pool(s.threads);
    exec::LoadOptions l;
    l.max_tokens_per_step = std::max<int64_t>(s.chunk, kRequests);
    l.kv_pages = kRequests * 8;
    l.attention_order = s.order;
    l.cpu = hw::apply_force(hw::detect_cpu(), s.isa).value();
    const auto engine = exec::Engine::load(dir_ / s.engine, l, pool).value();
    runtime::LoopOptions o;
    o.max_batch_size = kRequests;
    o.max_seq_len = 500;
    o.prefill_tokens = o.prefill_tokens_beside_decodes = s.chunk;
    runtime::EngineLoop loop(runtime::make_engine_stepper(*engine, pool), nullptr, o);
    std::vector<runtime::Request> requests = all_requests();
    std::vector<std::vector<int32_t>> out;
    const auto run = [&](std::vector<runtime::Request> rs) {
      const auto done = runtime::generate(loop, std::move(rs)).value();
      for (const auto& c : done) out.push_back(c.tokens);
    };
    if (s.together) {
      run(std::move(requests));
    } else {
      for (auto& r : requests) {
        std::vector<runtime::Request> one;
        one.push_back(std::move(r));
        run(std::move(one));
      }
    }
    return out;
  }

  // Every setting against each request alone, whole prompts, one thread.
  static void check(const char* engine, const std::vector<std::string>& isas, const std::vector<const char*>& orders) {
    ASSERT_NO_FATAL_FAILURE(need(engine));
    for (const char* order : orders) {
      const auto alone = answers({engine, 1, 512, "", false, order});
      ASSERT_EQ(alone.size(), size_t(kRequests));
      // An order changes attention alone: fewer combinations after the first.
      const bool few = kSanitized || order != orders[0];
      for (const std::string& isa : isas)
        for (int threads : few ? std::vector<int>{2} : std::vector<int>{1, 2})
          for (int64_t chunk : few ? std::vector<int64_t>{7} : std::vector<int64_t>{1, 7, 64, 512})
            EXPECT_EQ(answers({engine, threads, chunk, isa, true, order}), alone) << order << ", " << isa << ", " << threads << " threads, chunks of " << chunk;
    }
  }

  static std::vector<std::string> reachable() {
    std::vector<std::string> isas;
    if (!kSanitized) isas.push_back("scalar");
#ifndef MI_SCALAR_ONLY
    const hw::CpuFeatures f = hw::detect_cpu();
    if (f.avx2) isas.push_back("avx2");
    if (f.avx512) isas.push_back("avx512");
    if (f.avx512_vnni) isas.push_back("avx512vnni");
    if (f.amx_int8) isas.push_back("amx");
#endif
    if (isas.empty()) isas.push_back("scalar");
    return isas;
  }
  static inline fs::path dir_;
  static inline std::vector<std::vector<int32_t>> prompts_;
};

TEST_F(Invariance, Int8AnswersAreByteEqual) { check("int8", reachable(), {"pairs", "tiles"}); }

TEST_F(Invariance, Int4AnswersAreByteEqual) { check("int4", reachable(), {"pairs", "tiles"}); }

TEST_F(Invariance, FloatAnswersAreByteEqual) {
  const std::string best = reachable().back();
  if (best == "scalar") GTEST_SKIP() << "skipped: without FMA instructions float products go through libm, which takes many minutes";
  check("float", {best}, {"auto"});     // its cache is float
}

TEST_F(Invariance, APoolTooSmallForAllChangesNothing) {
  // Preemption by recomputation.
  ASSERT_NO_FATAL_FAILURE(need("int8"));
  const auto alone = answers({"int8", 2, 64, "", false, "auto"});
  hw::ThreadPool pool(2);
  exec::LoadOptions l;
  l.max_tokens_per_step = 64;
  l.kv_pages = 12;
  const auto engine = exec::Engine::load(dir_ / "int8", l, pool).value();
  runtime::LoopOptions o;
  o.max_batch_size = kRequests;
  o.max_seq_len = 500;
  o.prefill_tokens = o.prefill_tokens_beside_decodes = 32;
  runtime::EngineLoop loop(runtime::make_engine_stepper(*engine, pool), nullptr, o);
  const auto done = runtime::generate(loop, all_requests()).value();
  for (size_t i = 0; i < done.size(); ++i) EXPECT_EQ(done[i].tokens, alone[i]) << i;
}

}  // namespace
}  // namespace mi
