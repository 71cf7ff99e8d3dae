#pragma once
// The safetensors container: a validated, mapped reader and a streaming writer.
// Reading believes nothing: header length against the file, JSON depth and duplicates, known dtypes, shape product
// without overflow and equal to the byte range, ranges inside the file without gap or overlap, metadata of strings only.
// Errors name the file and the tensor. Limit: header 512 MB (documented in the message).

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/result.h"
#include "tensor/tensor_view.h"

namespace mi {

class Safetensors {
 public:
  struct Entry { std::string name; DType dtype; Shape shape; size_t begin, end; };   // bytes relative to the file

  static Result<Safetensors> open(const Path& file);
  const std::vector<Entry>& entries() const { return entries_; }      // by offset
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const Entry* find(std::string_view name) const;
  TensorView view(const Entry& e) const;
  Result<TensorView> tensor(std::string_view name) const;             // error names file and tensor
  const MappedFile& file() const { return file_; }

  // Header parsing alone, for fuzzing: `header` is the JSON, data_bytes what follows it.
  static Result<std::vector<Entry>> parse_header(std::string_view header, uint64_t data_bytes, const std::string& what,
                                                 std::map<std::string, std::string>* metadata);

 private:
  MappedFile file_;
  std::vector<Entry> entries_;
  std::map<std::string, size_t, std::less<>> by_name_;
  std::map<std::string, std::string> metadata_;
};

// Names, dtypes and shapes are declared first, then data is written in the declared order, in as many parts as wanted.
class SafetensorsWriter {
 public:
  struct Decl { std::string name; DType dtype; Shape shape; };
  static Result<SafetensorsWriter> create(const Path& file, std::vector<Decl> decls);
  Status write(std::span<const std::byte> bytes);     // continues the current tensor; must not run past the last one
  Status finish();                                     // MI_CHECK: everything was written

 private:
  explicit SafetensorsWriter(FileWriter f) : file_(std::move(f)) {}
  FileWriter file_;
  size_t expected_ = 0, written_ = 0;
};

}  // namespace mi
