#pragma once
// Experts of a layer stored by how tokens choose them, not by number: the hot ones first, those chosen together next to each
// other, so that fewer pages and fewer reads bring what a token wants. The order is learnt from the first half of recorded
// choices and judged on the second, layer by layer; where that half promises nothing, the order stays. Numbers of experts stay
// in any case, and so do all answers.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "artifact/expert_profile.h"
#include "artifact/types.h"
#include "base/file.h"
#include "base/json.h"
#include "base/result.h"

namespace mi::compiler {

// How unevenly the tokens of a layer choose.
inline constexpr double kCoverShares[] = {0.1, 0.25, 0.5};
struct ExpertSpread {
  double skew = 0;         // the busiest expert's tokens over the mean
  double covered[3] = {};  // of the second half's choices, by the first half's busiest kCoverShares of experts
};
int64_t busiest(double share, int64_t experts);  // how many a share of them is
ExpertSpread spread_of(const artifact::ExpertProfile::Layer& l, int64_t tokens);

// What a token reads of its experts, where none of them is in memory (artifact/expert_reads.h).
struct ReadCost {
  double pages = 0, reads = 0;
  // In bytes. A read counts as so many more of them, which fits what was measured with 8 readers and a disk of 2.6 GB/s: mini-m3 in
  // 4 bits 0.88 of the time expected and 0.89 to 0.96 measured for real choices, 0.56 and 0.48 to 0.71 for always the same four.
  static constexpr double kReadBytes = 16 << 10;
  double bytes() const { return pages * 4096 + reads * kReadBytes; }
};

struct LayerOrder {
  int32_t layer = 0;
  ExpertSpread spread;
  std::vector<int32_t> slots;    // the learnt order: where expert e would stand
  ReadCost as_is, learnt;        // mean of a token of the second half
  double gain = 0, error = 0;    // share of as_is.bytes() that the learnt order saves; its standard error
  int64_t judged = 0;            // tokens
  int64_t matrix_bytes = 0;      // the largest matrix of an expert
  bool pays() const;
  std::string why_not() const;   // a clause, where it does not pay
};

// As the experts lie in m, whose weights have their places. Layers of the profile that the program has experts for.
std::vector<LayerOrder> learn_order(const artifact::ExpertProfile& p, const artifact::Manifest& m);

// The same choices of the second half, read from the file in both orders.
struct OrderReplay {
  int64_t tokens = 0;
  double as_is = 0, learnt = 0;  // seconds
  int64_t as_is_reads = 0, learnt_reads = 0;
  std::string how;               // a clause
};
using ReplayOrder = std::function<Result<OrderReplay>(const Path& weights, const artifact::Manifest& m, const artifact::ExpertProfile& p)>;

// What a build did about it.
struct ExpertOrder {
  std::string source;            // of the choices
  int64_t tokens = 0;
  std::vector<LayerOrder> layers;
  int64_t unknown = 0;           // layers with experts that the profile does not have
  std::optional<OrderReplay> replay;  // where a layer was reordered
  int64_t reordered() const;
};

// Sets WeightTensor::expert_slots of the layers for which it pays. The weights' places are estimated by their sizes.
ExpertOrder order_experts(const artifact::ExpertProfile& p, artifact::Manifest* m);

// For people: lines that begin with "expert order"; rows of a table; for machines.
std::string expert_order_text(const ExpertOrder& o);
std::string expert_order_html(const ExpertOrder& o);
Json expert_order_json(const ExpertOrder& o);

}  // namespace mi::compiler
