#pragma once
// Blocking generation for commands and tools: many prompts through one loop, batched like a server's.

#include <functional>
#include <string>
#include <vector>

#include "runtime/loop.h"

namespace mi::runtime {

struct Completion {
  std::vector<int32_t> tokens;      // generated, with the end token if one ended it
  std::string text;                 // without stop string and end token
  std::vector<ScoredToken> scores;  // one per token if SamplingParams::logprobs >= 0, else empty
  std::vector<ScoredToken> prompt;  // if Request::prompt_logprobs
  std::vector<float> embedding;     // if Request::pooling
  FinishEvent finish;
};

// Runs all to their end; result i belongs to request i. A request that the loop refuses is an error that names it, and
// then none is run further. on_event, if given, sees every event as it happens, on the loop's thread.
Result<std::vector<Completion>> generate(EngineLoop& loop, std::vector<Request> requests,
                                         const std::function<void(size_t index, const Event&)>& on_event = {});

}  // namespace mi::runtime
