#pragma once
// A manifest's program as text, one instruction per line, for people and for tests.

#include <string>

#include "artifact/types.h"

namespace mi::artifact {

// "layer 3: linear attn.norm[0:64], x -> x_attn  weight=layers.3.attn.o.weight  (residual 1, layer output)". Columns
// are given where an operand is a part of its buffer. Works on manifests that were not validated.
std::string program_text(const Manifest& m);

}  // namespace mi::artifact
