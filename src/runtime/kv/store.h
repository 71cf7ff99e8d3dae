#pragma once
// Whole KV pages on disk: what kv::Cache gives up can be read back instead of computed again, by this process or a
// later one.
//
// Pages form the same tree as in kv::Cache: a page is found by comparing its tokens below the page that was found
// before it, a first one also by its salt's digest (SHA-256; the salt itself is a tenant's secret and is not written).
// A hash only says where to look. When the store is full, the least recently used leaf makes room.
//
// One caller's thread decides, and keeps the index; the store's own thread reads and writes (store_file.h). write()
// copies the page into one of a few buffers and read() gets one to be filled: where all are taken, the caller goes on
// without. Nothing here waits for the disk, but wait() and the destructor.
//
// A page that can't be read, or whose checksum is wrong, is one that the store does not have. A write that fails is
// said once; if the disk is full, pages are replaced from then on instead of added, and if that fails as well nothing
// is written for a while; pages are found all the time.

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/result.h"
#include "runtime/kv/store_file.h"

namespace mi::runtime::kv {

struct StoreOptions {
  StoreFileOptions file;
  int64_t buffer_bytes = int64_t(64) << 20;     // for pages on their way, half of it for each direction
  std::function<void(const std::string&)> say;  // a line for the log, from the caller's thread; may be empty
  double retry_seconds = 60;                    // after a failed write
  uint64_t place_mask = ~uint64_t(0);           // tests: 0 gives all pages the same hash
};

struct StoreStats {
  int64_t pages = 0, capacity = 0, bytes = 0;  // held now; bytes: with what only pads
  uint64_t hits = 0, misses = 0;               // pages read; pages that were looked for and not there
  uint64_t written = 0, replaced = 0;          // pages; those of them for which an older one made room
  uint64_t dropped = 0;                        // pages that were given up unwritten
  uint64_t write_errors = 0, read_errors = 0;
  bool quiet = false;  // nothing is written, or nothing is added, after an error
};

class Store {
 public:
  static Result<std::unique_ptr<Store>> open(const StoreOptions& o);
  // Whether it would find a folder that it may use, before anything else is known.
  static Status check(const Path& dir);
  ~Store();  // what write() took is written first
  Store(const Store&) = delete;

  int64_t page_bytes() const { return options_.file.page_bytes; }
  int64_t capacity() const { return file_.slots(); }

  // The page with these tokens below the parent (none: a first page, of this salt), also one that is being written.
  RecordId find(const RecordId& parent, std::string_view salt, std::span<const int32_t> tokens) const;
  bool has(const RecordId& id) const { return slots_.contains(id); }
  // The pages that the tokens begin with, as far as they can be read; at most `pages`.
  std::vector<RecordId> match(std::string_view salt, std::span<const int32_t> tokens, int64_t pages) const;
  // This page and those before it were used.
  void touch(const RecordId& id);

  // Whether write() has a buffer and is not quiet.
  bool can_write() const;
  // fill() is called at once. None if there is no room, as everything in the store is used by, or needed for, this
  // page. Preconditions: can_write(), the parent is none or here, find() is none.
  RecordId write(const RecordId& parent, std::string_view salt, std::span<const int32_t> tokens,
                 const std::function<void(std::span<std::byte>)>& fill);
  bool can_read() const { return !read_buffers_.empty(); }
  // A number for collect(), or 0 if the page is not here any more. Precondition: can_read().
  uint64_t read(const RecordId& id);
  // What came to its end. got(): for each read(), in their order; no data: the page is lost.
  void collect(const std::function<void(uint64_t ticket, std::span<const std::byte> data)>& got);
  // Until collect() has something to do, or so long.
  void wait(std::chrono::milliseconds most);
  int64_t writing() const { return writing_; }
  int64_t reading() const { return reading_; }

  void count_misses(int64_t pages) { stats_.misses += uint64_t(pages); }
  void count_dropped(int64_t pages) { stats_.dropped += uint64_t(pages); }
  StoreStats stats() const;
  void check_invariants() const;

 private:
  struct Node {  // of a slot in use
    Record record;
    int32_t parent = -1;  // slot
    std::vector<int32_t> children;
    uint64_t used_at = 0;
    bool used = false, written = false;
  };
  struct Job {
    bool write = false, ok = false;
    int error = 0;
    uint64_t ticket = 0;
    int32_t slot = -1;
    Record record;
    std::vector<std::byte> data;
  };
  struct IdHash {
    size_t operator()(const RecordId& r) const { return size_t(r.epoch ^ (r.count * 0x9e3779b97f4a7c15u)); }
  };

  Store(const StoreOptions& o, StoreFile file);
  void adopt(std::vector<std::pair<int64_t, Record>> found);
  uint64_t place(const RecordId& parent, const SaltDigest& salt, std::span<const int32_t> tokens) const;
  int32_t find_slot(const RecordId& parent, const SaltDigest& salt, std::span<const int32_t> tokens) const;
  SaltDigest digest_below(const RecordId& parent, std::string_view salt) const;
  void link(int32_t slot, const Record& r);
  void unlink(int32_t slot);
  void drop_tree(int32_t slot);
  void set_used(int32_t slot, uint64_t at);
  int32_t take_slot(int32_t parent);
  void give_back_slot(int32_t slot);
  void wrote(const Job& j);
  double now() const;
  void run();
  void submit(Job j);

  const StoreOptions options_;
  StoreFile file_;
  const uint64_t epoch_;
  uint64_t count_ = 0, order_ = 0, tickets_ = 0, clock_ = 0;
  std::vector<Node> nodes_;  // by slot
  std::unordered_map<RecordId, int32_t, IdHash> slots_;
  std::unordered_multimap<uint64_t, int32_t> places_;  // hash of parent, salt and tokens -> slot
  std::set<std::pair<uint64_t, int32_t>> leaves_;      // written ones without children, by used_at
  std::vector<int32_t> free_, fresh_;                  // slots: written before; never
  int64_t backed_ = 0;                                 // slots below are counted as written before
  double no_growth_until_ = 0, quiet_until_ = 0;
  bool complained_ = false;
  StoreStats stats_;
  int64_t writing_ = 0, reading_ = 0;
  std::vector<std::vector<std::byte>> write_buffers_, read_buffers_;

  // Between the threads.
  std::mutex mu_;
  std::condition_variable wake_, done_wake_;
  std::deque<Job> reads_, writes_, done_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace mi::runtime::kv
