#include "quant/choice.h"

#include <algorithm>
#include <optional>
#include <set>

#include "base/json.h"
#include "ir/text.h"
#include "model/module_pattern.h"

namespace mi::quant {
namespace {

constexpr std::string_view kSuffix = ".weight";

std::string module_of(const std::string& weight) {
  return weight.size() > kSuffix.size() && weight.ends_with(kSuffix) ? weight.substr(0, weight.size() - kSuffix.size())
                                                                     : weight;
}

bool is_matrix(const ir::WeightDecl& d) {
  return d.shape.size() >= 2 && d.name.ends_with(kSuffix) && d.mark != ir::Mark::kEmbedding;
}

bool by_default(ir::Mark m) {
  return m == ir::Mark::kAttention || m == ir::Mark::kExpert || m == ir::Mark::kSharedExpert || m == ir::Mark::kDense;
}

bool has_tied_head(const ir::Graph& g) {
  return std::any_of(g.epilogue.weights.begin(), g.epilogue.weights.end(),
                     [](const ir::WeightDecl& d) { return d.mark == ir::Mark::kEmbedding; });
}

struct Modules {
  std::vector<std::string> usual, all;  // rounded by default; everything that can be asked for, in order of layers
  std::map<std::string, const ir::WeightDecl*> quantized;
};

Modules modules_of(const ir::Graph& g) {
  struct Found {
    int32_t layer;
    std::string name;
    bool usual;
  };
  std::vector<Found> found;
  Modules m;
  const auto add = [&](const ir::Block& b, int32_t order, int32_t layer) {
    for (const ir::WeightDecl& d : b.weights) {
      if (!is_matrix(d)) continue;
      const std::string name = module_of(ir::full_name(d.name, layer));
      if (ir::is_quantized(d)) m.quantized[name] = &d;
      found.push_back({order, name, by_default(d.mark) && !ir::is_quantized(d)});
    }
  };
  for (const ir::Block& b : g.blocks)
    for (int32_t layer : b.layers) add(b, layer, layer);
  std::stable_sort(found.begin(), found.end(), [](const Found& a, const Found& b) { return a.layer < b.layer; });
  add(g.epilogue, 0, -1);
  if (has_tied_head(g)) found.push_back({0, module_of(kHeadWeight), false});
  for (Found& f : found) {
    if (f.usual) m.usual.push_back(f.name);
    m.all.push_back(std::move(f.name));
  }
  return m;
}

ir::QuantFormat format_for(LayerFormat f, const QuantConfig& c) {
  return f == LayerFormat::kInt8   ? ir::QuantFormat{ir::WeightFormat::kW8A8, 0}
         : f == LayerFormat::kFloat ? ir::QuantFormat{}
                                    : ir::QuantFormat{ir::WeightFormat::kW4A8, f == LayerFormat::kInt4G32    ? 32
                                                                               : f == LayerFormat::kInt4G64  ? 64
                                                                               : f == LayerFormat::kInt4G128 ? 128
                                                                                                             : c.group_size};
}

}  // namespace

bool is_rounded_by_default(const ir::WeightDecl& d) { return is_matrix(d) && by_default(d.mark); }

const ir::WeightDecl* first_quantized(const ir::Graph& g) {
  for (const ir::Block& b : g.blocks)
    for (const ir::WeightDecl& d : b.weights)
      if (ir::is_quantized(d)) return &d;
  for (const ir::WeightDecl& d : g.epilogue.weights)
    if (ir::is_quantized(d)) return &d;
  return nullptr;
}

Result<std::vector<std::string>> matching(const std::string& key, const std::string& pattern,
                                          const std::vector<std::string>& modules) {
  std::optional<model::ModulePattern> rx;
  if (model::ModulePattern::is_one(pattern)) {
    MI_TRY(rx, model::ModulePattern::read(pattern, key));
  }
  std::vector<std::string> hits;
  for (const std::string& m : modules)
    if (rx ? rx->matches(m) : m == pattern || (m.starts_with(pattern) && m[pattern.size()] == '.')) hits.push_back(m);
  if (hits.empty()) {
    const std::string near = nearest_name(pattern, modules);
    return bad_input("{}: '{}' matches no module that can be quantized{}; names look like '{}'", key, pattern,
                     near.empty() ? "" : fmt::format(" (did you mean '{}'?)", near),
                     modules.empty() ? "layers.0.attn.q" : modules.front());
  }
  return hits;
}

Status check_layers(const QuantConfig& c, const ir::Graph& g) {
  for (const auto& [layer, alpha] : c.layer_alpha)
    if (layer >= g.info.layers)
      return bad_input("{}: there is no layer {}; the model has layers 0 to {}", c.key("smooth_quant.layers"), layer, g.info.layers - 1);
  return {};
}

Result<Choice> Choice::make(const QuantConfig& c, const ir::Graph& g, const std::string& what) {
  const ir::WeightDecl* quantized = first_quantized(g);
  if (quantized && c.layers.empty())
    return bad_input(
        "{}: this model is quantized already ({} is {}); build it as it is, or name under 'layers' what else shall be "
        "rounded, for example lm_head: int8",
        what, quantized->name, ir::format_text(*quantized));
  const Modules modules = modules_of(g);
  if (modules.usual.empty() && c.layers.empty()) return bad_input("{}: nothing in this model can be quantized", what);
  Choice choice;
  if (!quantized)
    for (const std::string& m : modules.usual)
      choice.formats_[m] = format_for(c.weight_bits == 4 ? LayerFormat::kInt4 : LayerFormat::kInt8, c);
  for (const std::string& p : c.sensitive_layers) {
    MI_TRY(const auto hits, matching(c.key("sensitive_layers"), p, modules.usual));
    for (const std::string& m : hits) choice.formats_.erase(m);
    choice.counts_.push_back({p, LayerFormat::kFloat, int64_t(hits.size())});
  }
  for (const auto& [pattern, format] : c.layers) {
    MI_TRY(auto hits, matching(c.key("layers"), pattern, modules.all));
    if (format != LayerFormat::kFloat) choice.leave_out_unusual(pattern, modules.usual, &hits);
    for (const std::string& m : hits) {
      if (const auto q = modules.quantized.find(m); q != modules.quantized.end())
        return bad_input("{}: layers: {} is {} already; only float matrices can be rounded", what, m,
                         ir::format_text(*q->second));
      choice.formats_.erase(m);
      if (format != LayerFormat::kFloat) choice.formats_[m] = format_for(format, c);
    }
    choice.counts_.push_back({pattern, format, int64_t(hits.size())});
  }
  for (const std::string& m : modules.usual) choice.kept_ += !choice.formats_.count(m);
  choice.rounds_tied_head_ = has_tied_head(g) && choice.rounds(kHeadWeight);
  return choice;
}

// The beginning of many names means those that are rounded anyway; a pattern may mean more, which is said.
void Choice::leave_out_unusual(const std::string& pattern, const std::vector<std::string>& usual,
                               std::vector<std::string>* hits) {
  const std::set<std::string> known(usual.begin(), usual.end());
  std::vector<std::string> common, others;
  for (const std::string& m : *hits) (known.count(m) ? common : others).push_back(m);
  if (common.empty() || others.empty()) return;
  if (model::ModulePattern::is_one(pattern))
    notes_.push_back(fmt::format("layers: {} of the {} matrices that '{}' matches stay float unless a recipe asks for them, "
                                 "{} for one: they are rounded",
                                 others.size(), hits->size(), pattern, others.front()));
  else
    *hits = std::move(common);
}

ir::QuantFormat Choice::format(int32_t layer, const ir::WeightDecl& d) const {
  if (!is_matrix(d)) return {};
  const auto it = formats_.find(module_of(ir::full_name(d.name, layer)));
  return it == formats_.end() ? ir::QuantFormat{} : it->second;
}

bool Choice::rounds(const std::string& weight) const { return formats_.count(module_of(weight)) != 0; }

void untie_head(ir::Graph& g) {
  for (ir::WeightDecl& d : g.epilogue.weights)
    if (d.mark == ir::Mark::kEmbedding) {
      d.name = kHeadWeight;
      d.mark = ir::Mark::kHead;
    }
}

}  // namespace mi::quant
