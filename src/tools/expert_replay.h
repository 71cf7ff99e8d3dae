#pragma once
// What an order of experts in weights.bin is worth on this machine: recorded choices read through the engine's own stream
// (exec/expert_stream.h), as the experts lie and as they would lie in the order of their numbers. Which bytes an expert has
// does not matter for that, so one file serves both.

#include "compiler/expert_order.h"

namespace mi::tools {

// A compiler::ReplayOrder: tokens of the profile's second half, some seconds of them, both orders in turns, with memory for a
// quarter of the experts of reordered layers. Where that memory cannot be had, or nothing can be read: no seconds, and why.
Result<compiler::OrderReplay> replay_order(const Path& weights, const artifact::Manifest& m, const artifact::ExpertProfile& p);

}  // namespace mi::tools
