#pragma once
// Which experts the tokens of real text chose, as a file: `metainfer profile --experts` writes it, serve and build learn from it.
// Whoever promises something of it learns from the first half of the tokens and judges on the second.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "artifact/types.h"
#include "base/file.h"
#include "base/result.h"

namespace mi::artifact {

struct ExpertProfile {
  struct Layer {
    int32_t layer = 0;
    int64_t experts = 0, k = 0;
    std::vector<int32_t> ids;  // [tokens, k], ascending within a token
    std::span<const int32_t> of(int64_t token) const { return {ids.data() + token * k, size_t(k)}; }
    std::vector<int64_t> counts(int64_t begin, int64_t end) const;  // by expert: of these tokens, how many chose it
  };
  std::string model, source;   // model: the engine's name
  int64_t tokens = 0;
  std::vector<Layer> layers;   // ascending; some with experts may be missing
  int64_t half() const { return tokens / 2; }  // the first token that judges
};

Status write_expert_profile(const ExpertProfile& p, const Path& file, bool force);
// Errors (kBadInput): not such a file, or one of a model with other experts than the program's routes choose from.
Result<ExpertProfile> read_expert_profile(const Path& file, const Manifest& m);

}  // namespace mi::artifact
