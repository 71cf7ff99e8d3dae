#pragma once
// For tests only (this room's and the server's): a model without weights, a small tokenizer, and a sink that
// remembers.

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/json.h"
#include "base/temp_dir.h"
#include "base/util.h"
#include "runtime/kv/page_pool.h"
#include "runtime/request.h"
#include "runtime/stepper.h"
#include "text/tokenizer.h"

namespace mi::runtime::testing {

// Numbers for random tests, both ends included; a seed gives the same ones everywhere.
class Pick {
 public:
  explicit Pick(uint64_t seed) : seed_(seed) {}
  int64_t operator()(int64_t low, int64_t high) {
    return low + int64_t(random_u64(seed_, drawn_++) % uint64_t(high - low + 1));
  }

 private:
  const uint64_t seed_;
  uint64_t drawn_ = 0;
};

// A greedy one of seeded ids 1 to 63.
inline Request request(uint64_t seed, int64_t prompt, int64_t max_tokens) {
  Request r;
  for (int64_t i = 0; i < prompt; ++i) r.prompt.push_back(int32_t(1 + random_u64(seed, uint64_t(i)) % 63));
  r.max_tokens = max_tokens;
  r.sampling.temperature = 0;
  return r;
}

// Logits are a hash of all tokens up to the row's. The tokens are written into and read back from "KV pages" through
// the page ids of the batch, so a wrong page, a page shared by mistake or a skipped row changes the answer.
class FakeStepper : public Stepper {
 public:
  struct Config {
    int64_t vocab = 64, pages = 64, max_tokens = 512;
    std::chrono::microseconds step_time{0};
    bool break_logits = false;  // NaN in every row
    int64_t hidden = 0;
    std::function<void()> on_step = {};
  };
  FakeStepper() : FakeStepper(Config()) {}
  explicit FakeStepper(const Config& c) : config_(c), cache_(size_t(c.pages * kv::kPageTokens), -1) {}

  int64_t vocab() const override { return config_.vocab; }
  int64_t kv_pages() const override { return config_.pages; }
  int64_t max_tokens_per_step() const override { return config_.max_tokens; }
  int64_t hidden() const override { return config_.hidden; }
  // Of each row the first logits.
  std::span<const float> run_hidden(const exec::Batch& b, std::span<const float>* states) override {
    run(b);
    states_.clear();
    for (size_t i = 0; i < logits_.size(); i += size_t(config_.vocab))
      states_.insert(states_.end(), logits_.begin() + int64_t(i), logits_.begin() + int64_t(i) + config_.hidden);
    *states = states_;
    return logits_;
  }

  std::span<const float> run(const exec::Batch& b) override {
    if (config_.on_step) config_.on_step();
    if (config_.step_time.count() > 0) std::this_thread::sleep_for(config_.step_time);
    logits_.clear();
    rows_ = 0;
    std::map<int32_t, int64_t> holders;  // a page that is written is in one chunk only
    for (const exec::Chunk& chunk : b.chunks)
      for (int32_t page : chunk.pages) ++holders[page];
    for (size_t c = 0; c < b.chunks.size(); ++c) {
      const exec::Chunk& chunk = b.chunks[c];
      for (size_t i = 0; i < chunk.pages.size(); ++i) {
        const int32_t page = chunk.pages[i];
        MI_CHECK(page >= 0 && page < config_.pages);
        MI_CHECK(int64_t(i) < chunk.start / kv::kPageTokens || holders[page] == 1, "page {} is in two chunks", page);
      }
      MI_CHECK(!chunk.tokens.empty() &&
               kv::pages_for(chunk.start + int64_t(chunk.tokens.size())) <= int64_t(chunk.pages.size()));
      for (size_t i = 0; i < chunk.tokens.size(); ++i) {
        MI_CHECK(chunk.tokens[i] >= 0 && chunk.tokens[i] < config_.vocab);
        slot(chunk, chunk.start + int64_t(i)) = chunk.tokens[i];
      }
      rows_ += int64_t(chunk.tokens.size());
      for (int64_t i = chunk.logits_from; i < int64_t(chunk.tokens.size()); ++i) append_logits(chunk, chunk.start + i);
    }
    MI_CHECK_LE(rows_, config_.max_tokens);
    last_rows_ = rows_;
    return logits_;
  }
  int64_t kv_page_bytes() const override { return kv::kPageTokens * int64_t(sizeof(int32_t)); }
  void save_page(int32_t page, std::span<std::byte> to) const override {
    std::memcpy(to.data(), &cache_[size_t(page * kv::kPageTokens)], to.size());
  }
  void restore_page(int32_t page, std::span<const std::byte> from) override {
    std::memcpy(&cache_[size_t(page * kv::kPageTokens)], from.data(), from.size());
  }
  int64_t last_rows() const { return last_rows_; }  // of the last step

 private:
  int32_t& slot(const exec::Chunk& c, int64_t position) {
    return cache_[size_t(c.pages[size_t(position / kv::kPageTokens)] * kv::kPageTokens + position % kv::kPageTokens)];
  }
  void append_logits(const exec::Chunk& c, int64_t position) {
    uint64_t h = 1;
    for (int64_t p = 0; p <= position; ++p) h = h * 0x9e3779b97f4a7c15u + uint64_t(slot(c, p)) + 1;
    for (int64_t i = 0; i < config_.vocab; ++i)
      logits_.push_back(config_.break_logits ? __builtin_nanf("") : 8 * random_unit(h, uint64_t(i)));
  }

  Config config_;
  std::vector<int32_t> cache_;
  std::vector<float> logits_, states_;
  int64_t rows_ = 0, last_rows_ = 0;
};

// Token 0 is the special "</s>", token i > 0 is the bytes pieces[i - 1], which may be parts of characters; `specials`
// follow. A real tokenizer (byte-level BPE without merges), made from a file that exists for a moment only.
inline std::shared_ptr<const text::Tokenizer> make_tokenizer(const std::vector<std::string>& pieces,
                                                             const std::vector<std::string>& specials = {}) {
  Json vocab = Json::object();
  vocab["</s>"] = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    std::string
        spelled;  // the alphabet of byte-level BPE: printable bytes stand for themselves, the others for U+0100 up
    for (unsigned char byte : pieces[i]) {
      auto printable = [](int b) { return (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b != 0xad); };
      int code = byte;
      if (!printable(byte)) {
        code = 256;
        for (int b = 0; b < byte; ++b) code += !printable(b);
      }
      if (code < 0x80)
        spelled += char(code);
      else
        spelled += {char(0xc0 | code >> 6), char(0x80 | (code & 0x3f))};
    }
    vocab[spelled] = i + 1;
  }
  MI_CHECK_EQ(vocab.size(), pieces.size() + 1);
  Json j;
  j["version"] = "1.0";
  j["added_tokens"] = Json::array();
  const auto add_special = [&](size_t id, const std::string& content) {
    j["added_tokens"].push_back({{"id", id},
                                 {"content", content},
                                 {"special", true},
                                 {"single_word", false},
                                 {"lstrip", false},
                                 {"rstrip", false},
                                 {"normalized", false}});
  };
  add_special(0, "</s>");
  for (size_t i = 0; i < specials.size(); ++i) add_special(pieces.size() + 1 + i, specials[i]);
  j["normalizer"] = nullptr;
  j["pre_tokenizer"] =
      j["decoder"] = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}};
  j["post_processor"] = nullptr;
  j["model"] = {{"type", "BPE"}, {"vocab", vocab}, {"merges", Json::array()}};
  const TempDir dir;
  std::ofstream(dir / "tokenizer.json") << dump_json(j);
  return text::Tokenizer::load(dir / "tokenizer.json").value();
}

// "a" .. "z", then pairs of letters, up to `vocab` tokens with "</s>".
inline std::vector<std::string> letter_pieces(int64_t vocab = 64) {
  std::vector<std::string> pieces;
  for (int64_t i = 1; i < vocab; ++i) {
    std::string piece(1, char('a' + (i - 1) % 26));
    if (i > 26) piece += char('a' + (i - 1) / 26);
    pieces.push_back(piece);
  }
  return pieces;
}

// Everything one request got; thread-safe. Aborts on an event after the last.
class Recorder {
 public:
  Sink sink() {
    return [this](Event&& e) {
      std::lock_guard lock(mu_);
      MI_CHECK(!finish_, "an event after the last one");
      if (auto* p = std::get_if<PromptEvent>(&e)) {
        MI_CHECK(prompt_.empty() && tokens_.empty());
        prompt_ = std::move(p->prompt);
      } else if (auto* v = std::get_if<EmbeddingEvent>(&e)) {
        MI_CHECK(embedding_.empty());
        embedding_ = std::move(v->values);
      } else if (auto* t = std::get_if<TokenEvent>(&e)) {
        text_ += t->text;
        tokens_.push_back(t->token);
        events_.push_back(std::move(*t));
      } else {
        finish_ = std::move(std::get<FinishEvent>(e));
        text_ += finish_->text;
      }
      changed_.notify_all();
    };
  }
  void wait_end() {
    std::unique_lock lock(mu_);
    changed_.wait(lock, [this] { return finish_.has_value(); });
  }
  void wait_tokens(size_t n) {
    std::unique_lock lock(mu_);
    changed_.wait(lock, [this, n] { return finish_ || tokens_.size() >= n; });
  }
  bool ended() const {
    std::lock_guard lock(mu_);
    return finish_.has_value();
  }
  std::vector<int32_t> tokens() const {
    std::lock_guard lock(mu_);
    return tokens_;
  }
  std::vector<TokenEvent> events() const {
    std::lock_guard lock(mu_);
    return events_;
  }
  std::vector<ScoredToken> prompt() const {
    std::lock_guard lock(mu_);
    return prompt_;
  }
  std::vector<float> embedding() const {
    std::lock_guard lock(mu_);
    return embedding_;
  }
  std::string text() const {
    std::lock_guard lock(mu_);
    return text_;
  }
  FinishEvent finish() const {
    std::lock_guard lock(mu_);
    return finish_.value();
  }

 private:
  mutable std::mutex mu_;
  std::condition_variable changed_;
  std::vector<int32_t> tokens_;
  std::vector<TokenEvent> events_;
  std::vector<ScoredToken> prompt_;
  std::vector<float> embedding_;
  std::string text_;
  std::optional<FinishEvent> finish_;
};

}  // namespace mi::runtime::testing
