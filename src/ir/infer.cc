// Shapes and types of every op. A rule is a function from a node to its result types; errors are thrown inside this
// file only, as Refusal, because a rule is a list of demands and each may end it.

#include <fmt/format.h>

#include <algorithm>

#include "ir/graph.h"
#include "tensor/op_fields.h"

namespace mi::ir {
namespace {

struct Refusal {
  std::string message;
};
template <typename... Args>
[[noreturn]] void refuse(fmt::format_string<Args...> f, Args&&... args) {
  throw Refusal{fmt::format(f, std::forward<Args>(args)...)};
}

using Types = std::vector<ValueType>;

// a * b, both at least 0.
int64_t product(int64_t a, int64_t b, std::string_view what) {
  int64_t r = 0;
  if (__builtin_mul_overflow(a, b, &r) || r > kMaxCols) refuse("{} is too large: {} * {}", what, a, b);
  return r;
}

std::string_view kind_text(Elem e) {
  switch (e) {
    case Elem::kF32:
      return "float";
    case Elem::kQ8:
      return "int8";
    case Elem::kI32:
      return "int32";
    case Elem::kRoute:
      return "a route";
    case Elem::kState:
      return "a cache state";
  }
  return "?";
}

class Rule {
 public:
  Rule(const Block& b, const Node& n) : b_(b), n_(n) {}

  Types run() {
    if (n_.params.index() != size_t(n_.op)) refuse("its parameters are those of another op");
    for (size_t i = 0; i < n_.in.size(); ++i) in(i);
    for (const WeightUse& u : n_.weights) {
      if (u.weights.empty()) refuse("role '{}' names no weight", role_name(u.role));
      for (int32_t w : u.weights)
        if (w < 0 || size_t(w) >= b_.weights.size())
          refuse("role '{}' names weight {} of {}", role_name(u.role), w, b_.weights.size());
    }
    switch (n_.op) {
      case Op::kEmbed:
        return embed();
      case Op::kRmsNorm:
        return rms_norm();
      case Op::kQuantize:
        return quantize();
      case Op::kLinear:
        return linear();
      case Op::kClamp:
        return clamp();
      case Op::kRope:
        return rope();
      case Op::kKvAppend:
        return kv_append();
      case Op::kAttention:
        return attention();
      case Op::kIndexAppend:
        return index_append();
      case Op::kIndexSelect:
        return index_select();
      case Op::kAdd:
        return add();
      case Op::kScale:
        return scale();
      case Op::kActivation:
        return activation();
      case Op::kRoute:
        return route();
      case Op::kExpertLinear:
        return expert_linear();
      case Op::kExpertCombine:
        return expert_combine();
      case Op::kGroupedExperts:
        return grouped_experts();
      case Op::kSigmoidMul:
        return sigmoid_mul();
      case Op::kSlice:
        return slice();
      case Op::kSelectRows:
        return select_rows();
    }
    refuse("unknown op");
  }

 private:
  // ---- inputs
  const Value& in(size_t i) const {
    const ValueId v = n_.in[i];
    if (v < 0 || size_t(v) >= b_.values.size()) refuse("input {} is value {} of {}", i, v, b_.values.size());
    return b_.values[size_t(v)];
  }
  void inputs(size_t lo, size_t hi) const {
    if (n_.in.size() < lo || n_.in.size() > hi) {
      if (lo == hi) refuse("it takes {} input{}, here are {}", lo, lo == 1 ? "" : "s", n_.in.size());
      refuse("it takes {} to {} inputs, here are {}", lo, hi, n_.in.size());
    }
  }
  const ValueType& expect(size_t i, Elem e) const {
    const Value& v = in(i);
    if (v.type.elem != e) refuse("input '{}' has to be {}, it is {}", v.name, kind_text(e), kind_text(v.type.elem));
    return v.type;
  }
  const ValueType& expect_cols(size_t i, Elem e, int64_t cols) const {
    const ValueType& t = expect(i, e);
    if (t.cols != cols) refuse("input '{}' has to have {} columns, it has {}", in(i).name, cols, t.cols);
    return t;
  }
  void expect_rows(size_t i, Rows r) const {
    if (in(i).type.rows != r)
      refuse("input '{}' has to have {} rows, it has {} rows", in(i).name, rows_name(r), rows_name(in(i).type.rows));
  }
  // The optional last input that is added to the result.
  void residual(size_t i, Rows r, int64_t cols) const {
    if (n_.in.size() <= i) return;
    expect_cols(i, Elem::kF32, cols);
    expect_rows(i, r);
  }
  void positive(int64_t v, std::string_view name) const {
    if (v <= 0 || v > kMaxCols) refuse("{} has to be positive, it is {}", name, v);
  }

  // ---- weights
  void roles(std::initializer_list<Role> allowed) const {
    for (size_t i = 0; i < n_.weights.size(); ++i) {
      const Role r = n_.weights[i].role;
      if (std::find(allowed.begin(), allowed.end(), r) == allowed.end())
        refuse("it takes no weight of role '{}'", role_name(r));
      if (i > 0 && n_.weights[i - 1].role >= r) refuse("its weights have to be ordered by role, each role once");
    }
  }
  const WeightUse* find(Role r) const {
    for (const WeightUse& u : n_.weights)
      if (u.role == r) return &u;
    return nullptr;
  }
  const WeightUse& need(Role r) const {
    const WeightUse* u = find(r);
    if (!u) refuse("it needs a weight of role '{}'", role_name(r));
    return *u;
  }
  const WeightDecl& decl(int32_t w) const { return b_.weights[size_t(w)]; }
  const WeightDecl& single(const WeightUse& u) const {
    if (u.weights.size() != 1) refuse("role '{}' takes one weight, here are {}", role_name(u.role), u.weights.size());
    return decl(u.weights[0]);
  }
  void expect_float(const WeightDecl& d) const {
    if (is_quantized(d)) refuse("weight {} has to be float, it is {}", d.name, format_text(d));
  }
  void expect_shape(const WeightDecl& d, const Shape& s) const {
    if (d.shape != s) refuse("weight {} has to have shape {}, it has {}", d.name, shape_text(s), shape_text(d.shape));
  }
  const WeightDecl& vector_weight(const WeightUse& u, int64_t n) const {
    const WeightDecl& d = single(u);
    expect_float(d);
    expect_shape(d, {n});
    return d;
  }
  void stored_scale(bool saturate) const {
    if (const WeightUse* u = find(Role::kInScale)) vector_weight(*u, 1);
    else if (saturate) refuse("it saturates, and has no in_scale to saturate at");
  }
  // The activation x fits the matrix: int8 with a quantized one, float with float; K columns.
  void expect_input_of(size_t i, const WeightDecl& d) const {
    const Value& v = in(i);
    if (is_quantized(d)) {
      if (v.type.elem != Elem::kQ8)
        refuse("weight {} is {}, but input '{}' is {}: quantize it first", d.name, format_text(d), v.name,
               kind_text(v.type.elem));
    } else if (v.type.elem != Elem::kF32) {
      refuse("weight {} is float, but input '{}' is {}", d.name, v.name, kind_text(v.type.elem));
    }
    if (v.type.cols != d.shape.back())
      refuse("weight {} {} takes {} columns, input '{}' has {}", d.name, shape_text(d.shape), d.shape.back(), v.name,
             v.type.cols);
  }
  const WeightDecl& expert_matrix(Role r) const {
    const WeightDecl& d = single(need(r));
    if (d.shape.size() != 3)
      refuse("weight {} has to have shape [experts, N, K], it has {}", d.name, shape_text(d.shape));
    return d;
  }
  void expert_bias(Role r, const WeightDecl& matrix) const {
    const WeightUse* u = find(r);
    if (!u) return;
    const WeightDecl& d = single(*u);
    expect_float(d);
    expect_shape(d, {matrix.shape[0], matrix.shape[1]});
  }
  // Input i is a route of token rows; where its producer is known, over as many experts as the matrices.
  void expect_route(size_t i, int64_t experts) const {
    expect(i, Elem::kRoute);
    for (const Node& p : b_.nodes)
      if (const auto* r = std::get_if<RouteParams>(&p.params);
          r && p.out.size() == 1 && p.out[0] == n_.in[i] && experts >= 0 && r->experts != experts)
        refuse("route '{}' chooses among {} experts, the weights hold {}", in(i).name, r->experts, experts);
  }

  // ---- ops
  template <class P>
  const P& params() const {
    return std::get<P>(n_.params);
  }
  // Of the declared results, where those decide; float without any.
  std::vector<Elem> declared_kinds() const {
    std::vector<Elem> kinds;
    for (ValueId v : n_.out) {
      if (v < 0 || size_t(v) >= b_.values.size()) refuse("its result is value {} of {}", v, b_.values.size());
      kinds.push_back(b_.values[size_t(v)].type.elem);
    }
    if (kinds.empty()) kinds = {Elem::kF32};
    return kinds;
  }
  static Types f32(Rows r, int64_t cols) { return {ValueType{r, cols, Elem::kF32}}; }

  Types embed() const {
    inputs(0, 0);
    roles({Role::kWeight});
    const WeightDecl& d = single(need(Role::kWeight));
    expect_float(d);
    if (d.shape.size() != 2)
      refuse("weight {} has to have shape [vocabulary, hidden], it has {}", d.name, shape_text(d.shape));
    return f32(Rows::kToken, d.shape[1]);
  }

  Types rms_norm() const {
    inputs(1, 1);
    roles({Role::kWeight});
    const auto& p = params<NormParams>();
    const ValueType x = expect(0, Elem::kF32);
    positive(p.groups, "groups");
    if (x.cols % p.groups != 0)
      refuse("the {} columns of '{}' do not divide into {} groups", x.cols, in(0).name, p.groups);
    vector_weight(need(Role::kWeight), x.cols / p.groups);
    const std::vector<Elem> kinds = declared_kinds();
    if (kinds != std::vector{Elem::kF32} && kinds != std::vector{Elem::kQ8} &&
        kinds != std::vector{Elem::kF32, Elem::kQ8})
      refuse("its results have to be float, int8, or float then int8");
    Types types;
    for (Elem e : kinds) types.push_back({x.rows, x.cols, e});
    return types;
  }

  Types quantize() const {
    inputs(1, 1);
    roles({Role::kInScale});
    const ValueType x = expect(0, Elem::kF32);
    stored_scale(params<QuantizeParams>().saturate);
    return {ValueType{x.rows, x.cols, Elem::kQ8}};
  }

  Types linear() const {
    inputs(1, 2);
    roles({Role::kWeight, Role::kBias});
    const WeightUse& u = need(Role::kWeight);
    const WeightDecl& first = decl(u.weights[0]);
    int64_t n = 0;
    for (int32_t w : u.weights) {
      const WeightDecl& d = decl(w);
      if (d.shape.size() != 2) refuse("weight {} has to have shape [N, K], it has {}", d.name, shape_text(d.shape));
      // Float matrices of several types are stored in the widest (lower.cc).
      if (!same_format(d, first) && (is_quantized(d) || is_quantized(first)))
        refuse("stacked weights {} and {} differ in format", first.name, d.name);
      if (d.shape[1] != first.shape[1])
        refuse("stacked weights {} {} and {} {} differ in K", first.name, shape_text(first.shape), d.name,
               shape_text(d.shape));
      positive(d.shape[0], "N");
      n += d.shape[0];
      positive(n, "N");
    }
    if (const WeightUse* bias = find(Role::kBias)) {
      if (bias->weights.size() != u.weights.size())
        refuse("it has {} weights and {} biases", u.weights.size(), bias->weights.size());
      for (size_t i = 0; i < u.weights.size(); ++i) {
        const WeightDecl& d = decl(bias->weights[i]);
        expect_float(d);
        expect_shape(d, {decl(u.weights[i]).shape[0]});
      }
    }
    expect_input_of(0, first);
    const Rows rows = in(0).type.rows;
    residual(1, rows, n);
    return f32(rows, n);
  }

  Types clamp() const {
    inputs(1, 1);
    roles({});
    const auto& p = params<ClampParams>();
    if (!(p.lo <= p.hi)) refuse("lo {} is above hi {}", p.lo, p.hi);
    return {expect(0, Elem::kF32)};
  }

  void rotation(const RopeParams& p) const {
    positive(p.heads, "heads");
    positive(p.head_dim, "head_dim");
    positive(p.rotary_dim, "rotary_dim");
    if (p.rotary_dim % 2 != 0 || p.rotary_dim > p.head_dim)
      refuse("rotary_dim {} has to be even and at most head_dim {}", p.rotary_dim, p.head_dim);
    vector_weight(need(Role::kInvFreq), p.rotary_dim / 2);
  }

  Types rope() const {
    inputs(1, 1);
    roles({Role::kInvFreq});
    const auto& p = params<RopeParams>();
    rotation(p);
    expect_rows(0, Rows::kToken);
    return {expect_cols(0, Elem::kF32, product(p.heads, p.head_dim, "heads * head_dim"))};
  }

  Types kv_append() const {
    inputs(2, 2);
    roles({Role::kInvFreq});
    const auto& p = params<KvAppendParams>();
    positive(p.kv_heads, "kv_heads");
    positive(p.k_dim, "k_dim");
    positive(p.v_dim, "v_dim");
    if (p.rotary_dim != 0 || find(Role::kInvFreq)) rotation(p.rope());
    expect_cols(0, Elem::kF32, product(p.kv_heads, p.k_dim, "kv_heads * k_dim"));
    expect_cols(1, Elem::kF32, product(p.kv_heads, p.v_dim, "kv_heads * v_dim"));
    expect_rows(0, Rows::kToken);
    expect_rows(1, Rows::kToken);
    return {ValueType{Rows::kToken, 0, Elem::kState}};
  }

  Types attention() const {
    inputs(2, 3);
    roles({Role::kSinks});
    const auto& p = params<AttentionParams>();
    positive(p.heads, "heads");
    positive(p.kv_heads, "kv_heads");
    positive(p.k_dim, "k_dim");
    positive(p.v_dim, "v_dim");
    if (p.heads % p.kv_heads != 0) refuse("heads {} is no multiple of kv_heads {}", p.heads, p.kv_heads);
    if (p.window < 0) refuse("window is {}", p.window);
    expect_cols(0, Elem::kF32, product(p.heads, p.k_dim, "heads * k_dim"));
    expect_rows(0, Rows::kToken);
    expect(1, Elem::kState);
    if ((n_.in.size() == 3) != (p.select_block > 0)) refuse("a selection and select_block > 0 go together");
    if (n_.in.size() == 3) {
      const ValueType& s = expect(2, Elem::kI32);
      expect_rows(2, Rows::kToken);
      if (s.cols <= 0 || s.cols % p.kv_heads != 0)
        refuse("the {} columns of selection '{}' do not divide among {} kv_heads", s.cols, in(2).name, p.kv_heads);
    }
    if (const WeightUse* u = find(Role::kSinks)) vector_weight(*u, p.heads);
    return f32(Rows::kToken, product(p.heads, p.v_dim, "heads * v_dim"));
  }

  Types index_append() const {
    inputs(1, 1);
    roles({});
    const auto& p = params<IndexAppendParams>();
    positive(p.dim, "dim");
    expect_cols(0, Elem::kF32, p.dim);
    expect_rows(0, Rows::kToken);
    return {ValueType{Rows::kToken, 0, Elem::kState}};
  }

  Types index_select() const {
    inputs(2, 2);
    roles({});
    const auto& p = params<IndexSelectParams>();
    positive(p.heads, "heads");
    positive(p.dim, "dim");
    positive(p.block, "block");
    positive(p.topk, "topk");
    if (p.local < 0 || p.local > p.topk) refuse("local {} has to be between 0 and topk {}", p.local, p.topk);
    expect_cols(0, Elem::kF32, product(p.heads, p.dim, "heads * dim"));
    expect_rows(0, Rows::kToken);
    expect(1, Elem::kState);
    return {ValueType{Rows::kToken, product(p.heads, p.topk, "heads * topk"), Elem::kI32}};
  }

  Types add() const {
    inputs(2, 2);
    roles({});
    const ValueType a = expect(0, Elem::kF32);
    expect_cols(1, Elem::kF32, a.cols);
    expect_rows(1, a.rows);
    return {a};
  }

  Types scale() const {
    inputs(1, 1);
    roles({});
    return {expect(0, Elem::kF32)};
  }

  Types activation() const {
    inputs(1, 2);
    roles({});
    ValueType t = expect(0, Elem::kF32);
    if (n_.in.size() == 2) {
      expect_cols(1, Elem::kF32, t.cols);
      expect_rows(1, t.rows);
    } else {
      if (t.cols % 2 != 0) refuse("gate|up '{}' has an odd number of columns, {}", in(0).name, t.cols);
      t.cols /= 2;
    }
    const std::vector<Elem> kinds = declared_kinds();
    if (kinds != std::vector{Elem::kF32} && kinds != std::vector{Elem::kQ8}) refuse("its result has to be float or int8");
    t.elem = kinds[0];
    return {t};
  }

  Types route() const {
    inputs(1, 1);
    roles({Role::kSelectBias});
    const auto& p = params<RouteParams>();
    positive(p.experts, "experts");
    if (p.k < 1 || p.k > p.experts) refuse("k {} has to be between 1 and {} experts", p.k, p.experts);
    positive(p.groups, "groups");
    if (p.experts % p.groups != 0) refuse("{} experts do not divide into {} groups", p.experts, p.groups);
    if (p.groups_keep < 1 || p.groups_keep > p.groups)
      refuse("groups_keep {} has to be between 1 and {} groups", p.groups_keep, p.groups);
    if (p.groups_keep * (p.experts / p.groups) < p.k)
      refuse("{} groups of {} experts hold fewer than k {}", p.groups_keep, p.experts / p.groups, p.k);
    if (p.groups > 1 && p.group_by == GroupBy::kTop2 && p.experts / p.groups < 2)
      refuse("groups of one expert have no two largest");
    expect_cols(0, Elem::kF32, p.experts);
    expect_rows(0, Rows::kToken);
    if (const WeightUse* u = find(Role::kSelectBias)) vector_weight(*u, p.experts);
    return {ValueType{Rows::kToken, p.k, Elem::kRoute}};
  }

  Types expert_linear() const {
    inputs(2, 2);
    roles({Role::kWeight, Role::kBias});
    const WeightDecl& d = expert_matrix(Role::kWeight);
    expert_bias(Role::kBias, d);
    expect_input_of(0, d);
    if (in(0).type.rows == Rows::kLogit) refuse("input '{}' has logit rows", in(0).name);
    expect_route(1, d.shape[0]);
    return f32(Rows::kPair, d.shape[1]);
  }

  Types expert_combine() const {
    inputs(2, 3);
    roles({});
    const ValueType y = expect(0, Elem::kF32);
    expect_rows(0, Rows::kPair);
    expect_route(1, -1);
    residual(2, Rows::kToken, y.cols);
    return f32(Rows::kToken, y.cols);
  }

  Types grouped_experts() const {
    inputs(2, 3);
    roles({Role::kGate, Role::kGateBias, Role::kUp, Role::kUpBias, Role::kDown, Role::kDownBias, Role::kInScale});
    const WeightDecl& gate = expert_matrix(Role::kGate);
    const WeightDecl& up = expert_matrix(Role::kUp);
    const WeightDecl& down = expert_matrix(Role::kDown);
    if (!same_format(up, gate))
      refuse("weights {} and {} differ in format", gate.name, up.name);
    expect_shape(up, gate.shape);
    expect_shape(down, {gate.shape[0], down.shape[1], gate.shape[1]});
    expert_bias(Role::kGateBias, gate);
    expert_bias(Role::kUpBias, up);
    expert_bias(Role::kDownBias, down);
    stored_scale(params<GroupedExpertsParams>().saturate);
    if (find(Role::kInScale) && !is_quantized(down)) refuse("in_scale goes with quantized weights; {} is float", down.name);
    expect_input_of(0, gate);
    expect_rows(0, Rows::kToken);
    expect_route(1, gate.shape[0]);
    residual(2, Rows::kToken, down.shape[1]);
    return f32(Rows::kToken, down.shape[1]);
  }

  Types sigmoid_mul() const {
    inputs(2, 2);
    roles({});
    const ValueType y = expect(0, Elem::kF32);
    expect_cols(1, Elem::kF32, 1);
    expect_rows(1, y.rows);
    return {y};
  }

  Types slice() const {
    inputs(1, 1);
    roles({});
    const auto& p = params<SliceParams>();
    const ValueType x = expect(0, Elem::kF32);
    if (p.start < 0 || p.len < 1 || p.start > x.cols || p.len > x.cols - p.start)
      refuse("start {} with len {} is not inside the {} columns of '{}'", p.start, p.len, x.cols, in(0).name);
    return f32(x.rows, p.len);
  }

  Types select_rows() const {
    inputs(1, 1);
    roles({});
    const ValueType x = expect(0, Elem::kF32);
    expect_rows(0, Rows::kToken);
    return f32(Rows::kLogit, x.cols);
  }

  const Block& b_;
  const Node& n_;
};

}  // namespace

std::variant<std::vector<ValueType>, InferError> infer(const Block& b, const Node& n) {
  try {
    return Rule(b, n).run();
  } catch (const Refusal& r) {
    return InferError{r.message};
  }
}

}  // namespace mi::ir
