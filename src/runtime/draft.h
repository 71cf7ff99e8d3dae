#pragma once
// Guesses of the next tokens without a second model: what followed the last time that the text read as it does now.
// Answers that repeat their prompt (code that is edited, summaries, extraction) are guessed well, others cost little.

#include <cstdint>
#include <span>
#include <vector>

namespace mi::runtime {

// Up to `most` tokens that stood behind the latest earlier occurrence of the last 4 tokens, else 3, else 2. Looks at
// the last 8192 tokens. Empty if there is none.
std::vector<int32_t> repeat_draft(std::span<const int32_t> tokens, int64_t most);

}  // namespace mi::runtime
