#include "runtime/sampler.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/check.h"
#include "base/util.h"

namespace mi::runtime {

namespace {

constexpr float kForbidden = -std::numeric_limits<float>::infinity();

constexpr std::array<double, 14> kInverseFactorial = [] {
  std::array<double, 14> f{1.0};
  double n = 1;
  for (int i = 1; i < 14; ++i) f[size_t(i)] = 1.0 / (n *= i);
  return f;
}();

// Reductions go in kLanes lanes, lane = index mod kLanes, joined from left to right: an order that vectors can keep.
constexpr size_t kLanes = 8;
typedef double Doubles __attribute__((vector_size(16)));  // what every x86-64 has; wider ones are split badly
typedef int64_t Ints __attribute__((vector_size(16)));

// exp(x) for x <= 0, about 1 ulp. libm's differs between CPUs (with and without FMA); this is adds, multiplies
// and shifts only. x = k ln 2 + r, |r| <= ln 2 / 2; Taylor up to r^13 leaves 4e-18. Below -708 (also -inf) it gives 0.
inline Doubles exp_neg(Doubles x) {
  constexpr double kTiny = -708.0, kRound = 0x1.8p52;
  const Ints keep = x > kTiny;
  x = keep ? x : Doubles{kTiny, kTiny};
  const Doubles shifted = x * 0x1.71547652b82fep0 + kRound;
  const Doubles k = shifted - kRound;
  const Doubles r = x - k * 0x1.62e42feep-1 - k * 0x1.a39ef35793c76p-33;
  Doubles p = {kInverseFactorial[13], kInverseFactorial[13]};
#pragma GCC unroll 13
  for (int i = 12; i >= 0; --i) p = p * r + kInverseFactorial[size_t(i)];
  const Ints power = ((Ints)shifted - std::bit_cast<int64_t>(kRound) + 1023) << 52;
  return (Doubles)((Ints)(p * (Doubles)power) & keep);
}

// out[i] = exp((row[i] - max) * scale), then zeros up to a whole group of lanes (there is room for it).
void exp_row(std::span<const float> row, double max, double scale, double* out) {
  size_t i = 0;
  for (; i + 2 <= row.size(); i += 2) {
    const Doubles e = exp_neg((Doubles{row[i], row[i + 1]} - max) * scale);
    std::memcpy(out + i, &e, sizeof e);
  }
  if (i < row.size()) out[i] = exp_neg(Doubles{(double(row[i]) - max) * scale, 0})[0], ++i;
  for (; i % kLanes != 0; ++i) out[i] = 0;
}

struct Candidate {
  double weight;
  float logit;
  int32_t token;
};
bool likelier(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
}

// Scratch of a sampling thread, kept between calls: a vocabulary is up to a few hundred thousand entries.
struct Scratch {
  std::vector<float> row;
  std::vector<double> weights;
  std::vector<Candidate> candidates;
};
thread_local Scratch scratch;

float max_of(std::span<const float> row) {
  float lanes[kLanes];
  std::fill(lanes, lanes + kLanes, kForbidden);
  auto step = [&lanes](size_t lane, float x) { lanes[lane] = x > lanes[lane] ? x : lanes[lane]; };
  size_t i = 0;
  for (; i + kLanes <= row.size(); i += kLanes) {
    for (size_t j = 0; j < kLanes; ++j) step(j, row[i + j]);
  }
  for (; i < row.size(); ++i) step(i % kLanes, row[i]);
  return *std::max_element(lanes, lanes + kLanes);
}

int32_t argmax(std::span<const float> row) {
  float m = max_of(row);
  return int32_t(std::find(row.begin(), row.end(), m) - row.begin());
}

double log_sum_exp(std::span<const float> row) {
  const double m = max_of(row);
  if (std::isinf(m)) return 0.0;  // nothing is possible; every score is the lowest
  std::vector<double>& w = scratch.weights;
  w.resize(row.size() + kLanes);
  exp_row(row, m, 1.0, w.data());
  double lanes[kLanes] = {};
  for (size_t i = 0; i < row.size(); i += kLanes) {
    for (size_t j = 0; j < kLanes; ++j) lanes[j] += w[i + j];  // past the end: zeros
  }
  double sum = 0;
  for (double lane : lanes) sum += lane;
  return m + std::log(sum);
}

float logprob(float logit, double lse) { return std::max(float(double(logit) - lse), kLowestLogprob); }

// The n likeliest of the row, in order. n is small: an insertion list beats a heap.
std::vector<Candidate> head_of(std::span<const float> row, size_t n) {
  std::vector<Candidate> head;
  head.reserve(n + 1);
  for (size_t i = 0; i < row.size() && n > 0; ++i) {
    Candidate c{0, row[i], int32_t(i)};
    if (head.size() == n && !likelier(c, head.back())) continue;
    head.insert(std::upper_bound(head.begin(), head.end(), c, likelier), c);
    if (head.size() > n) head.pop_back();
  }
  return head;
}

double unit(uint64_t seed, uint64_t index) { return double(random_u64(seed, index) >> 11) * 0x1p-53; }

// Where u * total falls. Rounding may leave the target at the very end, which belongs to the last positive weight.
template <typename Weight>
size_t pick(size_t n, const Weight& weight, double total, double u) {
  const double target = u * total;
  double sum = 0;
  size_t last = 0;
  for (size_t i = 0; i < n; ++i) {
    if (weight(i) <= 0) continue;
    last = i;
    sum += weight(i);
    if (sum > target) break;
  }
  return last;
}

// The shortest head of the order that weighs at least `enough`; returns its weight. Sorts in growing pieces, since the
// head is nearly always a tiny part of the vocabulary.
double keep_nucleus(std::vector<Candidate>* c, double enough) {
  double kept = 0;
  size_t sorted = 0, n = 0;
  do {
    if (n == sorted) {
      const size_t next = std::min(c->size(), std::max<size_t>(64, 8 * sorted));
      if (next < c->size())
        std::nth_element(c->begin() + int64_t(sorted), c->begin() + int64_t(next) - 1, c->end(), likelier);
      std::sort(c->begin() + int64_t(sorted), c->begin() + int64_t(next), likelier);
      sorted = next;
    }
    kept += (*c)[n++].weight;
  } while (kept < enough && n < c->size());
  c->resize(n);
  return kept;
}

// Precondition: temperature above kGreedyBelow, something is allowed.
int32_t draw(std::span<const float> row, const SamplingParams& p, double u) {
  const double m = max_of(row);
  std::vector<double>& weights = scratch.weights;
  weights.resize(row.size() + kLanes);
  exp_row(row, m, 1.0 / p.temperature, weights.data());

  const bool k_limited = p.top_k > 0 && p.top_k < int64_t(row.size());
  if (!k_limited && p.min_p <= 0 && p.top_p >= 1) {
    double total = 0;
    for (size_t i = 0; i < row.size(); ++i) total += weights[i];
    return int32_t(pick(
        row.size(), [&](size_t i) { return weights[i]; }, total, u));
  }

  std::vector<Candidate>& c = scratch.candidates;
  c.clear();
  for (size_t i = 0; i < row.size(); ++i) {
    if (row[i] != kForbidden && weights[i] >= p.min_p) c.push_back({weights[i], row[i], int32_t(i)});
  }
  if (k_limited && int64_t(c.size()) > p.top_k) {
    std::nth_element(c.begin(), c.begin() + p.top_k - 1, c.end(), likelier);
    c.resize(size_t(p.top_k));
    std::sort(c.begin(), c.end(), likelier);  // nth_element leaves an order of its own, which the sum must not follow
  }
  double total = 0;
  for (const Candidate& x : c) total += x.weight;
  if (p.top_p < 1) total = keep_nucleus(&c, p.top_p * total);
  return c[pick(
               c.size(), [&](size_t i) { return c[i].weight; }, total, u)]
      .token;
}

}  // namespace

bool usable_row(std::span<const float> logits) {
  int bad = 0;
  for (float x : logits) bad |= !(x <= FLT_MAX);  // NaN too
  return bad == 0;
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

Sampler::Sampler(const SamplingParams& params, uint64_t seed, std::span<const int32_t> prompt,
                 std::vector<int32_t> end_ids)
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
bool Sampler::adjust(std::span<const float> logits, std::span<const uint32_t> mask, bool forbid_ends,
                     std::vector<float>* out) const {
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
