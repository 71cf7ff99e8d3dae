#include "runtime/kv/store.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <utility>

#include "base/check.h"
#include "base/util.h"

namespace mi::runtime::kv {
namespace {
uint64_t draw_epoch() {
  std::random_device device;
  return (uint64_t(device()) << 32 | device()) | 1;
}
}  // namespace

Status Store::check(const Path& dir) { return StoreFile::check(dir); }

Result<std::unique_ptr<Store>> Store::open(const StoreOptions& o) {
  std::vector<std::pair<int64_t, Record>> found;
  std::string note;
  MI_TRY(StoreFile file, StoreFile::open(o.file, &found, &note));
  if (!note.empty() && o.say) o.say(fmt::format("{}: {}", o.file.dir.string(), note));
  std::unique_ptr<Store> s(new Store(o, std::move(file)));
  s->adopt(std::move(found));
  return s;
}

Store::Store(const StoreOptions& o, StoreFile file)
    : options_(o), file_(std::move(file)), epoch_(draw_epoch()), nodes_(size_t(file_.slots())) {
  backed_ = file_.used_slots();
  const int64_t buffers = std::clamp<int64_t>(o.buffer_bytes / 2 / o.file.page_bytes, 2, 64);
  for (auto* list : {&write_buffers_, &read_buffers_})
    for (int64_t i = 0; i < buffers; ++i) list->emplace_back(size_t(o.file.page_bytes));
  thread_ = std::thread([this] { run(); });
}

Store::~Store() {
  {
    std::lock_guard lock(mu_);
    stop_ = true;
    reads_.clear();
  }
  wake_.notify_one();
  thread_.join();
}

// In the order of writing a page comes behind its parent; one whose parent is not there can't be found.
void Store::adopt(std::vector<std::pair<int64_t, Record>> found) {
  std::ranges::sort(found, {}, [](const auto& f) { return f.second.order; });
  for (const auto& [slot, r] : found) {
    order_ = std::max(order_, r.order);
    if (has(r.id) || (!r.parent.none() && !has(r.parent)) || find_slot(r.parent, r.salt, r.tokens) >= 0) continue;
    link(int32_t(slot), r);
  }
  // When they were used is not written; a page was so when those behind it were written.
  clock_ = order_;
  for (auto f = found.rbegin(); f != found.rend(); ++f) {
    const auto it = slots_.find(f->second.id);
    if (it == slots_.end() || it->second != f->first) continue;
    Node& n = nodes_[size_t(it->second)];
    n.written = true;
    set_used(it->second, std::max(n.used_at, n.record.order));
    if (n.parent >= 0) nodes_[size_t(n.parent)].used_at = std::max(nodes_[size_t(n.parent)].used_at, n.used_at);
  }
  for (auto slot = int32_t(nodes_.size()) - 1; slot >= 0; --slot)
    if (!nodes_[size_t(slot)].used) give_back_slot(slot);
}

double Store::now() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

SaltDigest Store::digest_below(const RecordId& parent, std::string_view salt) const {
  return parent.none() ? file_.digest(salt) : SaltDigest{};
}

uint64_t Store::place(const RecordId& parent, const SaltDigest& salt, std::span<const int32_t> tokens) const {
  const std::string_view bytes(reinterpret_cast<const char*>(tokens.data()), tokens.size_bytes());
  const std::string_view digest(reinterpret_cast<const char*>(salt.data()), salt.size());
  const std::hash<std::string_view> hash;
  return random_u64(parent.none() ? hash(digest) : parent.epoch ^ parent.count << 32, hash(bytes)) &
         options_.place_mask;
}

int32_t Store::find_slot(const RecordId& parent, const SaltDigest& salt, std::span<const int32_t> tokens) const {
  const auto [begin, end] = places_.equal_range(place(parent, salt, tokens));
  for (auto it = begin; it != end; ++it) {
    const Record& r = nodes_[size_t(it->second)].record;
    if (r.parent == parent && r.salt == salt && std::ranges::equal(r.tokens, tokens)) return it->second;
  }
  return -1;
}

RecordId Store::find(const RecordId& parent, std::string_view salt, std::span<const int32_t> tokens) const {
  const int32_t slot = find_slot(parent, digest_below(parent, salt), tokens);
  return slot < 0 ? RecordId{} : nodes_[size_t(slot)].record.id;
}

std::vector<RecordId> Store::match(std::string_view salt, std::span<const int32_t> tokens, int64_t pages) const {
  std::vector<RecordId> ids;
  RecordId parent;
  for (int64_t i = 0; i < pages; ++i) {
    const int32_t slot =
        find_slot(parent, digest_below(parent, salt), tokens.subspan(size_t(i * kPageTokens), size_t(kPageTokens)));
    if (slot < 0 || !nodes_[size_t(slot)].written) break;
    parent = nodes_[size_t(slot)].record.id;
    ids.push_back(parent);
  }
  return ids;
}

void Store::touch(const RecordId& id) {
  const auto it = slots_.find(id);
  if (it == slots_.end()) return;
  ++clock_;
  for (int32_t slot = it->second; slot >= 0; slot = nodes_[size_t(slot)].parent) set_used(slot, clock_);
}

void Store::set_used(int32_t slot, uint64_t at) {
  Node& n = nodes_[size_t(slot)];
  const bool leaf = n.written && n.children.empty();
  leaves_.erase({n.used_at, slot});
  n.used_at = at;
  if (leaf) leaves_.insert({at, slot});
}

void Store::link(int32_t slot, const Record& r) {
  Node& n = nodes_[size_t(slot)];
  MI_CHECK(!n.used);
  n = Node{.record = r, .used = true};
  if (!r.parent.none()) {
    n.parent = slots_.at(r.parent);
    Node& above = nodes_[size_t(n.parent)];
    above.children.push_back(slot);
    leaves_.erase({above.used_at, n.parent});
  }
  slots_.emplace(r.id, slot);
  places_.emplace(place(r.parent, r.salt, r.tokens), slot);
}

// Precondition: no children. The slot is the caller's.
void Store::unlink(int32_t slot) {
  Node& n = nodes_[size_t(slot)];
  MI_CHECK(n.used && n.children.empty());
  leaves_.erase({n.used_at, slot});
  const auto [begin, end] = places_.equal_range(place(n.record.parent, n.record.salt, n.record.tokens));
  places_.erase(std::find_if(begin, end, [slot](const auto& e) { return e.second == slot; }));
  slots_.erase(n.record.id);
  if (n.parent >= 0) {
    Node& above = nodes_[size_t(n.parent)];
    std::erase(above.children, slot);
    if (above.written && above.children.empty()) leaves_.insert({above.used_at, n.parent});
  }
  n = Node{};
}

// The page is lost, and with it those that can only be found through it.
void Store::drop_tree(int32_t slot) {
  while (!nodes_[size_t(slot)].children.empty()) {
    int32_t leaf = slot;
    while (!nodes_[size_t(leaf)].children.empty()) leaf = nodes_[size_t(leaf)].children.back();
    unlink(leaf);
    give_back_slot(leaf);
  }
  unlink(slot);
  give_back_slot(slot);
}

void Store::give_back_slot(int32_t slot) { (slot < backed_ ? free_ : fresh_).push_back(slot); }

// -1: none. A slot whose writing is under way may be taken again: jobs are done in order.
int32_t Store::take_slot(int32_t parent) {
  std::vector<int32_t>* list = !free_.empty()                                 ? &free_
                               : !fresh_.empty() && now() >= no_growth_until_ ? &fresh_
                                                                              : nullptr;
  if (list) {
    const int32_t slot = list->back();
    list->pop_back();
    return slot;
  }
  for (const auto& [at, slot] : leaves_) {
    if (slot == parent) continue;
    const int32_t taken = slot;
    unlink(taken);
    ++stats_.replaced;
    return taken;
  }
  return -1;
}

bool Store::can_write() const { return !write_buffers_.empty() && now() >= quiet_until_; }

RecordId Store::write(const RecordId& parent, std::string_view salt, std::span<const int32_t> tokens,
                      const std::function<void(std::span<std::byte>)>& fill) {
  MI_CHECK(!write_buffers_.empty() && int64_t(tokens.size()) == kPageTokens);
  touch(parent);
  const int32_t slot = take_slot(parent.none() ? -1 : slots_.at(parent));
  if (slot < 0) return {};
  Job j;
  j.write = true;
  j.slot = slot;
  j.record.id = {epoch_, ++count_};
  j.record.parent = parent;
  j.record.order = ++order_;
  j.record.salt = digest_below(parent, salt);
  std::ranges::copy(tokens, j.record.tokens.begin());
  j.data = std::move(write_buffers_.back());
  write_buffers_.pop_back();
  fill(j.data);
  link(slot, j.record);
  nodes_[size_t(slot)].used_at = clock_;
  ++writing_;
  const RecordId id = j.record.id;
  submit(std::move(j));
  return id;
}

uint64_t Store::read(const RecordId& id) {
  MI_CHECK(can_read());
  const auto it = slots_.find(id);
  if (it == slots_.end()) return 0;
  touch(id);
  Job j;
  j.ticket = ++tickets_;
  j.slot = it->second;
  j.record = nodes_[size_t(j.slot)].record;
  j.data = std::move(read_buffers_.back());
  read_buffers_.pop_back();
  ++reading_;
  submit(std::move(j));
  return tickets_;
}

void Store::submit(Job j) {
  {
    std::lock_guard lock(mu_);
    (j.write ? writes_ : reads_).push_back(std::move(j));
  }
  wake_.notify_one();
}

// Reads first: a sequence waits for them. Hence a slot that is read is not overwritten before: its new page is behind.
void Store::run() {
  std::unique_lock lock(mu_);
  for (;;) {
    wake_.wait(lock, [this] { return stop_ || !reads_.empty() || !writes_.empty(); });
    auto& list = reads_.empty() ? writes_ : reads_;
    if (list.empty()) return;
    Job j = std::move(list.front());
    list.pop_front();
    lock.unlock();
    if (j.write) {
      j.error = file_.write(j.slot, j.record, j.data);
      j.ok = j.error == 0;
    } else {
      j.ok = file_.read(j.slot, j.record, j.data);
    }
    lock.lock();
    done_.push_back(std::move(j));
    done_wake_.notify_one();
  }
}

void Store::wait(std::chrono::milliseconds most) {
  std::unique_lock lock(mu_);
  done_wake_.wait_for(lock, most, [this] { return !done_.empty(); });
}

void Store::collect(const std::function<void(uint64_t, std::span<const std::byte>)>& got) {
  std::deque<Job> done;
  {
    std::lock_guard lock(mu_);
    done.swap(done_);
  }
  for (Job& j : done) {
    if (j.write) {
      --writing_;
      wrote(j);
      write_buffers_.push_back(std::move(j.data));
      continue;
    }
    --reading_;
    if (j.ok) {
      ++stats_.hits;
    } else {
      ++stats_.read_errors;
      if (const auto it = slots_.find(j.record.id); it != slots_.end()) drop_tree(it->second);
    }
    got(j.ticket, j.ok ? std::span<const std::byte>(j.data) : std::span<const std::byte>());
    read_buffers_.push_back(std::move(j.data));
  }
}

void Store::wrote(const Job& j) {
  const auto it = slots_.find(j.record.id);  // gone, if the page before it was lost meanwhile
  const bool grew = j.slot >= backed_;
  if (j.ok) {
    ++stats_.written;
    quiet_until_ = 0;
    if (grew) {
      backed_ = j.slot + 1;
      no_growth_until_ = 0;
    }
    if (no_growth_until_ == 0 && std::exchange(complained_, false) && options_.say)
      options_.say(fmt::format("{}: pages are written again", options_.file.dir.string()));
    if (it == slots_.end()) return;
    nodes_[size_t(it->second)].written = true;
    set_used(it->second, nodes_[size_t(it->second)].used_at);
    return;
  }
  ++stats_.write_errors;
  const bool full = j.error == ENOSPC || j.error == EDQUOT || j.error == EFBIG;
  // A file system that writes elsewhere than before needs room for what it replaces, too.
  (grew && full && backed_ > 0 ? no_growth_until_ : quiet_until_) = now() + options_.retry_seconds;
  if (!std::exchange(complained_, true) && options_.say)
    options_.say(fmt::format("{}: a page could not be written: {}; {}, the next attempt is in {:.0f} s",
                             options_.file.dir.string(), std::strerror(j.error),
                             no_growth_until_ > 0 ? "from now on pages are replaced instead of added"
                                                  : "until then nothing is written, and what is there is used",
                             options_.retry_seconds));
  if (it != slots_.end()) drop_tree(it->second);
}

StoreStats Store::stats() const {
  StoreStats s = stats_;
  s.pages = int64_t(slots_.size());
  s.capacity = file_.slots();
  s.bytes = s.pages * file_.slot_bytes();
  s.quiet = now() < std::max(quiet_until_, no_growth_until_);
  return s;
}

void Store::check_invariants() const {
  size_t used = 0, leaves = 0, children = 0, below = 0;
  for (size_t slot = 0; slot < nodes_.size(); ++slot) {
    const Node& n = nodes_[slot];
    if (!n.used) continue;
    ++used;
    children += n.children.size();
    MI_CHECK(slots_.at(n.record.id) == int32_t(slot));
    if (n.parent >= 0) {
      ++below;
      const Node& above = nodes_[size_t(n.parent)];
      MI_CHECK(above.used && above.record.id == n.record.parent, "slot {} hangs below {}, which holds another page",
               slot, n.parent);
      MI_CHECK(above.used_at >= n.used_at && above.record.order <= n.record.order);
    } else {
      MI_CHECK(n.record.parent.none());
    }
    if (n.written && n.children.empty()) {
      ++leaves;
      MI_CHECK(leaves_.contains({n.used_at, int32_t(slot)}));
    }
  }
  MI_CHECK_EQ(used, slots_.size());
  MI_CHECK_EQ(used, places_.size());
  MI_CHECK_EQ(leaves, leaves_.size());
  MI_CHECK_EQ(children, below);
  MI_CHECK_EQ(used + free_.size() + fresh_.size(), nodes_.size());
}

}  // namespace mi::runtime::kv
