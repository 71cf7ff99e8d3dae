#pragma once
// The tensors of a GGUF file, or of a checkpoint folder: model.safetensors, or shards with
// model.safetensors.index.json, or a complete set of shards model-00001-of-000NN.safetensors without index. Index,
// shard headers and disk are compared three ways; a shard or tensor that one of them knows and another does not is an
// error that names it. Names that leave the folder are never opened.

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "model/gguf.h"
#include "tensor/safetensors.h"

namespace mi::model {

class Checkpoint {
 public:
  struct Tensor {
    const MappedFile* file = nullptr;
    const Safetensors::Entry* entry =
        nullptr;  // of GGUF: dtype U8 stands for blocks of gguf_type, in the weight's shape
    std::optional<uint32_t> gguf_type = std::nullopt;  // formats/gguf_blocks.h; of floats: none
    const std::string& name() const { return entry->name; }
    std::string path() const { return file->path().string(); }
    TensorView view() const {
      return {entry->dtype, entry->shape, file->bytes().data() + entry->begin, entry->end - entry->begin};
    }
  };

  static Result<Checkpoint> open(const Path& dir);
  // The tensors of a GGUF file under their names there; *h gets its header.
  static Result<Checkpoint> open_gguf(const Path& file, GgufHeader* h);
  const std::map<std::string, Tensor, std::less<>>& tensors() const { return tensors_; }
  const Tensor* find(std::string_view name) const;
  std::vector<const MappedFile*> files() const;
  const Path& dir() const { return dir_; }
  const std::vector<std::string>& notes() const { return notes_; }

 private:
  Status open_file(const std::string& name, const std::string& origin);
  Status refuse_strangers(const std::vector<std::string>& listed);

  Path dir_;
  std::vector<std::unique_ptr<Safetensors>> files_;
  std::unique_ptr<MappedFile> gguf_;
  std::vector<std::unique_ptr<Safetensors::Entry>> gguf_entries_;
  std::map<std::string, Tensor, std::less<>> tensors_;
  std::vector<std::string> notes_;
};

// "a, b, c and 5 more"
std::string list_text(const std::vector<std::string>& names, size_t most = 4);

}  // namespace mi::model
