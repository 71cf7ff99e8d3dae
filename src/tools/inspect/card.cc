#include "tools/inspect/card.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/html.h"
#include "base/util.h"
#include "compiler/kv_plan.h"

namespace mi::tools {
namespace {

std::string count_text(int64_t n) {
  return n >= 1'000'000'000 ? fmt::format("{:.2f} billion", double(n) / 1e9) : fmt::format("{:.2f} million", double(n) / 1e6);
}

// "32 heads, 4 of keys and values, 128 wide, window 4096"; blocks of one model may differ.
std::set<std::string> attention_kinds(const ir::Graph& g) {
  std::set<std::string> kinds;
  for (const ir::Block& b : g.blocks)
    for (const ir::Node& n : b.nodes)
      if (const auto* p = std::get_if<AttentionParams>(&n.params)) {
        std::string s = fmt::format("{} heads, {} of keys and values, {} wide", p->heads, p->kv_heads, p->k_dim);
        if (p->window > 0) s += fmt::format(", window {}", p->window);
        if (p->select_block > 0) s += fmt::format(", reads chosen blocks of {}", p->select_block);
        kinds.insert(std::move(s));
      }
  return kinds;
}

std::set<std::string> expert_kinds(const ir::Graph& g) {
  std::set<std::string> kinds;
  for (const ir::Block& b : g.blocks)
    for (const ir::Node& n : b.nodes)
      if (const auto* p = std::get_if<RouteParams>(&n.params)) {
        const bool shared = std::any_of(b.weights.begin(), b.weights.end(),
                                        [](const ir::WeightDecl& w) { return w.mark == ir::Mark::kSharedExpert; });
        kinds.insert(fmt::format("{}, {} of them for each token{}", p->experts, p->k, shared ? ", and a shared one" : ""));
      }
  return kinds;
}

// Stored scales of activations: static ones, and those at which scales per token saturate.
std::string stored_scales(const ir::Graph& g) {
  int64_t fixed = 0, saturating = 0;
  for (const ir::Block& b : g.blocks)
    for (const ir::Node& n : b.nodes) {
      if (std::none_of(n.weights.begin(), n.weights.end(), [](const auto& w) { return w.role == Role::kInScale; })) continue;
      const auto* q = std::get_if<QuantizeParams>(&n.params);
      const auto* e = std::get_if<GroupedExpertsParams>(&n.params);
      ((q && q->saturate) || (e && e->saturate) ? saturating : fixed) += int64_t(b.layers.size());
    }
  std::string s;
  if (fixed > 0) s = fmt::format("{} static ones of activations", fixed);
  if (saturating > 0) s += fmt::format("{}{} inputs with scales per token that saturate", s.empty() ? "" : ", ", saturating);
  return s;
}

}  // namespace

Card make_card(const Subject& s, int64_t available, double kv_fraction) {
  Card c;
  c.stats = ir::stats_of(s.graph);
  const ir::ModelInfo& i = s.graph.info;
  const auto add = [&](std::string label, std::string value) { c.facts.emplace_back(std::move(label), std::move(value)); };
  const auto add_all = [&](const char* label, const std::set<std::string>& values) {
    for (const std::string& v : values) add(label, v);
  };
  add(s.kind, fmt::format("{} ({}, recipe {})", i.name, i.model_type, i.family));
  if (s.engine)
    add("built by", fmt::format("metainfer {}, format {}", s.engine->manifest.tool_version, s.engine->manifest.format_version));
  add("shape", fmt::format("{} layers, hidden {}, vocabulary {}, {} positions", i.layers, i.hidden, i.vocab, i.max_positions));
  for (const ir::Block& b : s.graph.blocks)
    add("block", fmt::format("{}: {} layer{}, {} ops each", b.name, b.layers.size(), b.layers.size() == 1 ? "" : "s", b.nodes.size()));
  add_all("attention", attention_kinds(s.graph));
  add_all("experts", expert_kinds(s.graph));
  add("parameters", fmt::format("{}, {} active per token", count_text(c.stats.total_params), count_text(c.stats.active_params)));
  int64_t weights = c.stats.weight_bytes;
  if (s.engine) {
    const artifact::Manifest& m = s.engine->manifest;
    weights = m.memory.weight_bytes;
    add("precision", m.model.precision);
    add("weights", fmt::format("{} packed, in {} segment{}", human_bytes(double(weights)), m.segments.size(), m.segments.size() == 1 ? "" : "s"));
    add("activations", human_bytes(double(m.memory.activation_bytes_per_token)) + " per token of a step");
    add("program", fmt::format("{} instructions", m.program.size()));
    std::set<int32_t> reordered;
    for (const artifact::Instr& x : m.program)
      for (const artifact::InstrWeight& w : x.weights)
        if (!m.weights[size_t(w.tensor)].expert_slots.empty()) reordered.insert(x.layer);
    if (!reordered.empty())
      add("order", fmt::format("experts of {} of {} layers are stored by how tokens choose them, not by number", reordered.size(), m.model.layers));
  } else {
    add("weights", human_bytes(double(weights)));
  }
  if (std::string scales = stored_scales(s.graph); !scales.empty()) add("scales", std::move(scales));

  std::vector<artifact::LayerCache> caches;
  for (const ir::CacheStats& k : c.stats.caches) caches.push_back({k.kv_heads, k.k_dim, k.v_dim, k.index_dim, k.window});
  c.kv_bf16 = compiler::stored_kv_bytes_per_token(caches, kernels::KvKind::kBF16);
  c.kv_int8 = compiler::stored_kv_bytes_per_token(caches, kernels::KvKind::kI8);
  const double left = double(std::max<int64_t>(available - weights, 0)) * kv_fraction;
  const auto fits = [&](int64_t bytes) {
    return bytes > 0 ? std::min(i.max_positions, int64_t(left / double(bytes))) : i.max_positions;
  };
  c.context_bf16 = fits(c.kv_bf16);
  c.context_int8 = fits(c.kv_int8);
  add("KV cache", fmt::format("{} per token at bf16, {} at int8", human_bytes(double(c.kv_bf16)), human_bytes(double(c.kv_int8))));
  const auto context = [&](int64_t tokens) {
    return tokens >= i.max_positions ? fmt::format("{} (all)", tokens) : fmt::format("{}", tokens);
  };
  add("context", fmt::format("{} tokens at bf16, {} at int8 fit {:.0f} % of what the weights leave of {} here", context(c.context_bf16),
                             context(c.context_int8), kv_fraction * 100, human_bytes(double(available))));
  if (s.engine) {
    for (const auto& p : s.engine->manifest.passes)
      add("pass", fmt::format("{:<24} {}  {} -> {} ops", p.name, p.skipped ? "off" : "on ", p.nodes_before, p.nodes_after));
    for (const auto& x : s.engine->manifest.fallbacks)
      add("fallback", fmt::format("{}: {} ({}); {}", x.where, x.what, x.why, x.fix));
  }
  for (const std::string& n : s.notes) add("note", n);
  return c;
}

std::string card_text(const Card& c) {
  std::string s;
  for (const auto& [label, value] : c.facts) s += fmt::format("{:<13} {}\n", label, value);
  s += fmt::format("\n{:<15} {:<10} {:>16} {:>12}\n", "class", "format", "parameters", "bytes");
  for (const ir::WeightGroup& g : c.stats.groups)
    s += fmt::format("{:<15} {:<10} {:>16} {:>12}\n", ir::mark_name(g.mark), g.format, g.params, human_bytes(double(g.bytes)));
  return s;
}

std::string card_html(const Card& c) {
  std::vector<std::vector<std::string>> facts{{"what", "value"}}, classes{{"class", "format", "parameters", "bytes"}};
  for (const auto& [label, value] : c.facts) facts.push_back({label, value});
  for (const ir::WeightGroup& g : c.stats.groups)
    classes.push_back({std::string(ir::mark_name(g.mark)), g.format, fmt::format("{}", g.params), fmt::format("{}", g.bytes)});
  return html::table(facts) + "<h2>Weights</h2>\n" + html::table(classes);
}

Json card_json(const Card& c) {
  Json j{{"facts", Json::array()}, {"classes", Json::array()}};
  for (const auto& [label, value] : c.facts) j["facts"].push_back({{"what", label}, {"value", value}});
  for (const ir::WeightGroup& g : c.stats.groups)
    j["classes"].push_back({{"class", ir::mark_name(g.mark)}, {"format", g.format}, {"parameters", g.params}, {"bytes", g.bytes}});
  j["parameters"] = c.stats.total_params;
  j["active_parameters"] = c.stats.active_params;
  j["weight_bytes"] = c.stats.weight_bytes;
  j["ops"] = c.stats.nodes;
  j["kv_bytes_per_token"] = {{"bf16", c.kv_bf16}, {"int8", c.kv_int8}};
  j["longest_context"] = {{"bf16", c.context_bf16}, {"int8", c.context_int8}};
  return j;
}

}  // namespace mi::tools
