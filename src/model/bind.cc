#include "model/bind.h"

#include <algorithm>
#include <charconv>

namespace mi::model {
namespace {

constexpr size_t kEnoughMissing = 64;  // this is another model; no need to look for the rest

std::string replace(std::string s, std::string_view what, const std::string& with) {
  for (size_t at = s.find(what); at != s.npos; at = s.find(what, at + with.size())) s.replace(at, what.size(), with);
  return s;
}

// "model.layers.7.mlp..." with the template "model.layers.{layer}." -> 7; -1 when it is no layer's.
int64_t layer_number(std::string_view name, std::string_view layer_prefix) {
  const size_t at = layer_prefix.find("{layer}");
  const std::string_view head = layer_prefix.substr(0, at), tail = layer_prefix.substr(at + 7);
  if (!name.starts_with(head)) return -1;
  name.remove_prefix(head.size());
  int64_t layer = -1;
  const auto r = std::from_chars(name.data(), name.data() + name.size(), layer);
  if (r.ec != std::errc() || layer < 0) return -1;
  return std::string_view(r.ptr, size_t(name.data() + name.size() - r.ptr)).starts_with(tail) ? layer : -1;
}

bool is_vector_name(const std::string& local) { return !local.ends_with(".weight"); }
bool is_plain_float(DType t) { return t == DType::kF32 || t == DType::kBF16 || t == DType::kF16; }
bool is_linear(ir::Mark m, const std::string& local) {
  return m != ir::Mark::kNorm && m != ir::Mark::kEmbedding && m != ir::Mark::kConstant && local.ends_with(".weight");
}

std::string module_of(const std::string& name) {
  return name.ends_with(".weight") ? name.substr(0, name.size() - 7) : name;
}

}  // namespace

bool glob_match(std::string_view p, std::string_view s) {
  size_t i = 0, j = 0, star = p.npos, mark = 0;
  while (j < s.size()) {
    if (i < p.size() && p[i] == '*') {
      star = i++;
      mark = j;
    } else if (i < p.size() && p[i] == s[j]) {
      ++i;
      ++j;
    } else if (star != p.npos) {
      i = star + 1;
      j = ++mark;
    } else {
      return false;
    }
  }
  while (i < p.size() && p[i] == '*') ++i;
  return i == p.size();
}

Result<Binder> Binder::create(const Recipe& r, const Checkpoint& k, Config& c, QuantScheme* scheme, int64_t layers,
                              int64_t extra_layers) {
  Binder b(r, k, c, scheme);
  MI_TRY_VOID(b.normalise(layers, extra_layers));
  return b;
}

Status Binder::normalise(int64_t layers, int64_t extra_layers) {
  std::map<std::string, int64_t> skipped;
  for (const auto& [name, tensor] : checkpoint_.tensors()) {
    std::string n = name;
    for (size_t i = 0; i < recipe_.rename.size(); ++i) {
      const auto& [from, to] = recipe_.rename[i];
      if (!n.starts_with(from)) continue;
      n = to + n.substr(from.size());
      applied_rename_ = int(i);
      break;
    }
    std::string why;
    for (const Recipe::Skip& s : recipe_.skip)
      if (glob_match(s.names, n) || glob_match(s.names, name)) why = s.why;
    const int64_t layer = layer_number(n, recipe_.layer_prefix);
    if (layer >= layers && layer < layers + extra_layers) why = "multi-token prediction layers behind the last";
    if (!why.empty()) {
      ++skipped[why];
      continue;
    }
    const auto [it, added] = by_name_.emplace(n, &tensor);
    if (!added)
      return bad_input("{}: tensors {} and {} are the same weight under two names; remove one", tensor.path(),
                       it->second->name(), name);
  }
  skipped_.assign(skipped.begin(), skipped.end());
  return {};
}

const Checkpoint::Tensor* Binder::find(const std::string& n) const {
  const auto it = by_name_.find(n);
  return it == by_name_.end() ? nullptr : it->second;
}

Binder::Candidate Binder::expand(const Alternative& a, int32_t layer, int64_t experts) const {
  Candidate c;
  c.alternative = &a;
  for (const std::string& from : a.from) {
    const std::string of_layer = replace(from, "{layer}", std::to_string(layer));
    const bool stacked = of_layer.find("{expert}") != of_layer.npos;
    for (int64_t e = 0; e < (stacked ? experts : 1); ++e) {
      c.names.push_back(stacked ? replace(of_layer, "{expert}", std::to_string(e)) : of_layer);
      if (find(c.names.back()))
        ++c.present;
      else if (c.first_missing.empty())
        c.first_missing = c.names.back();
    }
  }
  return c;
}

Result<Part> Binder::make_part(const Checkpoint::Tensor& t, const std::vector<ViewOp>& ops, bool is_vector) const {
  auto v = apply(ops, view_of(t.view()), is_vector);
  if (!v.ok()) return bad_input("{}: tensor {} {}", t.path(), t.name(), v.error().message());
  return Part{&t, std::move(v).value()};
}

// Int8 only where the scheme says so, and the same for all tensors that make one weight.
Result<ir::WeightFormat> Binder::decide_format(const std::vector<const Checkpoint::Tensor*>& tensors,
                                               const std::string& local, ir::Mark mark) {
  const Checkpoint::Tensor& first = *tensors.front();
  const DType dtype = first.entry->dtype;
  for (const Checkpoint::Tensor* t : tensors)
    if (t->entry->dtype != dtype)
      return bad_input("{}: tensor {} is {}, but {} is {}; both are part of {}", t->path(), t->name(),
                       dtype_name(t->entry->dtype), first.name(), dtype_name(dtype), local);
  const bool linear = is_linear(mark, local);
  for (const Checkpoint::Tensor* t : tensors) {
    const std::string module = module_of(t->name());
    const bool targeted = scheme_ && linear && !scheme_->is_ignored(module) && scheme_->is_targeted(module);
    if (dtype == DType::kI8 && !scheme_)
      return bad_input("{}: tensor {} is I8, but config.json has no quantization_config that says how it is scaled",
                       t->path(), t->name());
    if (dtype == DType::kI8 && !targeted)
      return bad_input("{}: tensor {} is I8, but quantization_config in config.json does not target it (or ignores it)",
                       t->path(), t->name());
    // Routers and shared-expert gates are no "Linear" for the tools that write these lists.
    if (targeted && is_plain_float(dtype) && mark != ir::Mark::kRouter && mark != ir::Mark::kSharedGate)
      return bad_input(
          "{}: tensor {} is {}, but quantization_config in config.json says that it is int8 (it is targeted and not "
          "ignored)",
          t->path(), t->name(), dtype_name(dtype));
    if (!is_plain_float(dtype) && dtype != DType::kI8)
      return bad_input("{}: tensor {} is {}; export takes F32, BF16 and F16, and I8 with a quantization_config",
                       t->path(), t->name(), dtype_name(dtype));
  }
  return dtype == DType::kI8 ? ir::WeightFormat::kW8A8 : ir::WeightFormat::kFloat;
}

Status Binder::bind_scales(const std::vector<std::string>& names, const Shape& shape, Source* s) {
  const int64_t rows = shape[shape.size() - 2];
  for (const std::string& n : names) {
    const Checkpoint::Tensor* t = find(n + "_scale");
    if (!t) {
      const Checkpoint::Tensor* w = find(n);
      return bad_input("{}: tensor {}_scale is missing: {} is I8 and needs its scales", w->path(), w->name(),
                       w->name());
    }
    const Shape& found = t->entry->shape;
    if (found != Shape{rows, 1} && found != Shape{rows})
      return bad_input("{}: tensor {} has shape {}, expected {}: one scale per row", t->path(), t->name(),
                       shape_text(found), shape_text({rows, 1}));
    if (!is_plain_float(t->entry->dtype))
      return bad_input("{}: tensor {} is {}, expected F32, BF16 or F16", t->path(), t->name(),
                       dtype_name(t->entry->dtype));
    used_.insert(t);
    s->scales.push_back({t, view_of(t->view())});
    if (const Checkpoint::Tensor* zero = find(n + "_zero_point")) {
      const TensorView v = zero->view();
      if (std::any_of(v.data, v.data + v.bytes, [](std::byte b) { return b != std::byte(0); }))
        return bad_input("{}: tensor {} is not zero; only symmetric int8 weights are supported", zero->path(),
                         zero->name());
      used_.insert(zero);
    }
  }
  return {};
}

Result<WeightInfo> Binder::need(int32_t layer, const std::string& local, const Shape& shape, ir::Mark mark) {
  const Bindings& bindings = layer < 0 ? recipe_.top : recipe_.layer;
  const auto b = bindings.find(local);
  if (b == bindings.end())
    return bad_input("{}.yaml: tensors: nothing says where {} comes from", recipe_.family, local);
  // The alternative that is there; with none complete, the one of which most is there is the one that lacks something.
  Candidate best;
  for (const Alternative& a : b->second) {
    Candidate c = expand(a, layer, shape.size() > 1 ? shape[0] : 1);
    if (c.first_missing.empty()) {
      best = std::move(c);
      break;
    }
    if (!best.alternative || c.present > best.present) best = std::move(c);
  }
  const std::string full = ir::full_name(local, layer);
  if (!best.first_missing.empty()) {
    missing_.push_back(fmt::format("{} (for {})", original(best.first_missing), full));
    if (missing_.size() == kEnoughMissing) return finish().error();
    return WeightInfo{};
  }

  Source s;
  s.shape = shape;
  const std::string ops_key = dump_json(best.alternative->ops);
  if (!ops_.count(ops_key)) {
    MI_TRY(ops_[ops_key], parse_view_ops(best.alternative->ops, &config_, recipe_.file + ": " + local));
  }
  const std::vector<ViewOp>& ops = ops_[ops_key];
  for (const std::string& from : best.alternative->from) s.origin.from.push_back(original(replace(from, "{layer}", std::to_string(layer))));
  s.origin.ops = ops;
  std::vector<const Checkpoint::Tensor*> tensors;
  for (const std::string& n : best.names) tensors.push_back(find(n));
  MI_TRY(s.format, decide_format(tensors, local, mark));
  s.dtype = tensors.front()->entry->dtype;
  if (s.format == ir::WeightFormat::kW8A8 && !ops.empty())
    return bad_input("{}: tensor {}: int8 weights in this layout are not supported", tensors[0]->path(),
                     tensors[0]->name());

  const bool stacked = best.alternative->from[0].find("{expert}") != std::string::npos;
  const Shape each(shape.begin() + (stacked ? 1 : 0), shape.end());
  int64_t rows = 0;
  for (const Checkpoint::Tensor* t : tensors) {
    MI_TRY(Part p, make_part(*t, ops, is_vector_name(local)));
    // Concatenated parts may have any number of rows as long as they add up.
    const bool concat = best.alternative->from.size() > 1;
    Shape expected = each;
    if (concat && !p.view.dim.empty()) expected[0] = p.view.dim[0];
    if (p.view.dim != expected) {
      mismatches_.push_back(fmt::format(
          "{}: tensor {} has shape {}{}, expected {} (for {})", t->path(), t->name(), shape_text(t->entry->shape),
          ops.empty() ? "" : fmt::format(", which after {} is {}", ops_text(ops), shape_text(p.view.dim)), shape_text(expected),
          full));
      used_.insert(t);
      return WeightInfo{};
    }
    if (concat) s.origin.rows.push_back(p.view.dim[0]);
    rows += concat ? p.view.dim[0] : 0;
    used_.insert(t);
    s.parts.push_back(std::move(p));
  }
  if (rows != 0 && rows != each[0])
    return bad_input("{}: the tensors of {} ({}) have {} rows together, expected {}", checkpoint_.dir().string(), full,
                     list_text(best.names), rows, each[0]);
  if (s.format == ir::WeightFormat::kW8A8) MI_TRY_VOID(bind_scales(best.names, shape, &s));
  const WeightInfo info{s.dtype, s.format};
  sources_[full] = std::move(s);
  return info;
}

const Checkpoint::Tensor* Binder::find_top(const std::string& name) const {
  const auto b = recipe_.top.find(name);
  if (b == recipe_.top.end()) return nullptr;
  for (const Alternative& a : b->second)
    if (a.from.size() == 1)
      if (const Checkpoint::Tensor* t = find(a.from[0])) return t;
  return nullptr;
}

bool Binder::is_present(const std::string& name) const { return find_top(name) != nullptr; }

void Binder::use_up(const std::string& name) {
  if (const Checkpoint::Tensor* t = find_top(name)) used_.insert(t);
}

std::string Binder::original(const std::string& normalised) const {
  if (applied_rename_ < 0) return normalised;
  const auto& [from, to] = recipe_.rename[size_t(applied_rename_)];
  return normalised.starts_with(to) ? from + normalised.substr(to.size()) : normalised;
}

Status Binder::finish() const {
  std::vector<std::string> problems;
  if (!missing_.empty())
    problems.push_back(fmt::format("{}: missing tensor{} {}", checkpoint_.dir().string(),
                                   missing_.size() == 1 ? "" : "s", list_text(missing_)));
  if (!mismatches_.empty()) problems.push_back(mismatches_.front());
  if (mismatches_.size() > 1)
    problems.push_back(fmt::format("{} more tensors have other shapes than expected", mismatches_.size() - 1));
  if (!problems.empty())
    return bad_input("{}; fetch the checkpoint again, or correct config.json if it does not describe it",
                     fmt::join(problems, "; "));
  std::vector<const Checkpoint::Tensor*> left;
  for (const auto& [name, t] : by_name_)
    if (!used_.count(t)) left.push_back(t);
  if (left.empty()) return {};
  std::sort(left.begin(), left.end(), [](const auto* a, const auto* b) { return a->name() < b->name(); });
  std::vector<std::string> names;
  for (const Checkpoint::Tensor* t : left) names.push_back(t->name());
  return bad_input(
      "{}: no part of the model reads tensor{} {}; config.json or the recipe {} does not describe this checkpoint",
      left.front()->path(), left.size() == 1 ? "" : "s", list_text(names), recipe_.family);
}

}  // namespace mi::model
