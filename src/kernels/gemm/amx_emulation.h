#pragma once
// A matrix unit in plain C++ for the tests, strict where hardware is: what Intel's manual (SDM vol. 2: LDTILECFG,
// TILELOADD, TDPBSSD; "Operation" and "Exceptions") answers with an exception is a failed check here. Two ways in:
// EmulatedTiles, an operation class for the loops of i8_amx_tile.h, and TrapTiles, which runs the compiled kernel
// itself on a CPU without AMX: its tile instructions raise SIGILL and are decoded and carried out.

#include <cstdint>

#include "kernels/gemm/args.h"

namespace mi::kernels {

// Tile state of one thread.
class TileMachine {
 public:
  static TileMachine& of_this_thread();

  void configure(const uint8_t* memory);  // 64 bytes; palette 0 or 1
  void release();
  void zero(int t);
  void load(int t, const uint8_t* base, int64_t stride);
  void store(int t, uint8_t* base, int64_t stride);
  void dot(int c, int a, int b);  // tdpbssd: tile c += tile a * tile b

  bool configured() const { return configured_; }
  int64_t configurations() const { return configurations_; }
  int64_t products() const { return products_; }
  int64_t multiplications() const { return multiplications_; }  // of bytes

 private:
  struct Tile {
    int rows = 0, row_bytes = 0;
    uint8_t data[16][64];
  };
  Tile& valid(int t, const char* who);

  bool configured_ = false;
  Tile tile_[8];
  int64_t configurations_ = 0, products_ = 0, multiplications_ = 0;
};

// gemm_i8_amx's loops for any number of rows, over the calling thread's TileMachine.
void gemm_i8_amx_emulated(const GemmArgs& a, const GemmRange& r, void* scratch);

// gemm_i8_amx as it was compiled, its tile instructions carried out by the calling thread's TileMachine: for a CPU that
// has AVX-512 VNNI but no AMX.
void gemm_i8_amx_trapped(const GemmArgs& a, const GemmRange& r, void* scratch);

}  // namespace mi::kernels
