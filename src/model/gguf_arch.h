#pragma once
// What GGUF calls our families' parts: one table for the files that are read (gguf_import.h) and those that are written
// (tools/gguf). Checked against ggml-org/llama.cpp, gguf-py/gguf/constants.py and src/models.

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"

namespace mi::model {

struct GgufArch {
  const char* arch;    // general.architecture
  const char* family;  // of a recipe
  bool moe = true;     // has layers with experts; "llama" is one architecture with and without
  bool pairs =
      false;  // rotates neighbouring pairs where our family rotates halves, with the rows of q and k in that order
  const char* mlp_norm = "ffn_norm";
  // Config values that the architecture has built in, by the recipe's canonical names.
  std::vector<std::pair<const char*, Json>> built_in = {};
  bool can_import = true;
};

// Of a part of tokenizer.json: a text or a flag, "" or false where there is none of this kind.
std::string text_of(const Json& j, const char* key);
bool flag_of(const Json& j, const char* key);
// The parts of a pre_tokenizer: of a Sequence its members, else itself.
std::vector<Json> parts_of(const Json& p);

const std::vector<GgufArch>& gguf_archs();
const GgufArch* find_gguf_family(std::string_view family);                // nullptr: has none
const GgufArch* find_gguf_arch(std::string_view arch, bool has_experts);  // nullptr: unknown

// "attn_q.weight" for "attn.q.weight", without "blk.N."; "token_embd.weight" for "embed.weight". "" for a weight that
// GGUF has no name for.
std::string gguf_tensor_name(const GgufArch& a, std::string_view local);

// The splitting rules of byte-level BPE that llama.cpp has built in and knows by name (tokenizer.ggml.pre).
// The name of tokenizer.json's pre_tokenizer, "" if there is none. ignore_merges: of the BPE model.
std::string pre_tokenizer_name(const Json& pre_tokenizer, bool ignore_merges);
// The other way round; nullopt for an unknown name.
struct PreTokenizer {
  Json pre_tokenizer;
  bool ignore_merges = false;
};
std::optional<PreTokenizer> pre_tokenizer_of(std::string_view name);

}  // namespace mi::model
