#pragma once
// A model's text side as GGUF keys ("tokenizer.*"): byte-level BPE with its merges, the name of its pre-tokenizer,
// special ids, the chat template. llama.cpp has the splitting rules of pre-tokenizers built in and knows them by name
// only; a rule that is not among the known ones is refused, since another would tokenize text differently without a
// word.

#include <string>
#include <vector>

#include "base/file.h"
#include "base/json.h"
#include "base/result.h"
#include "ir/graph.h"
#include "model/gguf_writer.h"

namespace mi::tools::gguf {

struct VocabOptions {
  bool leave_out = false;     // token ids only
  std::string pre_tokenizer;  // the name to use; "" = recognise it
};

// tokenizer_dir: of a MIR. Without tokenizer.json, or left out: the model takes token ids only (tokenizer.ggml.model
// "none"). Appends to notes. The file has info.vocab tokens; rows of the embedding without a token are filled with
// unused ones.
Status put_vocab(const Path& tokenizer_dir, const ir::ModelInfo& info, const VocabOptions& o, model::GgufKeys* keys,
                 std::vector<std::string>* notes);

}  // namespace mi::tools::gguf
