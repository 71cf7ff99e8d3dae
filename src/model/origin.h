#pragma once
// Where the tensors of a MIR directory come from. Export writes it into provenance.json under "tensors"; a tool then finds
// a weight by the name that the checkpoint gave it. Form of an entry:
//   "layers.0.moe.experts.gate.weight": {"from": ["model.layers.0.mlp.experts.{expert}.gate_proj.weight"]}
//   "layers.0.moe.experts.up.weight":   {"from": ["model.layers.0.mlp.experts.gate_up_proj"], "ops": [{"half": [1]}],
//                                       "shape": [8, 64, 32]}
// {expert} stands for 0, 1, ... along the first dimension; several names are stacked along the rows ("rows": how many of
// each); ops (view.h, their numbers resolved) turn the checkpoint's layout, of "shape", into the MIR's.

#include <map>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/result.h"
#include "model/view.h"

namespace mi::model {

struct Origin {
  std::vector<std::string> from;
  std::vector<int64_t> rows;  // of each name in `from`; empty: one name
  std::vector<ViewOp> ops;
  Shape shape;  // of the checkpoint's tensor, where ops are not empty
};
using Origins = std::map<std::string, Origin, std::less<>>;  // by MIR tensor

Json origins_json(const Origins& o);
// provenance: of a MIR directory; `what` names its file. An absent list is an error that says how to get one.
Result<Origins> read_origins(const Json& provenance, const std::string& what);

// The part of a MIR tensor that one tensor of the checkpoint fills.
struct OriginPart {
  std::string tensor;     // of the MIR
  int64_t expert = -1;    // index along the first dimension; -1: all of it
  int64_t first_row = 0;
  const Origin* origin = nullptr;   // into the map; its ops apply
};
std::vector<OriginPart> parts_from(const Origins& o, std::string_view checkpoint_name);

}  // namespace mi::model
