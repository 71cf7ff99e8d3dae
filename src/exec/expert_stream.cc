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
#include <utility>

#include "base/check.h"
#include "base/util.h"
#include "exec/expert_policy.h"

namespace mi::exec {
namespace {

using artifact::ExpertMatrix;
using artifact::PageRange;
using artifact::pages_of;

constexpr int64_t kPage = artifact::kReadPage;
constexpr int kReaders = 8;
constexpr double kLately = 32, kPays = 0.8;  // experts read ahead; share of them that has to be wanted

// Room for any expert's pages of the matrix.
int64_t matrix_pages(const ExpertMatrix& m) {
  const bool aligned = m.offset % kPage == 0 && m.stride % kPage == 0;
  return (m.bytes + kPage - 1) / kPage * kPage + (aligned ? 0 : kPage);
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
    for (const ExpertMatrix& m : g.matrices) {
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
  const ExpertMatrix& m = g.group.matrices[matrix];
  return slot_data({group, expert, slot}, matrix) + (m.offset + g.group.place(expert) * m.stride) % kPage;
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
  for (const ExpertMatrix& m : g.group.matrices)
    s.reading += int32_t((pages_of(m, g.group.place(l.expert)).bytes + artifact::kReadPart - 1) / artifact::kReadPart);
  if (ahead)
    ahead_.push_back(l);
  else
    begun_.push_back(l);
}

void ExpertStream::queue_reads(std::vector<Load> loads) {
  if (loads.empty()) return;
  const Group& g = groups_[loads[0].group].group;
  std::sort(loads.begin(), loads.end(), [&](const Load& x, const Load& y) { return g.place(x.expert) < g.place(y.expert); });
  std::vector<int32_t> places;
  for (const Load& l : loads) places.push_back(g.place(l.expert));
  artifact::each_read(g.matrices, places, [&](size_t matrix, PageRange pages, size_t first, size_t count) {
    now_.push_back({{loads.begin() + ptrdiff_t(first), loads.begin() + ptrdiff_t(first + count)}, matrix, pages});
  });
  work_.notify_all();
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
    begun_.push_back(*queued);
    ahead_.erase(queued);
  }
  size_t next = 0;  // of the missing
  while (!pending_.empty()) {
    while (next < missing_.size()) {
      const int32_t slot = victim(g.pool, false);
      if (slot < 0) break;
      start({group, missing_[next++], slot}, false);
    }
    queue_reads(std::exchange(begun_, {}));
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
      work_.notify_all();
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
    queue_reads(std::exchange(begun_, {}));
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
  alignas(kPage) std::byte together[artifact::kReadTogether];
  std::unique_lock lock(mutex_);
  while (true) {
    work_.wait(lock, [this] { return ending_ || !now_.empty() || !ahead_.empty(); });
    if (ending_) return;
    if (now_.empty()) {
      queue_reads({ahead_.front()});
      ahead_.pop_front();
    }
    const Read r = std::move(now_.front());
    now_.pop_front();
    lock.unlock();
    read(r, together);
    lock.lock();
    ++stats_.reads;
    stats_.bytes_read += r.pages.bytes;
    for (const Load& l : r.loads)
      if (--slot(l).reading == 0) changed_.notify_all();
  }
}

// A step cannot go on without its weights, and nobody but the operator can help: as for a mapped file, whose reader would
// get SIGBUS, but with a sentence.
void ExpertStream::read(const Read& r, std::byte* together) const {
  const Group& g = groups_[r.loads[0].group].group;
  const ExpertMatrix& m = g.matrices[r.matrix];
  const auto pages = [&](const Load& l) { return pages_of(m, g.place(l.expert)); };
  // The rest of a last page may lie behind the file's end.
  const int64_t needed = std::min(r.pages.bytes, m.offset + g.place(r.loads.back().expert) * m.stride + m.bytes - r.pages.begin);
  std::byte* const to = r.loads.size() > 1 ? together : slot_data(r.loads[0], r.matrix) + (r.pages.begin - pages(r.loads[0]).begin);
  for (int64_t done = 0; done < needed;) {
    const ssize_t n = pread(fd_, to + done, size_t(r.pages.bytes - done), off_t(r.pages.begin + done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0 || (done + n < needed && n % kPage != 0)) {
      std::fputs(fmt::format("error: {}: cannot be read at byte {}: {}; the disk has a fault or the file was cut, and the "
                             "engine cannot go on\n", path_.string(), r.pages.begin + done, n < 0 ? std::strerror(errno) : "it ends early").c_str(), stderr);
      std::_Exit(3);
    }
    done += n;
  }
  if (r.loads.size() == 1) return;
  for (const Load& l : r.loads) {
    const PageRange own = pages(l);
    std::memcpy(slot_data(l, r.matrix), together + (own.begin - r.pages.begin), size_t(own.bytes));
  }
}

}  // namespace mi::exec
