#pragma once
// Which sequence holds which KV pages, and what whole pages hold, so that a later sequence that begins with the same
// tokens takes them over instead of computing them again.
//
// Whole pages form a tree: a page's parent is the page before it, the roots are the salts. A page is found by comparing
// its tokens, not a hash of them, below the page that was found before it: two sequences share a page only if all their
// tokens up to its end, and their salts, are equal. Keys and values of equal tokens are equal bits whatever steps
// computed them (docs/architecture.md, "Numbers"), so reuse changes no answer.
//
// Every page is free, held by one or more sequences, or idle: whole, known, held by none. Idle pages are given up for
// new ones, the least recently used first, and from the leaves, so that what is left can be found.
// free_pages() + used_pages() == total() always. Not thread-safe.
//
// With a store below, pages that are known are written to it in the order in which they became whole, a few at a time,
// so that most of them are there when they are given up, and a later process finds them. below() tells what it has of a
// prompt.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "runtime/kv/page_pool.h"
#include "runtime/kv/page_table.h"
#include "runtime/kv/store.h"

namespace mi::runtime::kv {

// The store, and how it gets at what pages hold.
struct Below {
  std::shared_ptr<Store> store;  // null: none
  std::function<void(int32_t page, std::span<std::byte> to)> save;
  std::function<void(int32_t page, std::span<const std::byte> from)> restore;
};

class Cache {
 public:
  // reuse: false keeps nothing, pages are free as soon as nobody holds them; then there is no store. freed: as for
  // PagePool.
  Cache(int64_t pages, bool reuse, std::function<void(std::span<const int32_t>)> freed = {}, Below below = {});

  int64_t total() const { return pool_.total(); }
  int64_t free_pages() const { return pool_.free_pages() + idle_pages(); }  // for who asks: idle ones are given up
  int64_t used_pages() const { return total() - free_pages(); }             // held by sequences, shared ones once
  int64_t idle_pages() const { return int64_t(idle_.size()) + inner_idle_; }
  uint64_t given_up() const { return given_up_; }  // idle pages that had to make room, since the start

  // Grows the table until `tokens` positions are covered; false, and unchanged, if too few pages are free.
  bool cover(PageTable* table, int64_t tokens);
  void release(PageTable* table);
  // Fills an empty table with the known whole pages that `tokens` begins with; at least one token is left over, so that
  // there is something to compute. Returns the number of tokens that the table then covers.
  int64_t match(PageTable* table, std::string_view salt, std::span<const int32_t> tokens);
  // The first `computed` of the tokens are in the cache: pages that became whole can be found from now on. One that
  // another sequence has made known already is exchanged for that one.
  void publish(PageTable* table, std::string_view salt, std::span<const int32_t> tokens, int64_t computed);

  Store* store() const { return below_.store.get(); }
  // For a table that match() filled, and that is used now: what the store has of the whole pages behind those.
  std::vector<RecordId> below(const PageTable& table, std::string_view salt, std::span<const int32_t> tokens);
  // Page i of the table, whose tokens the store had, holds now what it gave; publish() is to follow.
  void restore(PageTable* table, int64_t i, std::span<const std::byte> from) const;
  // Hands pages to the store, at most so many, as far as it takes them. Returns how many it took.
  int64_t write_behind(int64_t most);
  // Pages wait for write_behind(), or are on their way to the disk.
  bool unsaved() const;

  void check_invariants() const;

 private:
  struct Node {  // of a page that is known; index: the page's id
    bool known = false;
    int32_t parent = -1;  // page, or -1 below a salt
    int64_t children = 0;
    uint64_t used_at = 0;
    std::string salt;  // of a page without a parent
    std::vector<int32_t> tokens;
    RecordId record;         // the store's, if it still has that one
    uint64_t published = 0;  // order of becoming known
  };
  static uint64_t place(int32_t parent, std::string_view salt, std::span<const int32_t> tokens);
  int32_t find(int32_t parent, std::string_view salt, std::span<const int32_t> tokens) const;
  bool is_leaf_idle(int32_t page) const;
  void hold(int32_t page);
  void let_go(int32_t page);
  bool is_saved(int32_t page) const;
  int64_t save(int32_t page);
  void give_up_oldest();
  void forget(int32_t page);

  PagePool pool_;
  const bool reuse_;
  const Below below_;
  uint64_t clock_ = 0, given_up_ = 0, published_ = 0;
  std::map<uint64_t, int32_t> to_save_;                // Node::published -> page, known and perhaps not in the store
  std::vector<int32_t> holders_;                       // by page
  std::vector<Node> nodes_;                            // by page
  std::unordered_multimap<uint64_t, int32_t> places_;  // hash of parent, salt and tokens -> page
  std::set<std::pair<uint64_t, int32_t>> idle_;        // idle pages without children, by used_at
  int64_t inner_idle_ = 0;                             // idle pages with children
};

}  // namespace mi::runtime::kv
