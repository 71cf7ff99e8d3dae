#pragma once
// Files: reading, mapping, and writing so that a reader never sees half of anything.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "base/result.h"

namespace mi {

using Path = std::filesystem::path;

// Whole file as text; refused above max_bytes. Only regular files (a FIFO or directory is refused, never waited for).
Result<std::string> read_file(const Path& p, size_t max_bytes = size_t(256) << 20);

// A read-only mapping of a regular file. An empty file maps to an empty span.
class MappedFile {
 public:
  static Result<MappedFile> open(const Path& p);
  MappedFile() = default;
  MappedFile(MappedFile&&) noexcept;
  MappedFile& operator=(MappedFile&&) noexcept;
  ~MappedFile();
  std::span<const std::byte> bytes() const { return {data_, size_}; }
  const Path& path() const { return path_; }
  // Tells the kernel that [offset, offset+len) will not be needed again / is about to be read in order.
  void drop(size_t offset, size_t len) const;
  // Reads the bytes and maps their pages at once, not fault by fault, where the kernel can.
  void populate(size_t offset, size_t len) const;
  void will_need(size_t offset, size_t len) const;

 private:
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
  Path path_;
};

// Reads parts of a regular file into memory, from several threads at once if wanted.
class FileReader {
 public:
  static Result<FileReader> open(const Path& p);
  FileReader(FileReader&& o) noexcept;
  FileReader& operator=(FileReader&&) = delete;
  ~FileReader();
  size_t size() const { return size_; }
  Status read_at(size_t offset, std::span<std::byte> to) const;   // all of it; a file that ends early is an error

 private:
  FileReader() = default;
  int fd_ = -1;
  size_t size_ = 0;
  Path path_;
};

// Whether a file has to survive a power failure, or is scratch that its maker removes.
enum class Keep : uint8_t { kSafe, kScratch };

// Sequential writer; every error (disk full first of all) is reported with the path.
class FileWriter {
 public:
  static Result<FileWriter> create(const Path& p);
  FileWriter(FileWriter&&) noexcept;
  FileWriter& operator=(FileWriter&&) noexcept;
  ~FileWriter();                      // closes; an unfinished file stays for its owner (OutputDir) to remove
  Status write(std::span<const std::byte> bytes);
  Status write(std::string_view text);
  Status write_at(size_t offset, std::span<const std::byte> bytes);
  Status pad_to(size_t alignment);    // zero bytes
  size_t offset() const { return offset_; }
  Status finish(Keep keep = Keep::kSafe);   // flush, fsync unless scratch, close

 private:
  FileWriter() = default;
  int fd_ = -1;
  size_t offset_ = 0;
  Path path_;
  std::string buffer_;
  Status flush();
};

Status write_file(const Path& p, std::string_view text);   // plain, inside an OutputDir

// An output directory that appears whole or not at all. Work happens in a sibling ".NAME.tmp-PID-N", locked while its
// owner lives; commit() fsyncs all of it and renames it into place (an existing output, allowed by force, is swapped with
// renameat2(RENAME_EXCHANGE) and removed after). Destruction without commit, Ctrl-C (see remove_outputs_on_signal) or an
// error removes the temporary; what a kill -9 left is removed by the next run with the same output name.
class OutputDir {
 public:
  // Refuses an existing output unless force; a force on something that is not an output of this program (no marker
  // file: model.mir, engine.json, metainfer.json; an empty directory is fine) is refused too. The parent must exist.
  static Result<OutputDir> create(const Path& final_path, bool force);
  OutputDir(OutputDir&&) noexcept;
  ~OutputDir();
  const Path& path() const { return tmp_; }        // write here
  Status commit(Keep keep = Keep::kSafe);

 private:
  OutputDir() = default;
  Path tmp_, final_;
  bool force_ = false;
  int lock_ = -1;
};

// The same for a single file (a report, a table). force replaces a regular file only.
class OutputFile {
 public:
  static Result<OutputFile> create(const Path& final_path, bool force);
  OutputFile(OutputFile&&) noexcept;
  ~OutputFile();
  FileWriter& writer() { return writer_; }
  Status commit();                                 // finishes the writer

 private:
  explicit OutputFile(FileWriter w) : writer_(std::move(w)) {}
  FileWriter writer_;
  Path tmp_, final_;
  bool force_ = false;
  int lock_ = -1;
};

// From now on SIGINT, SIGTERM and SIGHUP (unless ignored, as under nohup) remove unfinished outputs and end the process
// with 128 + signal. Call it before other threads start: they must inherit the blocked signals.
void remove_outputs_on_signal();
// A line that it prints when a signal ends the process; "": none.
void say_on_signal(std::string note);

// Free bytes of the file system that holds p (or its nearest existing parent).
Result<uint64_t> free_bytes(const Path& p);

}  // namespace mi
