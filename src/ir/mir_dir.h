#pragma once
// A MIR directory on disk:
//   model.mir                  the graph (text.h)
//   weights/NNNNN.safetensors  tensors under their full names ("layers.3.attn.q.weight", "..._scale"); each in one file
//   tokenizer/                 tokenizer.json, chat_template.jinja, generation_config.json, tokenizer_config.json
//                              (those that exist)
//   source/config.json         the checkpoint's config.json as it was; of a GGUF file, what its keys say in that form.
//                              Nothing of the graph depends on it: it is kept for checkpoints that are written again
//   provenance.json            source hashes, tool version, options, calibration statistics' hash
// Reading maps the weights and checks that they are exactly those that the graph declares, with its shapes and dtypes.

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/json.h"
#include "base/result.h"
#include "ir/graph.h"
#include "tensor/safetensors.h"

namespace mi::ir {

struct MirDir {
  Path dir;
  Graph graph;  // verified
  Json provenance;
  std::vector<std::shared_ptr<Safetensors>> files;
  std::map<std::string, std::pair<int, const Safetensors::Entry*>, std::less<>> index;
  std::map<std::string, std::shared_ptr<const Tensor>, std::less<>>
      made;  // tensors in memory; they stand before those of the files

  static Result<MirDir> open(const Path& dir);
  // Precondition: declared by the graph (MI_CHECK).
  TensorView weight(std::string_view full_name) const;
  // The kernel may take back the memory of a mapped tensor; reading it again costs a page fault.
  void give_back(std::string_view full_name) const;
  bool has(std::string_view full_name) const {
    return index.find(full_name) != index.end() || made.find(full_name) != made.end();
  }
};

// A part of a model as a model of its own, to be built and run alone; it shares the files of `whole`.
//   layer >= 0: that layer, as layer 0, between an embedding of one id and a head of one logit, both zero
//   layer < 0:  prologue and epilogue with a layer between them that changes nothing
MirDir piece_of(const MirDir& whole, int32_t layer);

// Every tensor that `g` declares, in writing order: prologue, layers ascending, epilogue; scales follow their matrices.
std::vector<SafetensorsWriter::Decl> declared_tensors(const Graph& g);

// Writes a MIR directory: the graph fixes the tensors and their order, then their bytes are written, in parts of any
// size.
class MirWriter {
 public:
  // out: inside an OutputDir. Precondition: the layers of g are complete (verify). Shards are cut at tensor borders
  // near shard_bytes. kept: a folder that survives this process, or none: finished shards are linked into it, each with a
  // checksum beside it, and those that are there from an earlier run, unchanged, in order and without a gap, are taken as
  // written. Whether they belong to the same output is the caller's to know.
  static Result<MirWriter> create(const Path& out, const Graph& g, size_t shard_bytes = size_t(4) << 30,
                                  const Path& kept = {});
  ~MirWriter();
  MirWriter(MirWriter&&) noexcept;
  const std::vector<SafetensorsWriter::Decl>& order() const;
  size_t first() const;  // place in order() of the first tensor to be written
  // A tensor before first(), to be read.
  Result<Tensor> kept_tensor(size_t place) const;
  Status write(
      std::span<const std::byte> bytes);  // parts of order()[i], in order; a part may cross into the next tensor
  Status finish(const Graph& g, const Json& provenance);  // verifies g, writes model.mir and provenance.json

 private:
  struct Impl;
  explicit MirWriter(std::unique_ptr<Impl> i);
  std::unique_ptr<Impl> impl_;
};

// Copies the known tokenizer files (those that exist) into to_dir/tokenizer. from_dir: a MIR or engine directory (its
// tokenizer/ folder), or a checkpoint that has them at its top.
Status copy_tokenizer(const Path& from_dir, const Path& to_dir);

inline constexpr const char* kSourceConfig = "source/config.json";
// Into a MIR directory that is being written.
Status write_source_config(std::string_view text, const Path& to_dir);
// From one MIR directory to another; nothing where it has none (one of an older version).
Status copy_source_config(const Path& from_dir, const Path& to_dir);

}  // namespace mi::ir
