#include "runtime/kv/cache.h"

#include <algorithm>
#include <functional>

#include "base/check.h"
#include "base/util.h"

namespace mi::runtime::kv {

Cache::Cache(int64_t pages, bool reuse, std::function<void(std::span<const int32_t>)> freed, Below below)
    : pool_(pages, std::move(freed)),
      reuse_(reuse),
      below_(std::move(below)),
      holders_(size_t(pages), 0),
      nodes_(size_t(pages)) {
  MI_CHECK(reuse || !below_.store, "a store below a cache that keeps nothing");
}

bool Cache::cover(PageTable* table, int64_t tokens) {
  const int64_t more = pages_for(tokens) - table->size();
  if (more <= 0) return true;
  if (more > free_pages()) return false;
  while (pool_.free_pages() < more) give_up_oldest();
  const size_t first = table->pages_.size();
  MI_CHECK(pool_.take(more, &table->pages_));
  for (size_t i = first; i < table->pages_.size(); ++i) holders_[size_t(table->pages_[i])] = 1;
  return true;
}

void Cache::release(PageTable* table) {
  // From the end: a page becomes a leaf before its parent is let go.
  ++clock_;
  for (auto p = table->pages_.rbegin(); p != table->pages_.rend(); ++p) let_go(*p);
  table->pages_.clear();
  table->known_ = 0;
}

int64_t Cache::match(PageTable* table, std::string_view salt, std::span<const int32_t> tokens) {
  MI_CHECK(table->pages_.empty());
  if (!reuse_) return 0;
  ++clock_;
  const int64_t whole = (int64_t(tokens.size()) - 1) / kPageTokens;
  int32_t parent = -1;
  for (int64_t i = 0; i < whole; ++i) {
    const int32_t page = find(parent, salt, tokens.subspan(size_t(i * kPageTokens), size_t(kPageTokens)));
    if (page < 0) break;
    hold(page);
    table->pages_.push_back(page);
    parent = page;
  }
  table->known_ = table->size();
  return table->size() * kPageTokens;
}

void Cache::publish(PageTable* table, std::string_view salt, std::span<const int32_t> tokens, int64_t computed) {
  if (!reuse_) return;
  for (int64_t& i = table->known_; (i + 1) * kPageTokens <= computed; ++i) {
    const std::span<const int32_t> content = tokens.subspan(size_t(i * kPageTokens), size_t(kPageTokens));
    int32_t& page = table->pages_[size_t(i)];
    const int32_t parent = i > 0 ? table->pages_[size_t(i - 1)] : -1;
    if (const int32_t other = find(parent, salt, content); other >= 0) {
      ++clock_;
      hold(other);
      let_go(page);
      page = other;
      continue;
    }
    Node& n = nodes_[size_t(page)];
    n.known = true;
    n.parent = parent;
    n.children = 0;
    n.salt = parent < 0 ? std::string(salt) : std::string();
    n.tokens.assign(content.begin(), content.end());
    n.record = {};
    n.published = ++published_;
    if (store()) to_save_.emplace(n.published, page);
    places_.emplace(place(parent, salt, content), page);
    if (parent >= 0) ++nodes_[size_t(parent)].children;
  }
}

uint64_t Cache::place(int32_t parent, std::string_view salt, std::span<const int32_t> tokens) {
  const std::string_view bytes(reinterpret_cast<const char*>(tokens.data()), tokens.size_bytes());
  const std::hash<std::string_view> hash;
  return random_u64(parent >= 0 ? uint64_t(parent) : ~hash(salt), hash(bytes));
}

int32_t Cache::find(int32_t parent, std::string_view salt, std::span<const int32_t> tokens) const {
  const auto [begin, end] = places_.equal_range(place(parent, salt, tokens));
  for (auto it = begin; it != end; ++it) {
    const Node& n = nodes_[size_t(it->second)];
    if (n.parent == parent && (parent >= 0 || n.salt == salt) && std::ranges::equal(n.tokens, tokens))
      return it->second;
  }
  return -1;
}

bool Cache::is_leaf_idle(int32_t page) const {
  return holders_[size_t(page)] == 0 && nodes_[size_t(page)].known && nodes_[size_t(page)].children == 0;
}

void Cache::hold(int32_t page) {
  Node& n = nodes_[size_t(page)];
  if (holders_[size_t(page)]++ == 0) {
    if (n.children > 0)
      --inner_idle_;
    else
      idle_.erase({n.used_at, page});
  }
  n.used_at = clock_;
}

void Cache::let_go(int32_t page) {
  MI_CHECK(page >= 0 && page < total() && holders_[size_t(page)] > 0, "page {} of {} is not in use", page, total());
  if (--holders_[size_t(page)] > 0) return;
  Node& n = nodes_[size_t(page)];
  if (!n.known) return pool_.give_back(std::span(&page, 1));
  n.used_at = clock_;
  if (n.children > 0)
    ++inner_idle_;
  else
    idle_.insert({n.used_at, page});
}

std::vector<RecordId> Cache::below(const PageTable& table, std::string_view salt, std::span<const int32_t> tokens) {
  if (!store()) return {};
  const int64_t known = table.known_, whole = (int64_t(tokens.size()) - 1) / kPageTokens;
  // What is used here is used there as well, or it would be gone at the next start.
  if (known > 0) store()->touch(nodes_[size_t(table.pages_[size_t(known - 1)])].record);
  if (known >= whole) return {};
  std::vector<RecordId> ids = store()->match(salt, tokens, whole);
  ids.erase(ids.begin(), ids.begin() + std::min<int64_t>(known, int64_t(ids.size())));
  store()->count_misses(whole - known - int64_t(ids.size()));
  return ids;
}

void Cache::restore(PageTable* table, int64_t i, std::span<const std::byte> from) const {
  MI_CHECK(i >= table->known_ && i < table->size());
  below_.restore(table->pages_[size_t(i)], from);
}

bool Cache::is_saved(int32_t page) const { return store()->has(nodes_[size_t(page)].record); }

// Those before it first: below what is not in the store nothing is found. Returns how many were copied; whether the
// page is saved then, is_saved() tells.
int64_t Cache::save(int32_t page) {
  std::vector<int32_t> path;
  for (int32_t p = page; p >= 0 && !is_saved(p); p = nodes_[size_t(p)].parent) path.push_back(p);
  int64_t copied = 0;
  for (auto p = path.rbegin(); p != path.rend(); ++p) {
    Node& n = nodes_[size_t(*p)];
    const RecordId parent = n.parent < 0 ? RecordId{} : nodes_[size_t(n.parent)].record;
    if (n.parent >= 0 && !store()->has(parent)) break;  // it had to make room for this one
    n.record = store()->find(parent, n.salt, n.tokens);
    if (!n.record.none()) continue;
    if (!store()->can_write()) break;
    n.record = store()->write(parent, n.salt, n.tokens, [&](std::span<std::byte> to) { below_.save(*p, to); });
    if (n.record.none()) break;
    ++copied;
  }
  return copied;
}

int64_t Cache::write_behind(int64_t most) {
  if (!store()) return 0;
  int64_t copied = 0;
  while (!to_save_.empty() && copied < most) {
    const int32_t page = to_save_.begin()->second;
    copied += save(page);
    if (!is_saved(page) && !store()->can_write()) break;
    to_save_.erase(to_save_.begin());
  }
  return copied;
}

bool Cache::unsaved() const {
  return store() && (store()->writing() > 0 || (!to_save_.empty() && store()->can_write()));
}

void Cache::give_up_oldest() {
  MI_CHECK(!idle_.empty(), "{} idle pages and no leaf among them", inner_idle_);
  const int32_t page = idle_.begin()->second;
  idle_.erase(idle_.begin());
  ++given_up_;
  if (store() && !is_saved(page)) {
    save(page);
    if (!is_saved(page)) store()->count_dropped(1);
  }
  forget(page);
  pool_.give_back(std::span(&page, 1));
}

void Cache::forget(int32_t page) {
  Node& n = nodes_[size_t(page)];
  const auto [begin, end] = places_.equal_range(place(n.parent, n.salt, n.tokens));
  places_.erase(std::find_if(begin, end, [page](const auto& e) { return e.second == page; }));
  n.known = false;
  n.tokens.clear();
  n.salt.clear();
  n.record = {};
  to_save_.erase(n.published);
  if (n.parent < 0) return;
  Node& above = nodes_[size_t(n.parent)];
  if (--above.children == 0 && holders_[size_t(n.parent)] == 0) {
    --inner_idle_;
    idle_.insert({above.used_at, n.parent});
  }
}

void Cache::check_invariants() const {
  int64_t held = 0, leaves = 0, inner = 0, known = 0;
  std::vector<int64_t> children(nodes_.size(), 0);
  for (size_t p = 0; p < nodes_.size(); ++p) {
    const Node& n = nodes_[p];
    held += holders_[p] > 0;
    known += n.known;
    if (!n.known) continue;
    MI_CHECK_EQ(int64_t(n.tokens.size()), kPageTokens);
    if (n.parent >= 0) {
      MI_CHECK(nodes_[size_t(n.parent)].known, "page {} hangs below page {}, which nobody finds", p, n.parent);
      MI_CHECK(holders_[size_t(n.parent)] >= (holders_[p] > 0), "page {} is held without the page before it", p);
      ++children[size_t(n.parent)];
    }
    if (holders_[p] == 0) ++(n.children > 0 ? inner : leaves);
  }
  for (size_t p = 0; p < nodes_.size(); ++p)
    if (nodes_[p].known) MI_CHECK_EQ(children[p], nodes_[p].children);
  MI_CHECK_EQ(leaves, int64_t(idle_.size()));
  MI_CHECK_EQ(inner, inner_idle_);
  MI_CHECK_EQ(known, int64_t(places_.size()));
  for (const auto& [published, page] : to_save_)
    MI_CHECK(nodes_[size_t(page)].known && nodes_[size_t(page)].published == published);
  if (store()) store()->check_invariants();
  MI_CHECK_EQ(held, used_pages());
  MI_CHECK_EQ(held + leaves + inner + pool_.free_pages(), total());
}

}  // namespace mi::runtime::kv
