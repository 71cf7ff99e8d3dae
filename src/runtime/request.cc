#include "runtime/request.h"

#include <cmath>

#include "base/counted.h"
#include "base/result.h"
#include "runtime/kv/page_pool.h"

namespace mi::runtime {

const char* finish_reason_name(FinishReason r) {
  switch (r) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kCancelled:
      return "cancelled";
    case FinishReason::kError:
      return "error";
    case FinishReason::kTimeout:
      return "timeout";
    case FinishReason::kInvalid:
      return "invalid";
  }
  return "?";
}

namespace {

Admission refuse(Refusal why, std::string param, std::string message) {
  Admission a;
  a.refusal = why;
  a.param = std::move(param);
  a.message = std::move(message);
  return a;
}

// Written so that NaN is refused.
Admission check_range(const char* name, double v, double low, double high) {
  if (v >= low && v <= high) return {};
  return refuse(Refusal::kInvalid, name, fmt::format("{} is {}; it must be between {} and {}", name, v, low, high));
}

}  // namespace

Admission check_sampling(const SamplingParams& s, int64_t vocab) {
  if (!(s.temperature >= 0) || !std::isfinite(s.temperature)) {
    return refuse(Refusal::kInvalid, "temperature",
                  fmt::format("temperature is {}; it must be 0 or a positive number", s.temperature));
  }
  if (s.top_k < -1)
    return refuse(Refusal::kInvalid, "top_k",
                  fmt::format("top_k is {}; it must be at least 1, or 0 or -1 for no limit", s.top_k));
  struct Range {
    const char* name;
    double value, low, high;
  };
  for (const Range& r :
       {Range{"top_p", s.top_p, 0, 1}, Range{"min_p", s.min_p, 0, 1},
        Range{"presence_penalty", s.presence_penalty, -2, 2}, Range{"frequency_penalty", s.frequency_penalty, -2, 2}}) {
    if (Admission a = check_range(r.name, r.value, r.low, r.high); !a.ok()) return a;
  }
  if (!(s.repetition_penalty > 0) || !std::isfinite(s.repetition_penalty)) {
    return refuse(Refusal::kInvalid, "repetition_penalty",
                  fmt::format("repetition_penalty is {}; it must be a positive number", s.repetition_penalty));
  }
  for (auto [token, bias] : s.logit_bias) {
    if (token < 0 || token >= vocab) {
      return refuse(Refusal::kInvalid, "logit_bias",
                    fmt::format("logit_bias names token {}; the vocabulary has {} tokens", token, vocab));
    }
    if (Admission a = check_range("logit_bias", bias, -100, 100); !a.ok()) return a;
  }
  if (s.logprobs < -1 || s.logprobs > kMaxLogprobs) {
    return refuse(Refusal::kInvalid, "logprobs",
                  fmt::format("logprobs is {}; it must be between 0 and {}", s.logprobs, kMaxLogprobs));
  }
  if (s.min_tokens < 0)
    return refuse(Refusal::kInvalid, "min_tokens", fmt::format("min_tokens is {}; it can't be negative", s.min_tokens));
  return {};
}

Admission check_request(const Request& r, const Limits& limits) {
  if (r.prompt.empty()) return refuse(Refusal::kInvalid, "prompt", "the prompt holds no token");
  for (int32_t t : r.prompt) {
    if (t < 0 || t >= limits.vocab) {
      return refuse(Refusal::kInvalid, "prompt",
                    fmt::format("the prompt holds token {}; the vocabulary has {} tokens", t, limits.vocab));
    }
  }
  if (Admission a = check_sampling(r.sampling, limits.vocab); !a.ok()) return a;
  if (r.max_tokens < -1)
    return refuse(Refusal::kInvalid, "max_tokens", fmt::format("max_tokens is {}; it can't be negative", r.max_tokens));
  for (const std::string& s : r.stop) {
    if (s.empty()) return refuse(Refusal::kInvalid, "stop", "a stop string is empty");
  }
  for (int32_t t : r.stop_token_ids) {
    if (t < 0 || t >= limits.vocab) {
      return refuse(Refusal::kInvalid, "stop_token_ids",
                    fmt::format("stop_token_ids names token {}; the vocabulary has {} tokens", t, limits.vocab));
    }
  }

  if (r.pooling != Pooling::kNone && (limits.hidden == 0 || r.max_tokens != 0)) {
    return refuse(Refusal::kInvalid, "input",
                  limits.hidden == 0 ? "this engine gives no hidden states, so it makes no embeddings"
                                     : "an embedding is made of the prompt only: max_tokens must be 0");
  }

  // Written with subtractions: max_tokens may be as large as the type.
  int64_t prompt = int64_t(r.prompt.size());
  int64_t output = r.max_tokens < 0 ? 1 : r.max_tokens;
  if (r.sampling.min_tokens > output && r.max_tokens >= 0) {
    return refuse(Refusal::kInvalid, "min_tokens",
                  fmt::format("min_tokens {} is above max_tokens {}", r.sampling.min_tokens, output));
  }
  if (prompt > limits.max_seq_len || output > limits.max_seq_len - prompt) {
    return refuse(Refusal::kTooLong, r.max_tokens < 0 || prompt > limits.max_seq_len ? "prompt" : "max_tokens",
                  fmt::format("the prompt has {} and up to {} may be generated; the limit is {} together",
                              counted(prompt, "token"), output, limits.max_seq_len));
  }
  if (prompt > limits.kv_tokens || output > limits.kv_tokens + 1 - prompt) {
    return refuse(
        Refusal::kTooLong, "prompt",
        fmt::format(
            "the prompt has {} and up to {} may be generated; the KV cache holds {} tokens, so this can never run",
            counted(prompt, "token"), output, limits.kv_tokens));
  }
  return {};
}

}  // namespace mi::runtime
