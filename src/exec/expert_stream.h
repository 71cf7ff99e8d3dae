#pragma once
// Experts' weights read from weights.bin as steps choose them, into memory of a fixed size, for engines larger than the
// machine. A step's result does not depend on that size. One caller; threads of its own read. An expert makes room when
// it is the one that was used longest ago, but for a credit by how often it is chosen
// (expert_policy.h).

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "artifact/expert_reads.h"
#include "base/result.h"
#include "exec/memory.h"
#include "exec/stream_stats.h"

namespace mi::exec {

class ExpertStream {
 public:
  // What one instruction uses of each of its experts.
  struct Group {
    int64_t experts = 0, chosen = 1;  // chosen: by one token
    std::vector<artifact::ExpertMatrix> matrices;
    std::vector<int32_t> places = {};  // expert e stands at places[e] in the file; empty: at e
    int32_t place(int32_t e) const { return places.empty() ? e : places[size_t(e)]; }
  };

  // cache_bytes: what the experts in memory may take; more than all of them take is the same as all. Errors: kUsage when
  // it has no room for one expert of each size, kBadInput for the file.
  static Result<std::unique_ptr<ExpertStream>> open(const std::filesystem::path& file, std::vector<Group> groups,
                                                    int64_t cache_bytes);
  ~ExpertStream();
  ExpertStream(const ExpertStream&) = delete;

  // Runs `part` for some of `wanted` (ascending, distinct) at a time, each once, while their weights are in memory: first
  // those that are there already, then the others as they come.
  using Part = std::function<void(std::span<const int32_t> experts)>;
  void each_part(size_t group, std::span<const int32_t> wanted, const Part& part);
  // Only inside `part`, for one of its experts.
  const std::byte* at(size_t group, int32_t expert, size_t matrix) const;

  // These experts of these groups will probably be wanted soon, the likeliest first: read when nothing that is wanted now
  // has to be. Takes the place of what was foreseen before and not begun.
  void prefetch(std::span<const size_t> groups, std::span<const int32_t> experts);
  // Whether reading ahead is worth it: most of what was read ahead lately was wanted afterwards. Else one step in sixteen
  // tries again. Qwen3-30B-A3B's layers with random weights, room for a sixth of the experts: 37 % were wanted, and 16
  // instead of 21 tokens per second made. For the caller of each_part.
  bool ahead_pays() const;

  // How likely a token chooses each expert, as far as known beforehand; learned further from what is wanted.
  void set_prior(size_t group, std::span<const float> chances);
  // Reads the likeliest experts, as many as there is room for. Before the first step.
  void fill();

  void commit(hw::ThreadPool& pool) { memory_.commit(pool); }  // so that a full cache is no surprise to the machine
  StreamStats stats() const;
  const Region& memory() const { return memory_; }
  bool direct() const { return direct_; }  // reads go past the page cache

 private:
  struct Slot {
    std::byte* data = nullptr;
    int32_t unit = -1;     // an expert of a group, counted through; -1: empty
    int32_t reading = 0;   // parts still to come
    bool pinned = false;   // wanted now
    bool ahead = false;    // prefetched and not wanted so far
    int64_t used = 0;      // the clock when it was last wanted
  };
  struct Pool {            // slots of one size
    int64_t bytes = 0;
    std::vector<Slot> slots;
  };
  struct GroupState {
    Group group;
    int32_t first_unit = 0;
    size_t pool = 0;
    std::vector<int64_t> starts;  // of each matrix in a slot
    std::vector<float> chance;    // that a step wants the expert
  };
  struct Load {
    size_t group = 0;
    int32_t expert = 0, slot = 0;
  };
  struct Read {
    std::vector<Load> loads;  // several: all of their matrices, which are neighbours
    size_t matrix = 0;
    artifact::PageRange pages;
  };

  ExpertStream() = default;
  int32_t unit(size_t group, int32_t expert) const { return groups_[group].first_unit + expert; }
  Slot* find(size_t group, int32_t expert);
  Slot& slot(const Load& l) { return pools_[groups_[l.group].pool].slots[size_t(l.slot)]; }
  int32_t victim(size_t pool, bool for_prefetch) const;
  double score(const Slot& s) const;
  void start(const Load& l, bool ahead);
  void queue_reads(std::vector<Load> loads);  // of one group
  void read_loop();
  void read(const Read& r, std::byte* together) const;  // together: memory for neighbours
  std::byte* slot_data(const Load& l, size_t matrix) const { return pools_[groups_[l.group].pool].slots[size_t(l.slot)].data + groups_[l.group].starts[matrix]; }

  std::filesystem::path path_;
  int fd_ = -1;
  bool direct_ = false;
  Region memory_;
  std::vector<GroupState> groups_;
  std::vector<Pool> pools_;

  mutable std::mutex mutex_;  // everything below, and the slots
  std::condition_variable work_, changed_;
  std::deque<Read> now_;
  std::deque<Load> ahead_;  // of which nothing is read yet
  bool ending_ = false;
  int64_t clock_ = 0;
  double ahead_wanted_ = 0;  // share of what was read ahead lately
  std::vector<int32_t> slot_of_;   // by unit; -1: not in memory
  std::vector<int32_t> group_of_;  // by unit
  std::vector<int32_t> pending_, missing_, part_;
  std::vector<Load> begun_;
  StreamStats stats_;
  std::vector<std::thread> readers_;
};

}  // namespace mi::exec
