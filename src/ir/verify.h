#pragma once
// What is legal MIR. Run after export, after parsing, and after every pass.

#include "base/result.h"
#include "ir/graph.h"

namespace mi::ir {
// Checks: layers complete and disjoint; unique names; every use after its definition; types as infer() says; weights
// declared, of fitting shape, used by at least one node; kW8A8 weights read through kQ8 values only and float ones
// through kF32; stacked weights agree in K and format. The error names block, node and what to do.
Status verify(const Graph& g);
}  // namespace mi::ir
