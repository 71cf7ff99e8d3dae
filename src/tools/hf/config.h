#pragma once
// config.json of a checkpoint that convert writes: the source's own (the MIR keeps it), with what is different now.

#include "base/json.h"
#include "tools/hf/plan.h"

namespace mi::tools::hf {

// dtype: of the float weights. Errors name the file that is missing.
Result<Json> make_config(const ir::MirDir& m, const FilePlan& plan, Form form, DType dtype,
                         std::vector<std::string>* notes);

// quantization_config for compressed-tensors: one group for each way in which modules are stored (int8; int4 per group
// size), every float one named in `ignore`. Precondition: a module is quantized.
Json quantization_config(const std::vector<Module>& modules, const std::vector<std::string>& skipped);

}  // namespace mi::tools::hf
