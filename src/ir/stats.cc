#include "ir/stats.h"

#include <map>
#include <unordered_set>

#include "tensor/dtype.h"

namespace mi::ir {
namespace {

struct Share {
  int64_t k = 1, experts = 1;
  bool lookup_only = true;
};

// How each weight of a block takes part in one token's work.
std::vector<Share> shares(const Block& b) {
  std::vector<const RouteParams*> route(b.values.size(), nullptr);
  std::vector<Share> out(b.weights.size());
  for (const Node& n : b.nodes) {
    if (const auto* r = std::get_if<RouteParams>(&n.params)) route[size_t(n.out[0])] = r;
    const bool experts = n.op == Op::kExpertLinear || n.op == Op::kGroupedExperts;
    for (const WeightUse& u : n.weights)
      for (int32_t w : u.weights) {
        Share& s = out[size_t(w)];
        if (n.op != Op::kEmbed) s.lookup_only = false;
        if (!experts) continue;
        if (const RouteParams* r = route[size_t(n.in[1])]) s = {r->k, r->experts, false};
      }
  }
  return out;
}

}  // namespace

int64_t count_nodes(const Graph& g) {
  int64_t n = int64_t(g.prologue.nodes.size() + g.epilogue.nodes.size());
  for (const Block& b : g.blocks) n += int64_t(b.nodes.size() * b.layers.size());
  return n;
}

int64_t GraphStats::kv_bytes_per_token(int64_t bytes_per_element) const {
  int64_t elements = 0;
  for (const CacheStats& c : caches) elements += c.elements();
  return elements * bytes_per_element;
}

GraphStats stats_of(const Graph& g) {
  GraphStats s;
  std::map<std::pair<Mark, std::string>, WeightGroup> groups;
  std::unordered_set<std::string_view> in_prologue;
  for (const WeightDecl& d : g.prologue.weights) in_prologue.insert(d.name);

  auto add = [&](const Block& b, int64_t times) {
    const std::vector<Share> share = shares(b);
    for (size_t w = 0; w < b.weights.size(); ++w) {
      const WeightDecl& d = b.weights[w];
      const int64_t count = shape_count(d.shape).value_or(0);
      const bool constant = d.mark == Mark::kConstant;
      if (!constant && !share[w].lookup_only) s.active_params += count / share[w].experts * share[w].k * times;
      if (&b == &g.epilogue && in_prologue.count(d.name)) continue;  // tied: stored once
      const int64_t scales = is_quantized(d) ? shape_count(scale_shape(d)).value_or(0) * int64_t(sizeof(float)) : 0;
      const int64_t stored = shape_count(stored_shape(d)).value_or(0) * int64_t(dtype_bytes(d.dtype));
      const std::string format = format_text(d);
      WeightGroup& group = groups.try_emplace({d.mark, format}, WeightGroup{d.mark, format}).first->second;
      group.params += constant ? 0 : count * times;
      group.bytes += (stored + scales) * times;
    }
  };
  add(g.prologue, 1);
  for (const Block& b : g.blocks) add(b, int64_t(b.layers.size()));
  add(g.epilogue, 1);
  for (auto& [key, group] : groups) {
    s.total_params += group.params;
    s.weight_bytes += group.bytes;
    s.groups.push_back(group);
  }

  s.caches.resize(size_t(g.info.layers));
  for (const Block& b : g.blocks) {
    CacheStats c;
    for (const Node& n : b.nodes) {
      if (const auto* p = std::get_if<KvAppendParams>(&n.params))
        c.kv_heads = p->kv_heads, c.k_dim = p->k_dim, c.v_dim = p->v_dim;
      if (const auto* p = std::get_if<IndexAppendParams>(&n.params)) c.index_dim = p->dim;
      if (const auto* p = std::get_if<AttentionParams>(&n.params)) c.window = p->window;
    }
    for (int32_t l : b.layers) s.caches[size_t(l)] = c;
  }
  s.nodes = count_nodes(g);
  return s;
}

}  // namespace mi::ir
