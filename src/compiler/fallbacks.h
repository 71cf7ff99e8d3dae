#pragma once
// Matrix products of a quantized (W8A8, W4A8) model that are not int8: each is a place where the engine is slower than it could be, and a
// surprise if nobody says it. The router, the head, the block index and a shared expert's one-column gate are float by
// design and do not count.

#include <vector>

#include "artifact/types.h"
#include "ir/graph.h"

namespace mi::compiler {

// Empty for a model without any quantized matrix.
std::vector<artifact::Fallback> find_fallbacks(const ir::Graph& g);
// "layers 0-2, 5", "layer 3"
std::string layers_text(const std::vector<int32_t>& layers);

}  // namespace mi::compiler
