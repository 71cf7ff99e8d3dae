#include "kernels/amx.h"
#include "kernels/probe/args.h"

namespace mi::kernels {
namespace {

struct Tiles : MI_ISA::Amx {
  template <int c, int a, int b>
  static void dot() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
  }
};

}  // namespace

// Four sums of 16 x 16, each round all of them with two left and two right tiles: 4 * 16 * 16 * 64 multiply-adds.
int64_t probe_int8_amx(const ProbeWork& w) {
  alignas(64) int8_t ones[16 * 64];
  memset(ones, 1, sizeof ones);
  Tiles::configure(MI_ISA::tile_config());
  Tiles::zero<0>();
  Tiles::zero<1>();
  Tiles::zero<2>();
  Tiles::zero<3>();
  Tiles::load<4>(ones, 64);
  Tiles::load<5>(ones, 64);
  Tiles::load<6>(ones, 64);
  Tiles::load<7>(ones, 64);
  for (int64_t i = 0; i < w.loops; ++i) {
    Tiles::dot<0, 4, 6>();
    Tiles::dot<1, 4, 7>();
    Tiles::dot<2, 5, 6>();
    Tiles::dot<3, 5, 7>();
  }
  alignas(64) int32_t sums[4][16 * 16];
  Tiles::store<0>(sums[0], 64);
  Tiles::store<1>(sums[1], 64);
  Tiles::store<2>(sums[2], 64);
  Tiles::store<3>(sums[3], 64);
  Tiles::release();
  int64_t total = 0;
  for (const auto& tile : sums)
    for (int32_t v : tile) total += v;
  return total;
}

}  // namespace mi::kernels
