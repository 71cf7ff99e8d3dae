#include "tools/hf/plan.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "base/check.h"
#include "model/origin.h"
#include "tensor/int4.h"

namespace mi::tools::hf {
namespace {

using ir::WeightDecl;
using ir::WeightFormat;
using model::Alternative;
using model::Origin;
using model::ViewOp;

constexpr std::string_view kLayer = "{layer}", kExpert = "{expert}", kWeight = ".weight";

std::string replace(std::string s, std::string_view what, const std::string& with) {
  for (size_t at = s.find(what); at != s.npos; at = s.find(what, at + with.size())) s.replace(at, what.size(), with);
  return s;
}
bool has_expert(const std::string& s) { return s.find(kExpert) != s.npos; }

// One tensor per matrix, as the MIR has it.
bool is_plain(const Alternative& a) { return a.ops.empty() && a.from.size() == 1; }

// Every bfloat16 scale of int4 weights is stored in two bytes.
bool all_bf16(const TensorView& v) {
  for (int64_t i = 0; i < v.count(); ++i) {
    uint32_t u;
    std::memcpy(&u, v.data + i * 4, 4);
    if (u & 0xffff) return false;
  }
  return true;
}

bool is_linear(const WeightDecl& d) {
  return d.mark != ir::Mark::kNorm && d.mark != ir::Mark::kEmbedding && d.mark != ir::Mark::kConstant &&
         d.name.ends_with(kWeight);
}

// "vision_tower.*" -> "re:^vision_tower\..*$"
std::string pattern_of(const std::string& glob) {
  std::string rx = "re:^";
  for (char c : glob) rx += c == '*' ? std::string(".*") : c == '.' ? std::string("\\.") : std::string(1, c);
  return rx + "$";
}

class HfPlanner {
 public:
  HfPlanner(const ir::MirDir& m, Form form, std::optional<DType> dtype)
      : m_(m), g_(m.graph), form_(form), dtype_(dtype) {}

  Result<FilePlan> run() {
    MI_TRY_VOID(read_sources());
    MI_TRY_VOID(check_rotation());
    std::vector<std::pair<const ir::Block*, int32_t>> places = {{&g_.prologue, -1}};
    for (int32_t l = 0; l < g_.info.layers; ++l) places.push_back({&g_.block_of(l), l});
    places.push_back({&g_.epilogue, -1});
    std::set<std::string> done;
    for (const auto& [block, layer] : places) {
      const std::set<const WeightDecl*> scales = activation_scales(*block);
      for (const WeightDecl& d : block->weights) {
        const std::string full = ir::full_name(d.name, layer);
        if (d.mark == ir::Mark::kConstant || scales.count(&d) || !done.insert(full).second) continue;
        if (form_ == Form::kPlain && ir::is_quantized(d))
          return bad_input(
              "{}: tensor {} is quantized ({}), which a plain checkpoint has no place for; convert the MIR from before "
              "quantize, or use --to compressed-tensors",
              m_.dir.string(), full, ir::format_text(d));
        MI_TRY_VOID(add(d, layer, full));
      }
    }
    plan_.tied = !done.count("lm_head.weight");
    if (plan_.tied && plan_.recipe) {
      const auto head = plan_.recipe->top.find("lm_head.weight");
      if (head != plan_.recipe->top.end()) {
        const std::string name = wrapped(head->second.front().from[0]);
        add_module(name, name, -1, nullptr);
      }
    }
    MI_TRY_VOID(finish_packed());
    return std::move(plan_);
  }

 private:
  std::set<const WeightDecl*> activation_scales(const ir::Block& b) {
    std::set<const WeightDecl*> out;
    for (const ir::Node& n : b.nodes)
      for (const ir::WeightUse& u : n.weights)
        if (u.role == Role::kInScale) {
          const auto* q = std::get_if<QuantizeParams>(&n.params);
          (q && q->saturate ? plan_.saturates : plan_.static_scales) = true;
          for (int32_t w : u.weights) out.insert(&b.weights[size_t(w)]);
        }
    return out;
  }

  Status read_sources() {
    const std::string what = (m_.dir / "provenance.json").string();
    const Json& p = m_.provenance;
    const bool own_recipe = p.contains("options") && p["options"].is_object() && p["options"].contains("family_file");
    if (!own_recipe) {
      MI_TRY(plan_.recipe, model::find_recipe(g_.info.model_type, (m_.dir / "model.mir").string()));
    }
    // Random weights have no source; the recipe's own names serve.
    if (p.contains("tensors") || own_recipe) {
      MI_TRY(origins_, model::read_origins(p, what));
    }
    if (!plan_.recipe) return {};
    for (const auto& [tensor, o] : origins_)
      if (const auto* w = model::wrapper_of(*plan_.recipe, o.from[0]);
          w && std::find(wrappers_.begin(), wrappers_.end(), w) == wrappers_.end())
        wrappers_.push_back(w);
    if (p.contains("skipped") && p["skipped"].is_object())
      for (const model::Recipe::Skip& s : plan_.recipe->skip)
        if (s.names.ends_with('*') && p["skipped"].contains(s.why)) plan_.skipped.push_back(pattern_of(s.names));
    return {};
  }

  // GGUF files of some architectures have the rows of q and k in another order than the family's checkpoints.
  Status check_rotation() const {
    if (!plan_.recipe || !m_.provenance.contains("quantized") || m_.provenance["quantized"] != "gguf") return {};
    const Json& rope = plan_.recipe->section("rope");
    const bool pairs = rope.contains("style") && rope["style"] == "interleaved";
    for (const ir::Block& b : g_.blocks)
      for (const ir::Node& n : b.nodes)
        if (n.op == Op::kRope && std::get<RopeParams>(n.params).interleaved != pairs)
          return bad_input(
              "{}: its q and k rotate {}, but checkpoints of the family {} hold them for rotating {}; export the "
              "safetensors release of the model instead of a GGUF file",
              m_.dir.string(), pairs ? "halves" : "neighbouring pairs", g_.info.family,
              pairs ? "neighbouring pairs" : "halves");
    return {};
  }

  // The name under the wrapper that the source has ("language_model.").
  std::string wrapped(const std::string& normalised) const {
    for (const auto* w : wrappers_)
      if (normalised.starts_with(w->second)) return w->first + normalised.substr(w->second.size());
    return normalised;
  }
  std::string unwrapped(const std::string& name) const {
    const auto* w = model::wrapper_of(*plan_.recipe, name);
    return w ? w->second + name.substr(w->first.size()) : name;
  }

  bool comes_from(const Origin& o, const Alternative& a, int32_t layer) const {
    if (o.from.size() != a.from.size()) return false;
    for (size_t i = 0; i < o.from.size(); ++i)
      if (replace(a.from[i], kLayer, std::to_string(layer)) != unwrapped(o.from[i])) return false;
    return true;
  }

  // Where a checkpoint has the weight: as the source had it, but for packed experts of which the family has single ones
  // too, and for numbers that only quantized checkpoints lay out so. nullptr: nowhere.
  const Alternative* choose(const std::string& local, int32_t layer, const Origin* o) const {
    const model::Bindings& bindings = layer < 0 ? plan_.recipe->top : plan_.recipe->layer;
    const auto b = bindings.find(local);
    if (b == bindings.end()) return nullptr;
    const Alternative *as_source = nullptr, *first = nullptr, *single = nullptr;
    for (const Alternative& a : b->second) {
      if (a.quantized.value_or(false)) continue;
      if (!first) first = &a;
      if (!single && is_plain(a) && has_expert(a.from[0])) single = &a;
      if (!as_source && o && comes_from(*o, a, layer)) as_source = &a;
    }
    if (as_source && is_plain(*as_source)) return as_source;
    return single ? single : as_source ? as_source : first;
  }

  struct Layout {
    std::vector<std::string> families;  // names with {layer} and {expert}
    std::vector<ViewOp> ops;
    const Origin* origin = nullptr;  // with these ops
  };
  Result<Layout> layout_of(const WeightDecl& d, int32_t layer, const std::string& full) const {
    Layout l;
    const auto it = origins_.find(full);
    const Origin* o = it == origins_.end() ? nullptr : &it->second;
    const Alternative* a = plan_.recipe ? choose(d.name, layer, o) : nullptr;
    if (a) {
      for (const std::string& f : a->from) l.families.push_back(wrapped(f));
      MI_TRY(l.ops, model::parse_view_ops(a->ops, nullptr, fmt::format("{}: {}", plan_.recipe->file, d.name)));
      if (o && comes_from(*o, *a, layer) && model::ops_json(o->ops) == model::ops_json(l.ops)) l.origin = o;
    } else if (o) {
      l.families = o->from;
      l.ops = o->ops;
      l.origin = o;
    } else {
      return bad_input("{}: nothing says which tensor of a checkpoint {} is; export the checkpoint again",
                       m_.dir.string(), full);
    }
    return l;
  }

  DType float_type(const WeightDecl& d) const {
    const bool routes = d.mark == ir::Mark::kRouter || d.name == "moe.select_bias";
    return !dtype_ || (routes && d.dtype == DType::kF32) ? d.dtype : *dtype_;
  }

  Status add(const WeightDecl& d, int32_t layer, const std::string& full) {
    MI_TRY(const Layout l, layout_of(d, layer, full));
    if (!l.ops.empty()) return add_packed(d, layer, full, l);
    if (l.families.size() > 1 && (!l.origin || l.origin->rows.size() != l.families.size()))
      return bad_input(
          "{}: {} is several tensors in a checkpoint, and nothing says how many rows each has; export the "
          "checkpoint again",
          m_.dir.string(), full);
    const bool experts = has_expert(l.families[0]);
    const Shape each(d.shape.begin() + (experts ? 1 : 0), d.shape.end());
    for (int64_t e = 0; e < (experts ? d.shape[0] : 1); ++e) {
      int64_t row = 0;
      for (size_t i = 0; i < l.families.size(); ++i) {
        Shape shape = each;
        if (l.families.size() > 1) shape[0] = l.origin->rows[i];
        const std::string name =
            replace(replace(l.families[i], kLayer, std::to_string(layer)), kExpert, std::to_string(e));
        MI_TRY_VOID(add_one({full, &d, experts ? e : -1, row, {}}, name, l.families[i], layer, shape));
        row += shape[0];
      }
    }
    return {};
  }

  Status add_one(const Piece& p, const std::string& name, const std::string& family, int32_t layer,
                 const Shape& shape) {
    const WeightDecl& d = *p.decl;
    if (is_linear(d) && shape.size() == 2) add_module(name, family, layer, &d);
    if (!ir::is_quantized(d)) return put(name, float_type(d), shape, Content::kNumbers, p);
    if (shape.size() != 2 || !name.ends_with(kWeight)) return refuse_packed(p.weight, name);
    if (d.format == WeightFormat::kW8A8) {
      MI_TRY_VOID(put(name, DType::kI8, shape, Content::kNumbers, p));
      return put(name + "_scale", DType::kF32, {shape[0], 1}, Content::kScales, p);
    }
    if (shape[1] % d.group != 0)
      return bad_input(
          "{}: tensor {} has {} columns in groups of {}, and the last group of a row is shorter, which pack-quantized "
          "has "
          "no place for; quantize with a group_size that divides {}, or keep this tensor at 8 bits (layers in the "
          "recipe)",
          m_.dir.string(), p.weight, shape[1], d.group, shape[1]);
    auto [known, fresh] = narrow_.try_emplace(p.weight, false);
    if (fresh) known->second = all_bf16(m_.weight(p.weight + "_scale"));
    MI_TRY_VOID(put(name + "_packed", DType::kI32, {shape[0], shape[1] / 8}, Content::kNumbers, p));
    MI_TRY_VOID(put(name + "_scale", known->second ? DType::kBF16 : DType::kF32, {shape[0], shape[1] / d.group},
                    Content::kScales, p));
    return put(name + "_shape", DType::kI64, {2}, Content::kShape, p);
  }

  Error refuse_packed(const std::string& full, const std::string& name) const {
    return bad_input(
        "{}: tensor {} is quantized, and checkpoints of the family {} have it inside of {}, packed with others, where "
        "compressed-tensors stores one matrix each; keep these layers in float (layers in the recipe), or use --to "
        "gguf",
        m_.dir.string(), full, g_.info.family, name);
  }

  Status add_packed(const WeightDecl& d, int32_t layer, const std::string& full, const Layout& l) {
    const std::string& family = l.families[0];
    const std::string name = replace(family, kLayer, std::to_string(layer));
    if (l.families.size() > 1 || has_expert(family))
      return bad_input("{}: {} is laid out in a checkpoint in a way that convert does not write ({})", m_.dir.string(),
                       full, model::ops_text(l.ops));
    if (ir::is_quantized(d)) return refuse_packed(full, name);
    const Piece p{full, &d, -1, 0, l.ops};
    std::optional<Shape> shape = shape_before(l.ops, d.shape, p.is_vector());
    if (!shape && l.origin && !l.origin->shape.empty()) shape = l.origin->shape;
    if (!shape)
      return bad_input(
          "{}: nothing says which shape {} has in a checkpoint, where it is {}; export the checkpoint again",
          m_.dir.string(), full, name);
    if (d.shape.size() == 2 && is_linear(d)) add_module(name, family, layer, &d);
    const auto it = packed_.find(name);
    if (it == packed_.end()) {
      packed_[name] = plan_.tensors.size();
      return put(name, float_type(d), *shape, Content::kNumbers, p);
    }
    FileTensor& t = plan_.tensors[it->second];
    if (t.dtype != float_type(d)) t.dtype = DType::kF32;
    if (t.shape.size() != shape->size()) return disagree(t, full);
    // Ranges of rows tell how many there are at least.
    for (size_t i = 0; i < shape->size(); ++i) t.shape[i] = std::max(t.shape[i], (*shape)[i]);
    t.pieces.push_back(p);
    return {};
  }

  Error disagree(const FileTensor& t, const std::string& full) const {
    return bad_input("{}: {} does not fit into {} {} of the checkpoint beside {}", m_.dir.string(), full, t.name,
                     shape_text(t.shape), t.pieces.front().weight);
  }

  // The pieces have their shapes inside of the tensor, and fill it.
  Status finish_packed() const {
    for (const auto& [name, at] : packed_) {
      const FileTensor& t = plan_.tensors[at];
      int64_t count = 0;
      for (const Piece& p : t.pieces) {
        const auto v = model::apply(p.ops, model::view_of({t.dtype, t.shape, nullptr, 0}), p.is_vector());
        if (!v.ok() || v->dim != p.decl->shape) return disagree(t, p.weight);
        count += v->count();
      }
      if (count != *shape_count(t.shape))
        return bad_input("{}: the weights of the MIR fill {} of {} numbers of the checkpoint's {} {}", m_.dir.string(),
                         count, *shape_count(t.shape), name, shape_text(t.shape));
    }
    return {};
  }

  Status put(const std::string& name, DType dtype, Shape shape, Content content, Piece p) {
    if (!names_.insert(name).second)
      return bad_input("{}: two weights would be the checkpoint's tensor {}, one of them {}", m_.dir.string(), name,
                       p.weight);
    plan_.tensors.push_back({name, dtype, std::move(shape), content, {std::move(p)}});
    return {};
  }

  static std::string module_name(const std::string& weight) {
    return weight.ends_with(kWeight) ? weight.substr(0, weight.size() - kWeight.size()) : weight;
  }
  // d == nullptr: a head that reads the embedding.
  void add_module(const std::string& name, const std::string& family, int32_t layer, const WeightDecl* d) {
    plan_.modules.push_back(
        {module_name(name), module_name(family), layer, d ? d->format : WeightFormat::kFloat, d ? d->group : 0});
  }

  const ir::MirDir& m_;
  const ir::Graph& g_;
  Form form_;
  std::optional<DType> dtype_;
  FilePlan plan_;
  model::Origins origins_;
  std::vector<const std::pair<std::string, std::string>*> wrappers_;  // of the recipe, those in use
  std::map<std::string, size_t> packed_;                              // by name, into plan_.tensors
  std::map<std::string, bool> narrow_;                                // by weight: its scales are bfloat16 numbers
  std::set<std::string> names_;
};

}  // namespace

Result<FilePlan> plan_files(const ir::MirDir& m, Form form, std::optional<DType> dtype) {
  return HfPlanner(m, form, dtype).run();
}

std::optional<Shape> shape_before(const std::vector<ViewOp>& ops, Shape s, bool is_vector) {
  for (auto op = ops.rbegin(); op != ops.rend(); ++op) {
    const size_t least = is_vector ? 1 : 2;
    if (s.size() < least) return std::nullopt;
    const size_t row = s.size() - least;
    switch (op->kind) {
      case ViewOp::Kind::kTranspose:
        if (s.size() < 2) return std::nullopt;
        std::swap(s[s.size() - 1], s[s.size() - 2]);
        break;
      case ViewOp::Kind::kOrient:  // written in the wanted orientation
        break;
      case ViewOp::Kind::kHalf:
        s[row] *= 2;
        break;
      case ViewOp::Kind::kEvery:
        s[row] *= op->args[0];
        break;
      case ViewOp::Kind::kRows:
        s[row] = op->args[0] + op->args[1];
        break;
      case ViewOp::Kind::kReshape:
      case ViewOp::Kind::kSqueeze:
        return std::nullopt;
    }
  }
  return s;
}

}  // namespace mi::tools::hf
