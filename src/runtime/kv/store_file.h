#pragma once
// The files of a kv::Store: what they hold and how it is told from what a crash, a full disk or another program left.
//
//   lock    held (flock) while a process uses the folder
//   index   head (4096 bytes), then an entry of 512 bytes for each slot: whose page the slot holds, and its checksum
//   pages   the slots
//
// A slot is written in this order: its entry is zeroed, the data, the entry. An entry counts only with its own
// checksum, and data only with the one that the entry has for both. So a slot of which a part is missing, or of another
// time, is never taken for a page; nothing relies on the order in which the kernel brings writes to the disk, and
// nothing waits for it (fsync): what the process wrote survives its end, what the kernel had not written is lost with
// the machine.
//
// The files belong to one engine: the head holds its identity. Those of another are emptied.

#include <array>
#include <compare>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "base/result.h"
#include "runtime/kv/page_pool.h"

namespace mi::runtime::kv {

// Of a page that was written: never used again, also not by a later process, so "below this one" can't become "below
// that one" when a slot changes hands.
struct RecordId {
  uint64_t epoch = 0, count = 0;  // epoch: drawn when the store was opened, not 0
  bool none() const { return epoch == 0; }
  auto operator<=>(const RecordId&) const = default;
};

using SaltDigest = std::array<uint8_t, 32>;

struct Record {
  RecordId id, parent;  // parent: of the page before it; none for a first page
  uint64_t order = 0;   // larger than those of all pages written before
  SaltDigest salt{};    // of a first page, else zeros
  std::array<int32_t, size_t(kPageTokens)> tokens{};
  bool operator==(const Record&) const = default;
};

struct StoreFileOptions {
  Path dir;           // made if only its last part is missing
  int64_t bytes = 0;  // of index and pages together, at most
  int64_t page_bytes = 0;
  std::string identity;                  // of the engine: 32 characters
  std::function<int(bool write)> fault;  // tests: the errno that a write or read ends with instead; 0: none
};

// Reading and writing may be done by one other thread than the one that opened.
class StoreFile {
 public:
  // found: what is there, by slot, with its entry's checksum verified. note: a sentence, if what was there is not used.
  // Errors: the folder can't be made or used, another process uses it, or its files are not a store's.
  // Whether open() would find a folder that it may use.
  static Status check(const Path& dir);
  static Result<StoreFile> open(const StoreFileOptions& o, std::vector<std::pair<int64_t, Record>>* found,
                                std::string* note);
  StoreFile(StoreFile&& o) noexcept;
  StoreFile& operator=(StoreFile&&) = delete;
  ~StoreFile();

  int64_t slots() const { return slots_; }
  int64_t slot_bytes() const { return slot_bytes_; }
  int64_t used_slots() const { return used_slots_; }  // the first so many have room on the disk, holes aside
  // Another for each store, so that the same salt has another digest elsewhere.
  SaltDigest digest(std::string_view salt) const;

  // 0, or the errno. After a failure the slot holds nothing.
  int write(int64_t slot, const Record& r, std::span<const std::byte> page);
  // Whether the slot holds this page, whole; then it is in `to`.
  bool read(int64_t slot, const Record& r, std::span<std::byte> to);

 private:
  StoreFile() = default;
  int write_head();
  Status start(const StoreFileOptions& o, std::vector<std::pair<int64_t, Record>>* found, std::string* note);

  Path dir_;
  int lock_ = -1, index_ = -1, pages_ = -1;
  int64_t slots_ = 0, slot_bytes_ = 0, page_bytes_ = 0, used_slots_ = 0;
  std::string identity_;
  std::array<uint8_t, 16> key_{};
  bool has_head_ = false;
  std::function<int(bool write)> fault_;
};

}  // namespace mi::runtime::kv
