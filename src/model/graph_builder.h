#pragma once
// ArchSpec -> MIR graph: plain and unfused, one block per kind of layer. Weights are asked for by canonical name:
//   embed.weight, final_norm.weight, lm_head.weight; per layer attn_norm.weight, mlp_norm.weight,
//   attn.{q,k,v,o}.{weight,bias}, attn.{q,k}_norm.weight, attn.sinks, attn.index_{q,k}.weight,
//   attn.index_{q,k}_norm.weight, rope.inv_freq (computed), mlp.{gate,up,down}.{weight,bias}, moe.router.{weight,bias},
//   moe.select_bias, moe.experts.{gate,up,down}.{weight,bias}, moe.shared.{gate,up,down}.{weight,bias},
//   moe.shared_gate.weight
// Where a weight is W8A8, its input is quantized before it.

#include <functional>

#include "ir/graph.h"
#include "model/arch.h"

namespace mi::model {

struct WeightInfo {
  DType dtype = DType::kBF16;
  ir::WeightFormat format = ir::WeightFormat::kFloat;
};
// layer -1: of the prologue or epilogue.
using NeedWeight =
    std::function<Result<WeightInfo>(int32_t layer, const std::string& local, const Shape& shape, ir::Mark mark)>;

// tied: the head reads embed.weight. Not verified (ir/verify.h).
Result<ir::Graph> build_graph(const ArchSpec& a, bool tied, const NeedWeight& need);

}  // namespace mi::model
