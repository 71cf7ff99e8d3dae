#pragma once
// The nouns of the runtime: a request, what comes back for it, and why it may be refused. Token ids inside, text only
// where it leaves (TokenEvent::text). No HTTP, no JSON.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "text/constraint.h"

namespace mi::runtime {

inline constexpr int kMaxLogprobs = 20;       // most entries of a top list
inline constexpr double kGreedyBelow = 1e-5;  // a temperature up to this is greedy

// How one request's next token is chosen; nothing here is shared between requests. Order of application, on the raw
// logits: repetition penalty, presence and frequency penalty, logit_bias, constraint and min_tokens, temperature,
// top_k, min_p, top_p. Greedy takes the highest logit after the bans, ties to the lowest id.
struct SamplingParams {
  double temperature = 1.0;         // >= 0
  int64_t top_k = 0;                // 0 or -1: off; at least as large as the vocabulary: off
  double top_p = 1.0;               // [0, 1]; 0 leaves one token
  double min_p = 0.0;               // [0, 1]; drops tokens less likely than min_p times the likeliest
  double presence_penalty = 0.0;    // [-2, 2], subtracted once from every token of the output so far
  double frequency_penalty = 0.0;   // [-2, 2], subtracted per occurrence in the output so far
  double repetition_penalty = 1.0;  // > 0; logits of tokens in prompt or output are divided (if positive) or multiplied
  std::optional<uint64_t> seed;  // the same seed gives the same tokens whatever else runs; none: a new one per request
  std::vector<std::pair<int32_t, float>> logit_bias;  // token id, [-100, 100] added to its logit
  int logprobs = -1;                                  // -1: none; n >= 0: the chosen token's and the n likeliest ones'
  int64_t min_tokens = 0;                             // no end token, stop token or stop string before so many tokens
  bool ignore_eos = false;  // the model's end tokens are ordinary tokens (stop_token_ids still stop)
};

// Which hidden states (of the last layer, normed: what the logits are made of) become the request's embedding.
enum class Pooling : uint8_t { kNone, kLast, kMean };

struct Request {
  std::vector<int32_t> prompt;  // not empty
  SamplingParams sampling;
  int64_t max_tokens = -1;              // most tokens to generate; -1: what the limits leave; 0: score the prompt only
  std::vector<std::string> stop;        // stop strings, not empty ones; the text ends before the first match
  std::vector<int32_t> stop_token_ids;  // further end tokens of this request
  bool prompt_logprobs = false;     // a PromptEvent with the scores of the prompt's tokens (sampling.logprobs entries)
  bool skip_special_tokens = true;  // special tokens leave no text
  std::vector<int32_t> shown_special;            // but these do, whatever skip_special_tokens says
  Pooling pooling = Pooling::kNone;              // else: an EmbeddingEvent; only with max_tokens 0
  std::unique_ptr<text::Constraint> constraint;  // may be null; a fresh one per request
  int64_t priority = 0;        // smaller ones go first, and take the place of running ones of larger numbers
  std::string cache_salt;      // keys and values are reused only between requests with the same
  double timeout_seconds = 0;  // from arrival; then it ends with kTimeout. 0: none
};

// ---- what comes back ---------------------------------------------------------------------------------------------
// Log-probabilities are those of the model: the log-softmax of the raw logits, before penalties, bias, constraint and
// temperature. They are always finite: at least kLowestLogprob.
inline constexpr float kLowestLogprob = -9999.0f;

struct TokenLogprob {
  int32_t token = 0;
  float logprob = 0;
};
struct ScoredToken {
  int32_t token = 0;
  float logprob = 0;              // of this token
  std::vector<TokenLogprob> top;  // exactly min(n, vocabulary) entries, likeliest first, ties by id
};

// The prompt's scores, once, before the first TokenEvent, if Request::prompt_logprobs. prompt[i] is the i-th prompt
// token; the first has no score (nothing stands before it): its logprob is 0 and its list empty.
struct PromptEvent {
  std::vector<ScoredToken> prompt;
};

// The embedding, once, before FinishEvent, if Request::pooling: hidden-size values, not normalized.
struct EmbeddingEvent {
  std::vector<float> values;
};

struct TokenEvent {
  int32_t token = 0;
  bool end = false;   // an end or stop token: it counts as generated, has no text, and FinishEvent follows
  std::string text;   // whole UTF-8 characters that became certain with this token; often "" or several tokens' text
  float logprob = 0;  // meaningful if SamplingParams::logprobs >= 0
  std::vector<TokenLogprob> top;
};

enum class FinishReason : uint8_t { kStop, kLength, kCancelled, kError, kTimeout, kInvalid };
inline constexpr int kFinishReasons = 6;
// "stop", "length", "cancelled", "error", "timeout", "invalid"
const char* finish_reason_name(FinishReason r);

// The last event of every accepted request, exactly one.
struct FinishEvent {
  FinishReason reason = FinishReason::kStop;
  std::string text;                        // text that had been held back and is now certain
  std::string message;                     // kError: what went wrong; kInvalid: why the request's constraint failed
  std::optional<std::string> stop_string;  // kStop: the stop string that matched
  std::optional<int32_t> stop_token;       // kStop: the end or stop token that was generated
  int64_t prompt_tokens = 0;
  int64_t reused_tokens = 0;      // of the prompt, found in the KV cache instead of computed
  int64_t completion_tokens = 0;  // all that were generated, with the end token and those of a stop string
  double queue_seconds = 0;       // arrival to first step
  double ttft_seconds = 0;        // arrival to first token; 0 if there was none
  double total_seconds = 0;
};

using Event = std::variant<PromptEvent, EmbeddingEvent, TokenEvent, FinishEvent>;
// Called on the loop's thread, in order, never after FinishEvent. It must return at once (post to a queue); it may call
// EngineLoop::cancel and submit, but not drain or the destructor.
using Sink = std::function<void(Event&&)>;

// ---- refusals ------------------------------------------------------------------------------------------------------
enum class Refusal : uint8_t {
  kNone,
  kInvalid,    // a parameter makes no sense (HTTP 400); `param` names it
  kTooLong,    // it can never fit into the limits (400, context_length_exceeded)
  kQueueFull,  // come back later (429)
  kDraining,   // the server ends (503)
};
struct Admission {
  uint64_t id = 0;  // of the accepted request, never 0
  Refusal refusal = Refusal::kNone;
  std::string message;  // one sentence with the numbers
  std::string param;    // the field at fault, "" if none
  double retry_after = 0;  // kQueueFull: seconds until a request may be taken, as far as is known
  bool ok() const { return refusal == Refusal::kNone; }
};

// What a request must fit into.
struct Limits {
  int64_t vocab = 0;
  int64_t max_seq_len = 0;  // prompt and output together, in tokens
  int64_t kv_tokens = 0;    // capacity of the whole KV pool, in tokens
  int64_t hidden = 0;       // values of an embedding; 0: the model gives none
  // Longest sequence that can run at all: the last token generated needs no place in the cache.
  int64_t longest() const { return kv_tokens + 1 < max_seq_len ? kv_tokens + 1 : max_seq_len; }
};
// Refuses what makes no sense or can never fit; id stays 0.
Admission check_request(const Request& r, const Limits& limits);
// The part of it that needs no model loaded, for one of that many tokens.
Admission check_sampling(const SamplingParams& s, int64_t vocab);

}  // namespace mi::runtime
