#pragma once
// The text form of MIR ("model.mir", "graph.mir"). print() and parse() round-trip exactly: parse(print(g)) == g.

#include <string>
#include <string_view>

#include "base/result.h"
#include "ir/graph.h"

namespace mi::ir {

std::string print(const Graph& g);
std::string type_text(const ValueType& t);  // "f32[T, 64]", "state"
// Errors name line and column and what was expected; depth and sizes are bounded. Does not verify (verify.h).
Result<Graph> parse(std::string_view text);

}  // namespace mi::ir
