#include "model/bind.h"

#include <algorithm>
#include <charconv>
#include <tuple>

#include "base/check.h"
#include "base/util.h"

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
// Some format stores codes or packed numbers in it.
bool can_be_quantized(DType t) { return t == DType::kI8 || t == DType::kU8 || t == DType::kI32 || t == DType::kF8E4M3; }
bool is_linear(ir::Mark m, const std::string& local) {
  return m != ir::Mark::kNorm && m != ir::Mark::kEmbedding && m != ir::Mark::kConstant && local.ends_with(".weight");
}

// Operations that can be applied to one expert after the other.
bool keeps_matrices(const std::vector<ViewOp>& ops) {
  return std::none_of(ops.begin(), ops.end(), [](const ViewOp& op) {
    return op.kind == ViewOp::Kind::kReshape || op.kind == ViewOp::Kind::kSqueeze;
  });
}

// Int8 that the engine computes with as it is; other int8 forms are widened.
bool is_w8a8(const formats::Format& f) {
  using formats::Strategy;
  return f.layout == formats::Layout::kInt8 && f.symmetric && f.int8_activations &&
         (f.strategy == Strategy::kChannel || f.strategy == Strategy::kTensor);
}

}  // namespace

bool Source::dequantized() const {
  return format == ir::WeightFormat::kFloat &&
         std::any_of(parts.begin(), parts.end(), [](const Part& p) { return p.stored != nullptr; });
}

std::string Source::stored_as() const {
  const auto p = std::find_if(parts.begin(), parts.end(), [](const Part& q) { return q.stored != nullptr; });
  MI_CHECK(p != parts.end(), "{}", local);
  return p->stored->format.text();
}

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
    if (const auto* wrapper = wrapper_of(recipe_, name)) {
      n = wrapper->second + name.substr(wrapper->first.size());
      wrapper_ = wrapper;
    }
    std::string why;
    for (const Recipe::Skip& s : recipe_.skip)
      if (glob_match(s.names, n) || glob_match(s.names, name)) why = s.why;
    const int64_t layer = layer_number(n, recipe_.layer_prefix);
    if (layer >= layers && layer < layers + extra_layers) why = "multi-token prediction layers behind the last";
    if (scheme_ && (n.ends_with(".k_scale") || n.ends_with(".v_scale"))) why = "scales of a quantized key-value cache";
    if (!why.empty()) {
      ++skipped[why];
      continue;
    }
    const auto [it, added] = by_name_.emplace(formats::weight_name(n), &tensor);
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
      const Checkpoint::Tensor* t = find(c.names.back());
      if (t && a.quantized.value_or(formats::is_quantized(*t)) == formats::is_quantized(*t))
        ++c.present;
      else if (c.first_missing.empty())
        c.first_missing = c.names.back();
    }
  }
  return c;
}

// shape: of the weight, however the tensor packs it.
Result<Part> Binder::make_part(const Checkpoint::Tensor& t, const Shape& shape, const std::vector<ViewOp>& ops,
                               bool is_vector) const {
  TensorView whole = t.view();
  whole.shape = shape;
  auto v = apply(ops, view_of(whole), is_vector);
  if (!v.ok()) return bad_input("{}: tensor {} {}", t.path(), t.name(), v.error().message());
  return Part{&t, std::move(v).value(), nullptr};
}

// nullptr: plain floats. Quantized only where the scheme says so.
Result<std::shared_ptr<const formats::Stored>> Binder::stored_form(const Checkpoint::Tensor& t,
                                                                   const std::string& local, ir::Mark mark) {
  if (t.gguf_type) {
    MI_TRY(formats::Stored s,
           formats::find_stored(checkpoint_, t, {.layout = formats::Layout::kGguf, .gguf_type = *t.gguf_type}));
    return std::make_shared<const formats::Stored>(std::move(s));
  }
  const DType dtype = t.entry->dtype;
  const formats::Format* f =
      scheme_ && is_linear(mark, local) ? scheme_->format_of(formats::module_name(t.name())) : nullptr;
  if (!formats::is_quantized(t)) {
    // Routers and shared-expert gates are no "Linear" for the tools that write these lists.
    if (f && scheme_->is_strict() && mark != ir::Mark::kRouter && mark != ir::Mark::kSharedGate)
      return bad_input(
          "{}: tensor {} is {}, but quantization_config in config.json says that it is {} (it is targeted and not "
          "ignored)",
          t.path(), t.name(), dtype_name(dtype), f->text());
    return std::shared_ptr<const formats::Stored>();
  }
  if (!can_be_quantized(dtype))
    return bad_input(
        "{}: tensor {} is {}; export takes F32, BF16 and F16, and quantized weights with a "
        "quantization_config",
        t.path(), t.name(), dtype_name(dtype));
  if (!scheme_)
    return bad_input("{}: tensor {} is {}, but config.json has no quantization_config that says how it is scaled",
                     t.path(), t.name(), dtype_name(dtype));
  if (!f)
    return bad_input("{}: tensor {} is {}, but quantization_config in config.json does not target it (or ignores it)",
                     t.path(), t.name(), dtype_name(dtype));
  MI_TRY(formats::Stored s, formats::find_stored(checkpoint_, t, *f));
  return std::make_shared<const formats::Stored>(std::move(s));
}

// Int8 stays where all parts are it; floats of one type stay; everything else becomes float.
Status Binder::decide_format(Source* s, const std::string& local) {
  const auto stays = [](const Part& p) { return p.stored && is_w8a8(p.stored->format); };
  if (s->origin.ops.empty() && std::all_of(s->parts.begin(), s->parts.end(), stays)) {
    s->format = ir::WeightFormat::kW8A8;
    s->dtype = DType::kI8;
    for (const Part& p : s->parts) {
      s->scales.push_back({p.stored->scale, view_of(p.stored->scale->view()), p.stored});
      static_activations_ += p.stored->format.static_activations;
      asymmetric_activations_ += p.stored->format.asymmetric_activations;
    }
    return {};
  }
  if (s->dequantized()) {
    s->dtype = DType::kF32;
    const Part& p = s->parts.front();
    if (!keeps_matrices(s->origin.ops))
      return bad_input("{}: tensor {}: quantized weights in this layout ({}) are not supported", p.tensor->path(),
                       p.tensor->name(), ops_text(s->origin.ops));
    return {};
  }
  const Checkpoint::Tensor& first = *s->parts.front().tensor;
  s->dtype = first.entry->dtype;
  for (const Part& p : s->parts)
    if (p.tensor->entry->dtype != s->dtype)
      return bad_input("{}: tensor {} is {}, but {} is {}; both are part of {}", p.tensor->path(), p.tensor->name(),
                       dtype_name(p.tensor->entry->dtype), first.name(), dtype_name(s->dtype), local);
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
  s.local = local;
  s.mark = mark;
  const std::string ops_key = dump_json(best.alternative->ops);
  if (!ops_.count(ops_key)) {
    MI_TRY(ops_[ops_key], parse_view_ops(best.alternative->ops, &config_, recipe_.file + ": " + local));
  }
  const std::vector<ViewOp>& ops = ops_[ops_key];
  std::vector<std::string> known_as = best.alternative->from;
  if (!best.alternative->known_as.empty()) known_as.assign(1, best.alternative->known_as);
  std::vector<const Checkpoint::Tensor*> tensors;
  for (const std::string& n : best.names) tensors.push_back(find(n));
  for (const std::string& name : known_as)
    s.origin.from.push_back(spelled_as(*tensors.front(), replace(name, "{layer}", std::to_string(layer))));
  s.origin.ops = ops;

  const bool stacked = best.alternative->from[0].find("{expert}") != std::string::npos;
  const Shape each(shape.begin() + (stacked ? 1 : 0), shape.end());
  int64_t rows = 0;
  for (const Checkpoint::Tensor* t : tensors) {
    MI_TRY(auto stored, stored_form(*t, local, mark));
    MI_TRY(Part p, make_part(*t, stored ? stored->shape : t->entry->shape, ops, is_vector_name(local)));
    // Concatenated parts may have any number of rows as long as they add up.
    const bool concat = best.alternative->from.size() > 1;
    Shape expected = each;
    if (concat && !p.view.dim.empty()) expected[0] = p.view.dim[0];
    if (p.view.dim != expected) {
      mismatches_.push_back(fmt::format(
          "{}: tensor {} has shape {}{}, expected {} (for {})", t->path(), t->name(), shape_text(t->entry->shape),
          ops.empty() ? "" : fmt::format(", which after {} is {}", ops_text(ops), shape_text(p.view.dim)),
          shape_text(expected), full));
      used_.insert(t);
      return WeightInfo{};
    }
    if (concat) s.origin.rows.push_back(p.view.dim[0]);
    if (!ops.empty()) s.origin.shape = stored ? stored->shape : t->entry->shape;
    rows += concat ? p.view.dim[0] : 0;
    used_.insert(t);
    if (stored) used_.insert(stored->tensors.begin(), stored->tensors.end());
    p.stored = std::move(stored);
    s.parts.push_back(std::move(p));
  }
  if (rows != 0 && rows != each[0])
    return bad_input("{}: the tensors of {} ({}) have {} rows together, expected {}", checkpoint_.dir().string(), full,
                     list_text(best.names), rows, each[0]);
  MI_TRY_VOID(decide_format(&s, local));
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
  if (!wrapper_) return normalised;
  const auto& [from, to] = *wrapper_;
  return normalised.starts_with(to) ? from + normalised.substr(to.size()) : normalised;
}

std::string Binder::spelled_as(const Checkpoint::Tensor& t, const std::string& normalised) const {
  const auto* wrapper = wrapper_of(recipe_, t.name());
  return wrapper ? wrapper->first + normalised.substr(wrapper->second.size()) : normalised;
}

Result<bool> Binder::settle_dtypes() {
  std::map<std::string, DType> settled;  // by local name: layers of one form share a block
  int64_t sources = 0;
  for (const auto& [name, s] : sources_) sources += s.dequantized();
  if (sources == 0) return false;
  Progress progress("check", uint64_t(sources), false);
  for (const auto& [name, s] : sources_) {
    if (!s.dequantized()) continue;
    std::optional<DType> type;
    if (const auto it = settled.find(s.local); it != settled.end()) type = it->second;
    for (const Part& p : s.parts) {
      if (type == DType::kF32) break;
      if (!p.stored) {
        type = type.value_or(p.view.dtype) == p.view.dtype ? p.view.dtype : DType::kF32;
        continue;
      }
      MI_TRY(const auto matrix, formats::open_stored(*p.stored));
      type = formats::exact_dtype(*matrix, p.stored->rows(), p.stored->cols(), type);
    }
    settled[s.local] = *type;
    progress.advance(1, name);
  }
  progress.done();
  for (auto& [name, s] : sources_)
    if (s.dequantized()) s.dtype = settled.at(s.local);
  return true;
}

WeightInfo Binder::info(const std::string& full_name) const {
  const auto it = sources_.find(full_name);
  MI_CHECK(it != sources_.end(), "{}", full_name);
  return {it->second.dtype, it->second.format};
}

std::vector<Dequantized> Binder::dequantized() const {
  std::map<std::tuple<std::string, std::string, DType>, int64_t> count;
  for (const auto& [name, s] : sources_) {
    if (s.format != ir::WeightFormat::kFloat) continue;
    for (const Part& p : s.parts)
      if (p.stored) ++count[{std::string(ir::mark_name(s.mark)), p.stored->format.text(), s.dtype}];
  }
  std::vector<Dequantized> out;
  for (const auto& [key, n] : count) out.push_back({std::get<0>(key), std::get<1>(key), std::get<2>(key), n});
  return out;
}

std::vector<std::string> Binder::notes() const {
  std::vector<std::string> out;
  if (static_activations_ + asymmetric_activations_ > 0)
    out.push_back(fmt::format(
        "{} int8 tensors were made for {}{}{}activations; here each token's activations are rounded with a scale of "
        "their own, symmetric, and the file's input scales are not used",
        std::max(static_activations_, asymmetric_activations_), static_activations_ ? "static " : "",
        static_activations_ && asymmetric_activations_ ? "and " : "", asymmetric_activations_ ? "asymmetric " : ""));
  return out;
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
