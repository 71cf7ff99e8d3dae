#pragma once
// Places activation buffers in one arena by lifetime. Everything is per token of the step's capacity, so that one plan
// fits any capacity T: buffer i has bytes [T * offset, T * (offset + size)).

#include <cstdint>
#include <vector>

#include "artifact/types.h"
#include "base/result.h"

namespace mi::compiler {

// Sets offset_per_token of every buffer (multiples of 64) and returns the arena's bytes per token. Largest first, each
// at the lowest offset that is free during its whole lifetime. Deterministic.
// share false: each has its own place, one after the other.
int64_t plan_memory(std::vector<artifact::Buffer>& buffers, bool share = true);

// The sum of the buffers' sizes: what the arena would take without sharing.
int64_t unshared_bytes(const std::vector<artifact::Buffer>& buffers);
// The most bytes alive at one instruction: no plan can be smaller.
int64_t peak_bytes(const std::vector<artifact::Buffer>& buffers);

// The planner's judge, written apart from it (memory_plan_verify.cc): compares every pair of buffers. The error names
// the two that are alive together and share bytes, or the one that leaves the arena.
Status verify_memory_plan(const std::vector<artifact::Buffer>& buffers, int64_t arena_bytes_per_token);

}  // namespace mi::compiler
