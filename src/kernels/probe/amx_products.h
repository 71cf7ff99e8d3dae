#pragma once
// The AMX probes' loop, over a class T of tile operations with `dot` (kernels/amx.h).

#include "kernels/amx.h"
#include "kernels/probe/args.h"

namespace mi::kernels::MI_ISA {

// Four sums of 16 x 16, each round all of them with two left and two right tiles: 4 * 16 * 16 products of rows of ones.
// ones: a tile; Sum: the sums' type, large enough to count exactly.
template <class T, typename Sum>
static inline int64_t count_products(const void* ones, int64_t loops) {
  T::configure(tile_config());
  T::template zero<0>();
  T::template zero<1>();
  T::template zero<2>();
  T::template zero<3>();
  T::template load<4>(ones, 64);
  T::template load<5>(ones, 64);
  T::template load<6>(ones, 64);
  T::template load<7>(ones, 64);
  for (int64_t i = 0; i < loops; ++i) {
    T::template dot<0, 4, 6>();
    T::template dot<1, 4, 7>();
    T::template dot<2, 5, 6>();
    T::template dot<3, 5, 7>();
  }
  alignas(64) Sum sums[4][16 * 16];
  T::template store<0>(sums[0], 64);
  T::template store<1>(sums[1], 64);
  T::template store<2>(sums[2], 64);
  T::template store<3>(sums[3], 64);
  T::release();
  int64_t total = 0;
  for (const auto& tile : sums)
    for (Sum v : tile) total += int64_t(v);
  return total;
}

}  // namespace mi::kernels::MI_ISA
