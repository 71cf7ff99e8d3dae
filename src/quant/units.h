#pragma once
// What a search decides about: the matrices of one layer that do one job (attention, experts, shared expert, dense
// network), all in one format.

#include <string>
#include <vector>

#include "ir/graph.h"
#include "quant/config.h"

namespace mi::quant {

struct UnitMatrix {
  int64_t n = 0, k = 0;
  double count = 1;   // that are stored: experts one by one
  double active = 1;  // that a token is multiplied with
};

struct Unit {
  int32_t layer = 0;
  std::string name;  // "layers.3.moe.experts": as a recipe names it
  ir::Mark mark = ir::Mark::kNone;
  std::vector<UnitMatrix> matrices;
  std::vector<std::string> values;  // that these matrices read
};

// Float matrices that a recipe rounds by default, by layer, in the order of the block.
std::vector<Unit> units_of(const ir::Graph& g);

// Bytes of a unit's weights and scales in a format, as stored.
int64_t unit_bytes(const Unit& u, LayerFormat f, DType float_type);
double bits_per_weight(const Unit& u, LayerFormat f, DType float_type);
// 32, 64 or 128; 0: not int4. kInt4 has its group in the recipe and is not meant here.
int64_t group_of(LayerFormat f);

}  // namespace mi::quant
