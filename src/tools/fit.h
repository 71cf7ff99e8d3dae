#pragma once
// Whether an engine fits into memory, and what to change to what so that it does.

#include <cstdint>
#include <string>

#include "exec/memory_plan.h"

namespace mi::tools {

struct FitQuestion {
  const artifact::Manifest* manifest = nullptr;
  exec::LoadOptions load;      // its kv_pages are computed here
  int threads = 1;
  int64_t batch = 0, seq = 0;  // sequences of so many tokens
  double kv_fraction = 0.6;    // of what weights, activations and workspace leave
  int64_t room = 0;            // bytes that may be taken
};

// Pages for the sequences, or as many as the fraction allows.
int64_t pages_that_fit(const FitQuestion& q);
int64_t pages_wanted(const FitQuestion& q);

// "--max-batch-size 12, or --max-seq-len 1536, or --kv-type int8, or weights of 4 bits (quantize to W4A8: about 1.4 GB
// instead of 2.7 GB), or --expert-cache 1.2gib": each alone is enough; "": nothing is.
std::string what_would_fit(const FitQuestion& q);

}  // namespace mi::tools
