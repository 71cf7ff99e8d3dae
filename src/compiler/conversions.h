#pragma once
// Where a quantized model's values change between int8 and float, and why. Between two matrices they stay int8 wherever a
// float function, a float sum or the attention does not stand between them.

#include <cstdint>
#include <string>
#include <vector>

#include "ir/graph.h"

namespace mi::compiler {

struct Conversion {
  std::string where;  // "layers 1-3: o_q"
  bool to_int8 = false;
  std::string by;     // "rms_norm", "the epilogue of linear", "quantize, a kernel call of its own"
  std::string why;
  int64_t times = 0;              // in a step: once per layer
  bool own_call = false;          // a kernel call of its own, which reads a buffer of floats
  int64_t buffer_bytes = 0;       // of that buffer, per token
};

// Of the graph after the passes, in its order; none of a model without quantized matrices.
std::vector<Conversion> find_conversions(const ir::Graph& g);
// "24 int8 -> float, all in epilogues; 18 float -> int8: 8 in rms_norm, 4 in grouped_experts, 6 of their own": one line.
std::string conversions_line(const std::vector<Conversion>& all);

}  // namespace mi::compiler
