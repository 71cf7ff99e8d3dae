// The loop over the real executor: a small MoE model with int8 weights, sliding window and block-index attention.

#include <gtest/gtest.h>

#include "exec/test_model.h"
#include "runtime/expert_load.h"
#include "runtime/generate.h"
#include "runtime/testing.h"

namespace mi::runtime {
namespace {

exec::testing::ModelShape shape() {
  exec::testing::ModelShape s;
  s.packing = artifact::Packing::kPackedI8;
  s.fused = true;
  s.window = 40;
  s.index = true;
  return s;
}

struct World {
  int threads = 1;
  int64_t pages = 64, chunk = 512, batch = 16;
  bool memory_pool = true;
  int64_t drafts = 0;
  bool reuse = true;
  const char* kv_type = "";
  const char* attention_order = "auto";
};

std::vector<Request> requests(size_t only = SIZE_MAX) {
  std::vector<Request> all;
  for (size_t i = 0; i < 12; ++i) {
    if (only != SIZE_MAX && i != only) continue;
    Request r;
    for (size_t k = 0; k < 3 + i * 17 % 150; ++k) r.prompt.push_back(int32_t(random_u64(i, k) % 50));
    r.max_tokens = 100;
    r.sampling.temperature = i % 3 == 2 ? 1.0 : 0.0;
    r.sampling.seed = i;
    r.sampling.logprobs = 2;
    if (i % 4 == 1) r.sampling.repetition_penalty = 1.3;
    all.push_back(std::move(r));
  }
  return all;
}

std::vector<Completion> run(const exec::testing::TestModel& model, const World& w, std::vector<Request> r,
                            Stats* stats = nullptr, std::shared_ptr<ExpertLoad>* load_of_experts = nullptr) {
  hw::ThreadPool pool(w.threads);
  exec::LoadOptions load;
  load.kv_pages = w.pages;
  load.memory_pool = w.memory_pool;
  load.kv_type = w.kv_type;
  load.attention_order = w.attention_order;
  load.max_tokens_per_step = 512;
  auto engine = exec::Engine::load(model.dir(), load, pool);
  MI_CHECK(engine.ok(), "{}", engine.error().message());
  if (load_of_experts) *load_of_experts = std::make_shared<ExpertLoad>((*engine)->manifest());
  EngineLoop loop(make_engine_stepper(**engine, pool, load_of_experts ? *load_of_experts : nullptr), nullptr,
                  {.max_batch_size = w.batch,
                   .prefill_tokens = w.chunk,
                   .prefill_tokens_beside_decodes = w.chunk,
                   .step_seconds = 0,
                   .reuse_prefixes = w.reuse,
                   .draft_tokens = w.drafts});
  auto out = generate(loop, std::move(r));
  MI_CHECK(out.ok(), "{}", out.error().message());
  if (stats) *stats = loop.stats();
  return std::move(out).value();
}

TEST(EngineStepper, TokensAndLogprobBitsAreThoseOfTheRequestAlone) {
  const exec::testing::TestModel model(shape());
  std::vector<Completion> want;
  for (size_t i = 0; i < 12; ++i) want.push_back(std::move(run(model, {}, requests(i))[0]));
  for (const World& w : {World{.chunk = 1}, World{.chunk = 7}, World{.chunk = 64}, World{.threads = 2, .chunk = 512},
                         World{.threads = 2, .pages = 5}, World{.pages = 5, .memory_pool = false}, World{.batch = 1},
                         World{.threads = 2, .pages = 9, .reuse = false}, World{.drafts = 5},
                         World{.pages = 9, .chunk = 7, .drafts = 3}}) {
    Stats stats;
    std::vector<Completion> got = run(model, w, requests(), &stats);
    if (w.pages < 10) {
      EXPECT_GT(stats.preemptions, 0u);
    }
    if (w.drafts > 0) {
      EXPECT_GT(stats.accepted_draft_tokens, 0u);
      EXPECT_LT(stats.accepted_draft_tokens, stats.draft_tokens) << "wrong ones must have been among them";
    }
    for (size_t i = 0; i < 12; ++i) {
      EXPECT_EQ(got[i].tokens, want[i].tokens)
          << i << " chunk " << w.chunk << " threads " << w.threads << " pages " << w.pages;
      ASSERT_EQ(got[i].scores.size(), want[i].scores.size());
      for (size_t t = 0; t < got[i].scores.size(); ++t) EXPECT_EQ(got[i].scores[t].logprob, want[i].scores[t].logprob);
    }
  }
}

TEST(EngineStepper, EachOrderOfABfloat16CacheGivesTheBitsOfTheRequestAlone) {
  const exec::testing::TestModel model(shape());
  for (const char* order : {"pairs", "tiles"}) {
    const auto world = [&](World w) {
      w.kv_type = "bf16";
      w.attention_order = order;
      return w;
    };
    std::vector<Completion> want;
    for (size_t i = 0; i < 12; ++i) want.push_back(std::move(run(model, world({}), requests(i))[0]));
    for (const World& w : {World{.chunk = 7}, World{.threads = 2}, World{.pages = 9, .chunk = 7, .drafts = 3}}) {
      const std::vector<Completion> got = run(model, world(w), requests());
      for (size_t i = 0; i < 12; ++i) {
        EXPECT_EQ(got[i].tokens, want[i].tokens) << order << " " << i << " chunk " << w.chunk;
        ASSERT_EQ(got[i].scores.size(), want[i].scores.size());
        for (size_t t = 0; t < got[i].scores.size(); ++t) EXPECT_EQ(got[i].scores[t].logprob, want[i].scores[t].logprob);
      }
    }
  }
}

TEST(EngineStepper, EveryRowIsCountedForItsExperts) {
  const exec::testing::TestModel model(shape());
  const std::vector<Completion> want = run(model, {}, requests());
  std::vector<std::vector<uint64_t>> first;
  for (const World& w : {World{}, World{.threads = 2, .chunk = 7}}) {
    Stats stats;
    std::shared_ptr<ExpertLoad> load;
    std::vector<Request> r = requests();
    r.back().pooling = Pooling::kMean;  // steps that show their hidden states are counted, too
    r.back().max_tokens = 0;
    const std::vector<Completion> got = run(model, w, std::move(r), &stats, &load);
    for (size_t i = 0; i + 1 < got.size(); ++i) EXPECT_EQ(got[i].tokens, want[i].tokens);
    ASSERT_EQ(load->routes().size(), 2u);
    std::vector<std::vector<uint64_t>> counts;
    for (const ExpertLoad::Route& route : load->routes()) {
      EXPECT_EQ(route.experts, 6);
      uint64_t sum = 0;
      counts.emplace_back();
      for (int64_t e = 0; e < route.experts; ++e) counts.back().push_back(load->tokens(route, e));
      for (uint64_t n : counts.back()) sum += n;
      EXPECT_EQ(sum, stats.computed_tokens * 2);  // two experts for each
    }
    EXPECT_NE(counts[0], counts[1]);
    if (first.empty()) first = counts;
    EXPECT_EQ(counts, first);  // whatever the pieces
  }
}

// A conversation: each turn begins with all that was said before.
TEST(EngineStepper, ReusedPagesGiveTheBitsOfComputedOnes) {
  const exec::testing::TestModel model(shape());
  hw::ThreadPool pool(2);
  const auto talk = [&](bool reuse, Stats* stats) {
    exec::LoadOptions load;
    load.kv_pages = 40;
    load.max_tokens_per_step = 512;
    auto engine = exec::Engine::load(model.dir(), load, pool);
    MI_CHECK(engine.ok(), "{}", engine.error().message());
    EngineLoop loop(make_engine_stepper(**engine, pool), nullptr, {.reuse_prefixes = reuse});
    std::vector<int32_t> said;
    std::vector<Completion> all;
    for (size_t turn = 0; turn < 6; ++turn) {
      for (size_t k = 0; k < 70; ++k) said.push_back(int32_t(random_u64(turn, k) % 50));
      std::vector<Request> r(2);
      for (Request& q : r) {
        q.prompt = said;
        q.max_tokens = 40;
        q.sampling.temperature = 0;
        q.sampling.logprobs = 1;
      }
      r[1].sampling.temperature = 1;
      r[1].sampling.seed = turn;
      auto out = generate(loop, std::move(r));
      MI_CHECK(out.ok());
      said.insert(said.end(), (*out)[0].tokens.begin(), (*out)[0].tokens.end());
      for (Completion& c : *out) all.push_back(std::move(c));
    }
    *stats = loop.stats();
    return all;
  };
  Stats with, without;
  const std::vector<Completion> got = talk(true, &with), want = talk(false, &without);
  EXPECT_EQ(without.reused_tokens, 0u);
  EXPECT_GT(with.reused_tokens, with.prompt_tokens / 2);
  EXPECT_LT(with.computed_tokens, without.computed_tokens / 2);
  EXPECT_EQ(got.back().finish.reused_tokens % kv::kPageTokens, 0);
  EXPECT_GT(got.back().finish.reused_tokens, 256);
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_EQ(got[i].tokens, want[i].tokens) << i;
    for (size_t t = 0; t < want[i].scores.size(); ++t) EXPECT_EQ(got[i].scores[t].logprob, want[i].scores[t].logprob);
  }
}

// Computed by one engine, used by another one that is loaded later, with each type of keys and values.
TEST(EngineStepper, PagesFromDiskGiveTheBitsOfComputedOnes) {
  const exec::testing::TestModel model(shape());
  for (const char* kv_type : {"f32", "bf16", "int8"}) {
    TempDir dir;
    const auto play = [&](bool disk, Stats* stats) {
      hw::ThreadPool pool(2);
      exec::LoadOptions load;
      load.kv_pages = 80;
      load.kv_type = kv_type;
      load.max_tokens_per_step = 512;
      auto engine = exec::Engine::load(model.dir(), load, pool);
      MI_CHECK(engine.ok(), "{}", engine.error().message());
      LoopOptions o;
      if (disk) {
        kv::StoreOptions so;
        so.file = {dir / "kv", 64 << 20, (*engine)->kv_page_bytes(), std::string(32, 'e'), {}};
        auto store = kv::Store::open(so);
        MI_CHECK(store.ok(), "{}", store.error().message());
        o.kv_store = std::move(*store);
      }
      EngineLoop loop(make_engine_stepper(**engine, pool), nullptr, o);
      auto out = generate(loop, requests());
      MI_CHECK(out.ok(), "{}", out.error().message());
      loop.drain(std::chrono::seconds(60));
      *stats = loop.stats();
      return std::move(*out);
    };
    Stats without, first, second;
    const std::vector<Completion> want = play(false, &without);
    play(true, &first);
    const std::vector<Completion> got = play(true, &second);
    EXPECT_GT(first.kv_disk.written, 10u);
    EXPECT_GT(second.reused_tokens, second.prompt_tokens / 3);
    EXPECT_EQ(second.kv_disk.hits * kv::kPageTokens, second.reused_tokens);
    for (size_t i = 0; i < want.size(); ++i) {
      EXPECT_EQ(got[i].tokens, want[i].tokens) << kv_type << " " << i;
      ASSERT_EQ(got[i].scores.size(), want[i].scores.size());
      for (size_t t = 0; t < want[i].scores.size(); ++t) EXPECT_EQ(got[i].scores[t].logprob, want[i].scores[t].logprob);
    }
  }
}

TEST(EngineStepper, EmbeddingBitsDoNotDependOnTheBatch) {
  const exec::testing::TestModel model(shape());
  const auto embeddings = [] {
    std::vector<Request> r = requests();
    for (size_t i = 0; i < r.size(); i += 2) {
      r[i].max_tokens = 0;
      r[i].pooling = i % 4 == 0 ? Pooling::kMean : Pooling::kLast;
    }
    return r;
  };
  const std::vector<Completion> want = run(model, {}, embeddings());
  for (size_t i = 0; i < want.size(); i += 2) EXPECT_GT(want[i].embedding.size(), 1u);
  EXPECT_NE(want[0].embedding, want[4].embedding);
  for (const World& w : {World{.chunk = 1}, World{.chunk = 7}, World{.threads = 2, .pages = 5}}) {
    const std::vector<Completion> got = run(model, w, embeddings());
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].embedding, want[i].embedding) << i;
      EXPECT_EQ(got[i].tokens, want[i].tokens) << i;
    }
  }
}

}  // namespace
}  // namespace mi::runtime
