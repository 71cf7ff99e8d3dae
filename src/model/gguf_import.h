#pragma once
// A GGUF file as the source of an export. Its keys become a config.json of the family's spelling, its tensors those of
// a checkpoint under their own names, with a recipe that knows these; the tokenizer is rebuilt from its keys. What the
// architecture has built in that the family's recipe leaves to the config comes from gguf_arch.h.

#include <string>
#include <vector>

#include "model/arch.h"
#include "model/gguf.h"
#include "model/gguf_arch.h"
#include "model/recipe.h"
#include "model/tokenizer_files.h"

namespace mi::model {

struct GgufModel {
  const GgufArch* arch = nullptr;
  std::string model_type;  // of the family's recipe
  Recipe recipe;           // the family's, reading "blk.{layer}." names
  Json config;
  Json gating;  // expert_gating_func: 1 softmax, 2 sigmoid; null: not said
  TokenizerFiles text;
  std::vector<std::string> notes;
};

// Refused by name: an architecture or a tensor type that is not known, a part of a split file, keys that say what the
// family's graph does not do. path: of the file, for messages.
Result<GgufModel> read_gguf_model(const GgufHeader& h, const std::string& path);

// What only the file decides about the graph: rotation of neighbouring pairs. Refused: a router that is not the
// family's.
Status follow_gguf(const GgufModel& m, ArchSpec* spec);

// The header's tokenizer as tokenizer.json, tokenizer_config.json and a chat template. One that cannot be rebuilt is
// left out with a note.
TokenizerFiles gguf_tokenizer(const GgufHeader& h);

}  // namespace mi::model
