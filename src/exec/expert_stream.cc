#include "exec/expert_stream.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "base/check.h"
#include "base/util.h"
#include "exec/expert_policy.h"

namespace mi::exec {
namespace {

constexpr int64_t kPage = 4096;            // what direct reads are aligned to
constexpr int kReaders = 8;                // with parts of this size: 2.6 GB/s of a disk that gives one thread 1.6
constexpr double kLately = 32, kPays = 0.8;  // experts read ahead; share of them that has to be wanted
constexpr int64_t kPart = int64_t(512) << 10;

int64_t page_ceil(int64_t n) { return (n + kPage - 1) / kPage * kPage; }

// An expert's part of a matrix and what shares its pages.
struct Pages {
  int64_t begin = 0, bytes = 0;
};
Pages pages_of(const ExpertStream::Matrix& m, int32_t expert) {
  const int64_t at = m.offset + expert * m.stride, begin = at / kPage * kPage;
  return {begin, page_ceil(at + m.bytes) - begin};
}

// Room for any expert's pages of the matrix.
int64_t matrix_pages(const ExpertStream::Matrix& m) {
  const bool aligned = m.offset % kPage == 0 && m.stride % kPage == 0;
  return page_ceil(m.bytes) + (aligned ? 0 : kPage);
}

}  // namespace

Result<std::unique_ptr<ExpertStream>> ExpertStream::open(const std::filesystem::path& file, std::vector<Group> groups,
                                                         int64_t cache_bytes) {
  std::unique_ptr<ExpertStream> s(new ExpertStream);
  s->path_ = file;
  s->fd_ = ::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
  s->direct_ = s->fd_ >= 0;
  if (s->fd_ < 0) s->fd_ = ::open(file.c_str(), O_RDONLY | O_CLOEXEC);  // a file system that has no direct reads
  if (s->fd_ < 0) return bad_input("{}: cannot be opened: {}", file.string(), std::strerror(errno));

  struct Size {
    int64_t experts = 0;
    size_t pool = 0;
  };
  std::map<int64_t, Size> sizes;  // by bytes of a slot
  std::vector<int64_t> slot_bytes;  // by group
  for (Group& g : groups) {
    GroupState state;
    state.first_unit = int32_t(s->slot_of_.size());
    int64_t bytes = 0;
    for (const Matrix& m : g.matrices) {
      state.starts.push_back(bytes);
      bytes += matrix_pages(m);
    }
    s->slot_of_.resize(s->slot_of_.size() + size_t(g.experts), -1);
    s->group_of_.resize(s->slot_of_.size(), int32_t(s->groups_.size()));
    state.chance.assign(size_t(g.experts), float(g.chosen) / float(g.experts));
    sizes[bytes].experts += g.experts;
    slot_bytes.push_back(bytes);
    state.group = std::move(g);
    s->groups_.push_back(std::move(state));
  }
  s->stats_.experts = int64_t(s->slot_of_.size());

  int64_t all = 0, least = 0, memory = 0;
  for (const auto& [bytes, size] : sizes) all += bytes * size.experts, least += bytes;
  if (cache_bytes < least)
    return fail(ErrorCode::kUsage, "an expert cache of {} has no room for one expert{}: {} are the least that works, {} hold all",
                human_bytes(double(cache_bytes)), sizes.size() > 1 ? " of each size" : "", human_bytes(double(least)),
                human_bytes(double(all)));
  // Each size gets one slot, and its share of the rest.
  const double share = std::min(1.0, double(cache_bytes - least) / std::max(1.0, double(all - least)));
  for (auto& [bytes, size] : sizes) {
    size.pool = s->pools_.size();
    s->pools_.push_back({bytes, std::vector<Slot>(size_t(1 + int64_t(share * double(size.experts - 1))))});
    memory += bytes * int64_t(s->pools_.back().slots.size());
    s->stats_.held += int64_t(s->pools_.back().slots.size());
  }
  for (size_t i = 0; i < s->groups_.size(); ++i) s->groups_[i].pool = sizes[slot_bytes[i]].pool;
  MI_TRY(s->memory_, Region::map(memory, "the experts in memory"));
  std::byte* at = s->memory_.data();
  for (Pool& p : s->pools_)
    for (Slot& slot : p.slots) {
      slot.data = at;
      at += p.bytes;
    }
  for (int i = 0; i < kReaders; ++i) s->readers_.emplace_back([stream = s.get()] { stream->read_loop(); });
  return s;
}

ExpertStream::~ExpertStream() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  work_.notify_all();
  for (std::thread& t : readers_) t.join();
  if (fd_ >= 0) close(fd_);
}

ExpertStream::Slot* ExpertStream::find(size_t group, int32_t expert) {
  const int32_t at = slot_of_[size_t(unit(group, expert))];
  return at < 0 ? nullptr : &pools_[groups_[group].pool].slots[size_t(at)];
}

const std::byte* ExpertStream::at(size_t group, int32_t expert, size_t matrix) const {
  const GroupState& g = groups_[group];
  const int32_t slot = slot_of_[size_t(unit(group, expert))];
  MI_DCHECK(slot >= 0, "expert {} of group {} is not in memory", expert, group);
  const Matrix& m = g.group.matrices[matrix];
  return pools_[g.pool].slots[size_t(slot)].data + g.starts[matrix] + (m.offset + expert * m.stride) % kPage;
}

double ExpertStream::score(const Slot& s) const {
  const GroupState& g = groups_[size_t(group_of_[size_t(s.unit)])];
  return keep_score(s.used, g.chance[size_t(s.unit - g.first_unit)], int64_t(groups_.size()));
}

int32_t ExpertStream::victim(size_t pool, bool for_prefetch) const {
  const Pool& p = pools_[pool];
  int32_t found = -1;
  double least = 0;
  int64_t ahead = 0;
  for (size_t i = 0; i < p.slots.size(); ++i) {
    const Slot& s = p.slots[i];
    ahead += s.ahead && s.used + 1 >= clock_;
    if (s.unit < 0) {
      if (!for_prefetch) return int32_t(i);
      if (found < 0 || p.slots[size_t(found)].unit >= 0) found = int32_t(i);
      continue;
    }
    if (s.pinned || s.reading > 0 || (found >= 0 && p.slots[size_t(found)].unit < 0)) continue;
    const double now = score(s);
    if (found < 0 || now < least) {
      found = int32_t(i);
      least = now;
    }
  }
  // What is read ahead may be wrong: never more than a quarter at a time.
  return for_prefetch && ahead >= int64_t(p.slots.size() / 4) ? -1 : found;
}

void ExpertStream::start(const Load& l, bool ahead) {
  Slot& s = slot(l);
  if (s.unit >= 0) slot_of_[size_t(s.unit)] = -1;
  if (s.ahead) ahead_wanted_ -= ahead_wanted_ / kLately;  // replaced before anyone wanted it
  const GroupState& g = groups_[l.group];
  s.unit = unit(l.group, l.expert);
  s.pinned = !ahead;
  s.ahead = ahead;
  s.used = clock_;
  s.reading = 0;
  slot_of_[size_t(s.unit)] = l.slot;
  for (const Matrix& m : g.group.matrices) s.reading += int32_t((pages_of(m, l.expert).bytes + kPart - 1) / kPart);
  if (ahead)
    ahead_.push_back(l);
  else
    queue_reads(l);
  work_.notify_all();
}

void ExpertStream::queue_reads(const Load& l) {
  const GroupState& g = groups_[l.group];
  for (size_t m = 0; m < g.group.matrices.size(); ++m) {
    const int64_t bytes = pages_of(g.group.matrices[m], l.expert).bytes;
    for (int64_t from = 0; from < bytes; from += kPart) now_.push_back({l, m, from, std::min(kPart, bytes - from)});
  }
}

void ExpertStream::each_part(size_t group, std::span<const int32_t> wanted, const Part& part) {
  GroupState& g = groups_[group];
  std::unique_lock lock(mutex_);
  ++clock_;
  pending_.assign(wanted.begin(), wanted.end());
  missing_.clear();
  learn_chances(g.chance, wanted);
  for (const int32_t e : wanted) {
    Slot* s = find(group, e);
    if (!s) {
      missing_.push_back(e);
      ++stats_.misses;
      continue;
    }
    s->pinned = true;
    ++(s->reading == 0 ? stats_.hits : stats_.misses);
    if (s->ahead) {
      ++stats_.prefetch_used;
      ahead_wanted_ += (1 - ahead_wanted_) / kLately;
    }
    s->ahead = false;
    const auto queued = std::find_if(ahead_.begin(), ahead_.end(), [&](const Load& l) { return l.group == group && l.expert == e; });
    if (queued == ahead_.end()) continue;
    queue_reads(*queued);
    ahead_.erase(queued);
  }
  if (!now_.empty()) work_.notify_all();
  size_t next = 0;  // of the missing
  while (!pending_.empty()) {
    while (next < missing_.size()) {
      const int32_t slot = victim(g.pool, false);
      if (slot < 0) break;
      start({group, missing_[next++], slot}, false);
    }
    part_.clear();
    for (const int32_t e : pending_)
      if (const Slot* s = find(group, e); s && s->pinned && s->reading == 0) part_.push_back(e);
    if (part_.empty()) {
      const auto from = std::chrono::steady_clock::now();
      changed_.wait(lock);
      stats_.waited_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - from).count();
      continue;
    }
    lock.unlock();
    part(part_);
    lock.lock();
    for (const int32_t e : part_) {
      Slot* s = find(group, e);
      s->pinned = false;
      s->used = clock_;
    }
    std::erase_if(pending_, [&](int32_t e) { return std::binary_search(part_.begin(), part_.end(), e); });
  }
}

void ExpertStream::prefetch(std::span<const size_t> groups, std::span<const int32_t> experts) {
  std::lock_guard lock(mutex_);
  for (const Load& l : ahead_) {  // not begun: their turn has passed, or these are likelier
    Slot& s = slot(l);
    slot_of_[size_t(s.unit)] = -1;
    s = {.data = s.data};
    --stats_.prefetched;
  }
  ahead_.clear();
  for (const int32_t e : experts)
    for (const size_t group : groups) {
      if (find(group, e)) continue;
      const int32_t slot = victim(groups_[group].pool, true);
      if (slot < 0) return;
      start({group, e, slot}, true);
      ++stats_.prefetched;
    }
}

bool ExpertStream::ahead_pays() const { return ahead_wanted_ >= kPays || clock_ / int64_t(groups_.size()) % 16 == 0; }

void ExpertStream::set_prior(size_t group, std::span<const float> chances) {
  std::lock_guard lock(mutex_);
  MI_CHECK_EQ(chances.size(), groups_[group].chance.size());
  groups_[group].chance.assign(chances.begin(), chances.end());
}

void ExpertStream::fill() {
  std::vector<std::pair<float, Load>> all;
  for (size_t g = 0; g < groups_.size(); ++g)
    for (int32_t e = 0; e < groups_[g].group.experts; ++e) all.push_back({groups_[g].chance[size_t(e)], {g, e, -1}});
  std::stable_sort(all.begin(), all.end(), [](const auto& x, const auto& y) { return x.first > y.first; });
  std::vector<size_t> next(pools_.size());
  std::unique_lock lock(mutex_);
  for (auto& [chance, l] : all) {
    const size_t pool = groups_[l.group].pool;
    l.slot = int32_t(next[pool]++);
    if (next[pool] > pools_[pool].slots.size()) continue;
    start(l, false);
    slot(l).pinned = false;
  }
  changed_.wait(lock, [&] {
    return std::all_of(pools_.begin(), pools_.end(), [](const Pool& p) {
      return std::all_of(p.slots.begin(), p.slots.end(), [](const Slot& s) { return s.reading == 0; });
    });
  });
}

StreamStats ExpertStream::stats() const {
  std::lock_guard lock(mutex_);
  return stats_;
}

void ExpertStream::read_loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    work_.wait(lock, [this] { return ending_ || !now_.empty() || !ahead_.empty(); });
    if (ending_) return;
    if (now_.empty()) {
      queue_reads(ahead_.front());
      ahead_.pop_front();
    }
    const Read r = now_.front();
    now_.pop_front();
    lock.unlock();
    read(r);
    lock.lock();
    stats_.bytes_read += r.bytes;
    if (--slot(r.load).reading == 0) changed_.notify_all();
  }
}

// A step cannot go on without its weights, and nobody but the operator can help: as for a mapped file, whose reader would
// get SIGBUS, but with a sentence.
void ExpertStream::read(const Read& r) const {
  const GroupState& g = groups_[r.load.group];
  const Matrix& m = g.group.matrices[r.matrix];
  const int64_t begin = pages_of(m, r.load.expert).begin + r.from;
  // The rest of a last page may lie behind the file's end.
  const int64_t needed = std::min(r.bytes, m.offset + r.load.expert * m.stride + m.bytes - begin);
  std::byte* const to = pools_[g.pool].slots[size_t(r.load.slot)].data + g.starts[r.matrix] + r.from;
  for (int64_t done = 0; done < needed;) {
    const ssize_t n = pread(fd_, to + done, size_t(r.bytes - done), off_t(begin + done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0 || (done + n < needed && n % kPage != 0)) {
      std::fputs(fmt::format("error: {}: cannot be read at byte {}: {}; the disk has a fault or the file was cut, and the "
                             "engine cannot go on\n", path_.string(), begin + done, n < 0 ? std::strerror(errno) : "it ends early").c_str(), stderr);
      std::_Exit(3);
    }
    done += n;
  }
}

}  // namespace mi::exec
