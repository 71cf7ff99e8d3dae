#pragma once
// Chooses one request's next token from its row of logits, and scores tokens. Every number depends on the row, the
// request's settings and its own history only: neither neighbours nor their order can change it.
//
// Formulas, for raw logits x and an adjusted row a:
//   a_i = x_i / r or x_i * r for tokens seen in prompt or output (x_i > 0 or not)   r: repetition_penalty
//         - presence (once) - frequency * count                                     for tokens seen in the output
//         + logit_bias_i,   and -inf where the constraint or min_tokens forbids i
//   greedy: argmax a, ties to the lowest id.
//   else w_i = exp((a_i - max a) / T), of which top_k, min_p and top_p keep a head of the order (a descending, id
//        ascending); the token is where u * sum w falls, u = unit(seed, tokens so far).
//   logprob_i = x_i - log sum_j exp(x_j), not below kLowestLogprob.
// Sums are double, in a fixed order (over all tokens: block after block, kernels/sample/sample.h), with an exp of our own:
// the same bits on every machine.

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "runtime/request.h"

namespace mi::runtime {

// Log-probability of `token` and the n likeliest of the row.
ScoredToken score_token(std::span<const float> logits, int32_t token, int n);
// Neither NaN nor +inf (-inf is a token that the model rules out).
bool usable_row(std::span<const float> logits);

class Sampler {
 public:
  // seed: used if params.seed is empty. end_ids: the tokens that min_tokens forbids.
  Sampler(const SamplingParams& params, uint64_t seed, std::span<const int32_t> prompt, std::vector<int32_t> end_ids);

  enum class Outcome : uint8_t { kToken, kBadLogits, kNothingAllowed };
  struct Choice {
    Outcome outcome = Outcome::kToken;
    ScoredToken scored;  // logprob and top only if SamplingParams::logprobs >= 0
  };
  // mask: bit i set = token i allowed (text::Constraint); empty: all. Does not change the sampler.
  Choice choose(std::span<const float> logits, std::span<const uint32_t> mask) const;
  // `token` is now part of the output.
  void accept(int32_t token);

 private:
  struct Seen {
    bool in_prompt = false;
    int64_t in_output = 0;
  };
  bool adjusts() const;
  bool adjust(std::span<const float> logits, std::span<const uint32_t> mask, bool forbid_ends,
              std::vector<float>* out) const;

  SamplingParams params_;
  uint64_t seed_;
  bool penalizes_;
  std::vector<int32_t> end_ids_;
  std::unordered_map<int32_t, Seen> seen_;  // kept only if penalizes_
  int64_t output_tokens_ = 0;
};

}  // namespace mi::runtime
