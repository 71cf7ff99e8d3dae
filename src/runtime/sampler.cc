#include "runtime/sampler.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "base/util.h"
#include "kernels/sample/sample.h"

namespace mi::runtime {

namespace {

constexpr float kForbidden = -std::numeric_limits<float>::infinity();

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
  std::vector<float> row, row_of_head;
  std::vector<double> weights, sums;  // kernels::weigh_row
  std::vector<Candidate> candidates;
};
thread_local Scratch scratch;

float max_of(std::span<const float> row) { return kernels::max_of_row(row.data(), int64_t(row.size()), hw::cpu()); }

// Fills scratch.weights and scratch.sums; returns the sum of all, block after block.
double weigh(std::span<const float> row, double max, double scale) {
  const auto blocks = size_t(kernels::weight_blocks(int64_t(row.size())));
  scratch.weights.resize(blocks * size_t(kernels::kWeightBlock));
  scratch.sums.resize(blocks);
  kernels::weigh_row(row.data(), int64_t(row.size()), max, scale, scratch.weights.data(), scratch.sums.data(),
                     hw::cpu());
  double total = 0;
  for (double sum : scratch.sums) total += sum;
  return total;
}

int32_t argmax(std::span<const float> row) {
  float m = max_of(row);
  return int32_t(std::find(row.begin(), row.end(), m) - row.begin());
}

double log_sum_exp(std::span<const float> row) {
  const double m = max_of(row);
  if (std::isinf(m)) return 0.0;  // nothing is possible; every score is the lowest
  return m + std::log(weigh(row, m, 1.0));
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

// Where `target` falls, `before` being the weight in front of the first. Rounding may leave the target at the very end,
// which belongs to the last positive weight.
template <typename Weight>
size_t pick(size_t n, const Weight& weight, double target, double before = 0) {
  double sum = before;
  size_t last = 0;
  for (size_t i = 0; i < n; ++i) {
    if (weight(i) <= 0) continue;
    last = i;
    sum += weight(i);
    if (sum > target) break;
  }
  return last;
}

// The same over all of scratch.weights, whole blocks first.
size_t pick_weighed(double target) {
  constexpr auto kBlock = size_t(kernels::kWeightBlock);
  double before = 0;
  const size_t block = pick(
      scratch.sums.size(), [](size_t b) { return scratch.sums[b]; }, target);
  for (size_t b = 0; b < block; ++b) before += scratch.sums[b];
  const double* weights = scratch.weights.data() + block * kBlock;
  return block * kBlock + pick(
                              kBlock, [weights](size_t i) { return weights[i]; }, target, before);
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

constexpr int64_t kSmallK = 256;  // up to here an insertion list is quicker than a partition of all

// Precondition: temperature above kGreedyBelow, something is allowed.
int32_t draw(std::span<const float> row, const SamplingParams& p, double u) {
  const double m = max_of(row), scale = 1.0 / p.temperature;
  const bool k_limited = p.top_k > 0 && p.top_k < int64_t(row.size());
  std::vector<Candidate>& c = scratch.candidates;
  double total = 0;
  if (k_limited && p.top_k <= kSmallK) {
    // Only the head has to be weighed.
    c = head_of(row, size_t(p.top_k));
    scratch.row_of_head.clear();
    for (const Candidate& x : c) scratch.row_of_head.push_back(x.logit);
    weigh(scratch.row_of_head, m, scale);
    for (size_t i = 0; i < c.size(); ++i) c[i].weight = scratch.weights[i];
    std::erase_if(c, [&](const Candidate& x) { return x.logit == kForbidden || x.weight < p.min_p; });
  } else {
    total = weigh(row, m, scale);
    if (!k_limited && p.min_p <= 0 && p.top_p >= 1) return int32_t(pick_weighed(u * total));
    // All that is lighter together weighs less than what top_p leaves out.
    double least = p.min_p;
    if (!k_limited && p.min_p <= 0) least = (1 - p.top_p) * total / double(row.size());
    const std::vector<double>& weights = scratch.weights;
    c.clear();
    for (size_t i = 0; i < row.size(); ++i) {
      if (row[i] != kForbidden && weights[i] >= least) c.push_back({weights[i], row[i], int32_t(i)});
    }
    if (k_limited) {
      if (int64_t(c.size()) > p.top_k) {
        std::nth_element(c.begin(), c.begin() + p.top_k - 1, c.end(), likelier);
        c.resize(size_t(p.top_k));
      }
      std::sort(c.begin(), c.end(), likelier);  // the order of the small head, and none that nth_element left
    }
  }
  if (k_limited || p.min_p > 0) {
    total = 0;
    for (const Candidate& x : c) total += x.weight;
  }
  if (p.top_p < 1) total = keep_nucleus(&c, p.top_p * total);
  return c[pick(
               c.size(), [&](size_t i) { return c[i].weight; }, u * total)]
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
