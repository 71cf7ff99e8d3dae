#pragma once
// Which experts stay in memory: those used last, with a credit for those that are chosen often. Shared by the stream and
// by whoever predicts what a cache is worth.

#include <cstdint>
#include <span>

namespace mi::exec {

inline constexpr float kLearnChance = 1.0f / 256;  // of one step
inline constexpr double kChanceCredit = 32;        // tokens that an expert which every token chooses counts as used later

// chances: that a step wants each expert of a layer.
inline void learn_chances(std::span<float> chances, std::span<const int32_t> wanted) {
  for (float& c : chances) c -= kLearnChance * c;
  for (const int32_t e : wanted) chances[size_t(e)] += kLearnChance;
}

// The least makes room. used: the clock when the expert was last wanted; it ticks once for each layer of a step.
inline double keep_score(int64_t used, float chance, int64_t layers) { return double(used) + kChanceCredit * double(layers) * double(chance); }

}  // namespace mi::exec
