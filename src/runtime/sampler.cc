#include "runtime/sampler.h"

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "base/util.h"

namespace mi::runtime {

namespace {

constexpr float kForbidden = -std::numeric_limits<float>::infinity();

// exp(x) for x <= 0, about 1 ulp. libm's differs between CPUs (with and without FMA); this is adds, multiplies and
// shifts only, and vectorizes. x = k ln 2 + r, |r| <= ln 2 / 2; Taylor up to r^13 leaves 4e-18.
inline double exp_neg(double x) {
  const double tiny = -708.0;      // exp of less counts as 0; written as selects so that loops stay vectors
  const bool zero = !(x > tiny);
  x = zero ? tiny : x;
  constexpr double kRound = 0x1.8p52;
  double shifted = x * 0x1.71547652b82fep0 + kRound;
  double k = shifted - kRound;
  double r = x - k * 0x1.62e42feep-1 - k * 0x1.a39ef35793c76p-33;
  double p = 1.0 / 6227020800.0;
  for (double c : {1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0, 1.0 / 5040.0, 1.0 / 720.0,
                   1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0}) {
    p = p * r + c;
  }
  int64_t exponent = std::bit_cast<int64_t>(shifted) - std::bit_cast<int64_t>(kRound);
  const double v = p * std::bit_cast<double>((exponent + 1023) << 52);
  return zero ? 0.0 : v;
}

struct Candidate {
  float logit;
  int32_t token;
};
bool likelier(const Candidate& a, const Candidate& b) { return a.logit > b.logit || (a.logit == b.logit && a.token < b.token); }

float max_of(std::span<const float> row) {
  float m = kForbidden;
  for (float x : row) m = x > m ? x : m;
  return m;
}

int32_t argmax(std::span<const float> row) {
  float m = max_of(row);
  return int32_t(std::find(row.begin(), row.end(), m) - row.begin());
}

double log_sum_exp(std::span<const float> row) {
  double m = max_of(row);
  if (std::isinf(m)) return 0.0;   // nothing is possible; every score is the lowest
  double lanes[4] = {0, 0, 0, 0};
  for (size_t i = 0; i < row.size(); ++i) lanes[i % 4] += exp_neg(double(row[i]) - m);
  return m + std::log((lanes[0] + lanes[1]) + (lanes[2] + lanes[3]));
}

float logprob(float logit, double lse) { return std::max(float(double(logit) - lse), kLowestLogprob); }

// The n likeliest of the row, in order. n is small: an insertion list beats a heap.
std::vector<Candidate> head_of(std::span<const float> row, size_t n) {
  std::vector<Candidate> head;
  head.reserve(n + 1);
  for (size_t i = 0; i < row.size() && n > 0; ++i) {
    Candidate c{row[i], int32_t(i)};
    if (head.size() == n && !likelier(c, head.back())) continue;
    head.insert(std::upper_bound(head.begin(), head.end(), c, likelier), c);
    if (head.size() > n) head.pop_back();
  }
  return head;
}

double unit(uint64_t seed, uint64_t index) { return double(random_u64(seed, index) >> 11) * 0x1p-53; }

// Walks the cumulative weights; rounding may leave u * total at the very end, which belongs to the last positive weight.
size_t pick(std::span<const double> weights, double total, double u) {
  double target = u * total, sum = 0;
  size_t last = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] <= 0) continue;
    last = i;
    sum += weights[i];
    if (sum > target) break;
  }
  return last;
}

// Scratch of a sampling thread, kept between calls: a vocabulary is up to a few hundred thousand entries.
struct Scratch {
  std::vector<float> row;
  std::vector<Candidate> candidates;
  std::vector<double> weights;
};
thread_local Scratch scratch;

// Precondition: temperature above kGreedyBelow, something is allowed.
int32_t draw(std::span<const float> row, const SamplingParams& p, double u) {
  const double m = max_of(row), inv_t = 1.0 / p.temperature;
  auto weight = [m, inv_t](float logit) { return exp_neg((double(logit) - m) * inv_t); };
  std::vector<double>& weights = scratch.weights;

  const bool k_limited = p.top_k > 0 && p.top_k < int64_t(row.size());
  if (!k_limited && p.min_p <= 0 && p.top_p >= 1) {
    weights.resize(row.size());
    double total = 0;
    for (size_t i = 0; i < row.size(); ++i) weights[i] = weight(row[i]);
    for (double w : weights) total += w;
    return int32_t(pick(weights, total, u));
  }

  std::vector<Candidate>& c = scratch.candidates;
  c.clear();
  for (size_t i = 0; i < row.size(); ++i) {
    if (row[i] == kForbidden || (p.min_p > 0 && weight(row[i]) < p.min_p)) continue;
    c.push_back({row[i], int32_t(i)});
  }
  if (k_limited && int64_t(c.size()) > p.top_k) {
    std::nth_element(c.begin(), c.begin() + p.top_k - 1, c.end(), likelier);
    c.resize(size_t(p.top_k));
  }
  // The sum's order must not hang on nth_element's, so: by id. All that can't be in the nucleus (together they weigh
  // less than 1 - top_p of the whole) leaves before the sort.
  std::sort(c.begin(), c.end(), [](const Candidate& a, const Candidate& b) { return a.token < b.token; });
  double total = 0;
  for (const Candidate& x : c) total += weight(x.logit);
  if (p.top_p < 1) {
    double floor = (1.0 - p.top_p) * total / double(c.size());
    std::erase_if(c, [&](const Candidate& x) { return double(x.logit) != m && weight(x.logit) < floor; });
  }
  std::sort(c.begin(), c.end(), likelier);
  weights.clear();
  double kept = 0;
  for (const Candidate& x : c) {
    weights.push_back(weight(x.logit));
    kept += weights.back();
    if (p.top_p < 1 && kept >= p.top_p * total) break;
  }
  return c[pick(weights, kept, u)].token;
}

}  // namespace

bool usable_row(std::span<const float> logits) {
  bool good = true;
  for (float x : logits) good &= x <= FLT_MAX;   // false for NaN too
  return good;
}

ScoredToken score_token(std::span<const float> logits, int32_t token, int n) {
  MI_CHECK(token >= 0 && size_t(token) < logits.size(), "token {} of {}", token, logits.size());
  double lse = log_sum_exp(logits);
  ScoredToken s;
  s.token = token;
  s.logprob = logprob(logits[size_t(token)], lse);
  for (const Candidate& c : head_of(logits, size_t(std::max(n, 0)))) s.top.push_back({c.token, logprob(c.logit, lse)});
  return s;
}

Sampler::Sampler(const SamplingParams& params, uint64_t seed, std::span<const int32_t> prompt, std::vector<int32_t> end_ids)
    : params_(params), seed_(params.seed.value_or(seed)), end_ids_(std::move(end_ids)) {
  penalizes_ = params.repetition_penalty != 1 || params.presence_penalty != 0 || params.frequency_penalty != 0;
  if (params.repetition_penalty != 1) {
    for (int32_t t : prompt) seen_[t].in_prompt = true;
  }
}

void Sampler::accept(int32_t token) {
  ++output_tokens_;
  if (penalizes_) ++seen_[token].in_output;
}

bool Sampler::adjusts() const { return !seen_.empty() || !params_.logit_bias.empty(); }

// False if nothing is left to choose.
bool Sampler::adjust(std::span<const float> logits, std::span<const uint32_t> mask, bool forbid_ends, std::vector<float>* out) const {
  out->assign(logits.begin(), logits.end());
  std::vector<float>& a = *out;
  auto set = [&a](int32_t token, double v) {
    // Extreme factors stay finite: only bans may be infinite.
    if (a[size_t(token)] != kForbidden) a[size_t(token)] = float(std::clamp(v, -double(FLT_MAX), double(FLT_MAX)));
  };
  for (const auto& [token, seen] : seen_) {
    double v = a[size_t(token)];
    v = v > 0 ? v / params_.repetition_penalty : v * params_.repetition_penalty;
    if (seen.in_output > 0) v -= params_.presence_penalty + params_.frequency_penalty * double(seen.in_output);
    set(token, v);
  }
  for (auto [token, bias] : params_.logit_bias) set(token, double(a[size_t(token)]) + double(bias));
  if (!mask.empty()) {
    for (size_t i = 0; i < a.size(); ++i) {
      if (!(mask[i / 32] >> (i % 32) & 1)) a[i] = kForbidden;
    }
  }
  if (forbid_ends) {
    for (int32_t t : end_ids_) a[size_t(t)] = kForbidden;
  }
  return max_of(a) != kForbidden;
}

Sampler::Choice Sampler::choose(std::span<const float> logits, std::span<const uint32_t> mask) const {
  Choice choice;
  if (!usable_row(logits)) {
    choice.outcome = Outcome::kBadLogits;
    return choice;
  }
  const bool forbid_ends = output_tokens_ < params_.min_tokens && !end_ids_.empty();
  std::span<const float> row = logits;
  bool possible = true;
  if (forbid_ends || !mask.empty() || adjusts()) {
    possible = adjust(logits, mask, forbid_ends, &scratch.row);
    // A constraint whose text is complete allows the end token only: it wins over min_tokens.
    if (!possible && forbid_ends) possible = adjust(logits, mask, false, &scratch.row);
    row = scratch.row;
  } else {
    possible = max_of(row) != kForbidden;
  }
  if (!possible) {
    choice.outcome = Outcome::kNothingAllowed;
    return choice;
  }
  const bool greedy = params_.temperature <= kGreedyBelow || params_.top_k == 1;
  int32_t token = greedy ? argmax(row) : draw(row, params_, unit(seed_, uint64_t(output_tokens_)));
  if (params_.logprobs >= 0) {
    choice.scored = score_token(logits, token, params_.logprobs);
  } else {
    choice.scored.token = token;
  }
  return choice;
}

}  // namespace mi::runtime
