#include <algorithm>
#include <charconv>
#include <unordered_map>

#include "base/json.h"
#include "ir/text.h"
#include "tensor/op_fields.h"

// The grammar ('#' starts a comment; line ends are spaces):
//
//   file    = "mir" "1" model block { block }                      first block: prologue, last: epilogue
//   model   = "model" STRING "{" { KEY "=" (STRING | INT | "[" INTS "]") } "}"
//   block   = ("prologue" | "epilogue" | "block" NAME "layers" "=" RANGE { "," RANGE })
//             "{" { input | weight | node | output } "}"
//   input   = "input" NAME ":" type
//   weight  = "weight" NAME ":" FORMAT "[" INTS "]" [ MARK ]       FORMAT: f32, bf16, ..., w8a8 or w4a8_g128
//   node    = NAME { "," NAME } "=" OP [ arg { "," arg } ] [ "{" { FIELD "=" WORD } "}" ]
//             ":" type { "," type }
//   arg     = VALUE | ROLE "=" (WEIGHT | "[" WEIGHT { "," WEIGHT } "]")
//   output  = "output" NAME { "," NAME }
//   type    = ELEM "[" ("T" | "P" | "L") "," INT "]" | "state"     token, pair or logit rows

namespace mi::ir {
namespace {

constexpr size_t kMaxText = size_t(16) << 20;
constexpr size_t kMaxPerBlock = 65536;  // values, weights and nodes, each
constexpr int64_t kMaxLayersOfAllBlocks = 100000;  // of all blocks together
constexpr ValueType kStateValue{Rows::kToken, 0, Elem::kState};

std::string lower(std::string_view s) {
  std::string r(s);
  for (char& c : r)
    if (c >= 'A' && c <= 'Z') c = char(c - 'A' + 'a');
  return r;
}
std::string upper(std::string_view s) {
  std::string r(s);
  for (char& c : r)
    if (c >= 'a' && c <= 'z') c = char(c - 'a' + 'A');
  return r;
}

struct Token {
  enum Kind { kWord, kString, kPunct, kEnd } kind = kEnd;
  std::string_view text;  // of a string: what stands between the quotes
  size_t line = 1, column = 1;
  bool is(char c) const { return kind == kPunct && text[0] == c; }
};

class Lexer {
 public:
  explicit Lexer(std::string_view text) : s_(text) {}

  Result<std::vector<Token>> run() {
    std::vector<Token> out;
    for (;;) {
      skip_space();
      Token t;
      t.line = line_;
      t.column = at_ - line_start_ + 1;
      if (at_ == s_.size()) {
        out.push_back(t);
        return out;
      }
      const char c = s_[at_];
      const size_t begin = at_;
      if (word_char(c)) {
        while (at_ < s_.size() && word_char(s_[at_])) ++at_;
        t.kind = Token::kWord;
        t.text = s_.substr(begin, at_ - begin);
      } else if (c == '"') {
        for (++at_; at_ < s_.size() && s_[at_] != '"' && s_[at_] != '\n'; ++at_)
          if (s_[at_] == '\\' && at_ + 1 < s_.size() && s_[at_ + 1] != '\n') ++at_;
        if (at_ >= s_.size() || s_[at_] != '"')
          return bad_input("line {}, column {}: the string has no closing quote", t.line, t.column);
        t.kind = Token::kString;
        t.text = s_.substr(begin + 1, at_ - begin - 1);
        ++at_;
      } else if (std::string_view("{}[],:=").find(c) != std::string_view::npos) {
        t.kind = Token::kPunct;
        t.text = s_.substr(at_++, 1);
      } else {
        return bad_input("line {}, column {}: unexpected character 0x{:02x}", t.line, t.column,
                         unsigned(static_cast<unsigned char>(c)));
      }
      out.push_back(t);
    }
  }

 private:
  static bool word_char(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.' ||
           c == '-' || c == '+';
  }
  void skip_space() {
    for (; at_ < s_.size(); ++at_) {
      if (s_[at_] == '#') {
        while (at_ < s_.size() && s_[at_] != '\n') ++at_;
        if (at_ == s_.size()) return;
      }
      if (s_[at_] == '\n') {
        ++line_;
        line_start_ = at_ + 1;
      } else if (s_[at_] != ' ' && s_[at_] != '\t' && s_[at_] != '\r') {
        return;
      }
    }
  }

  std::string_view s_;
  size_t at_ = 0, line_ = 1, line_start_ = 0;
};

class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : t_(std::move(tokens)) {}

  Result<Graph> run() {
    Graph g;
    MI_TRY_VOID(word("mir"));
    if (now().text != "1") return expected("format version 1 (a newer metainfer wrote this?)");
    ++at_;
    MI_TRY_VOID(model(&g.info));
    MI_TRY_VOID(word("prologue"));
    MI_TRY_VOID(block(&g.prologue, "prologue"));
    while (now().kind == Token::kWord && now().text == "block") {
      ++at_;
      Block b;
      MI_TRY(std::string name, any_word("the block's name"));
      MI_TRY_VOID(layers(&b.layers));
      MI_TRY_VOID(block(&b, std::move(name)));
      g.blocks.push_back(std::move(b));
    }
    if (now().text != "epilogue") return expected("'block' or 'epilogue'");
    ++at_;
    MI_TRY_VOID(block(&g.epilogue, "epilogue"));
    if (now().kind != Token::kEnd) return expected("the end");
    return g;
  }

 private:
  const Token& now() const { return t_[at_]; }
  const Token& next() const { return t_[std::min(at_ + 1, t_.size() - 1)]; }

  template <typename... Args>
  Error bad_at(const Token& t, fmt::format_string<Args...> f, Args&&... args) const {
    return bad_input("line {}, column {}: {}", t.line, t.column, fmt::format(f, std::forward<Args>(args)...));
  }
  Error expected(std::string_view what) const {
    if (now().kind == Token::kEnd) return bad_at(now(), "expected {}, found the end", what);
    return bad_at(now(), "expected {}, found '{}'", what, now().text.substr(0, 60));
  }
  Status punct(char c) {
    if (!now().is(c)) return expected(fmt::format("'{}'", c));
    ++at_;
    return {};
  }
  Status word(std::string_view w) {
    if (now().kind != Token::kWord || now().text != w) return expected(fmt::format("'{}'", w));
    ++at_;
    return {};
  }
  Result<std::string> any_word(std::string_view what) {
    if (now().kind != Token::kWord) return expected(what);
    return std::string(t_[at_++].text);
  }
  Result<std::string> string(std::string_view what) {
    if (now().kind != Token::kString) return expected(what);
    const Token& t = t_[at_++];
    std::string r;
    for (size_t i = 0; i < t.text.size(); ++i) {
      if (t.text[i] != '\\') {
        r += t.text[i];
        continue;
      }
      const char c = ++i < t.text.size() ? t.text[i] : '\0';
      unsigned code = 0;
      if (c == '"' || c == '\\') {
        r += c;
      } else if (c == 'x' && i + 2 < t.text.size()) {
        const auto e = std::from_chars(t.text.data() + i + 1, t.text.data() + i + 3, code, 16);
        if (e.ec != std::errc() || e.ptr != t.text.data() + i + 3)
          return bad_at(t, "expected two hex digits after \\x");
        r += char(code);
        i += 2;
      } else {
        return bad_at(t, "unknown escape in a string; known are \\\", \\\\ and \\xHH");
      }
    }
    return r;
  }
  Result<int64_t> integer(std::string_view what) {
    int64_t v = 0;
    const std::string_view s = now().text;
    const auto e = std::from_chars(s.data(), s.data() + s.size(), v);
    if (now().kind != Token::kWord || e.ec != std::errc() || e.ptr != s.data() + s.size()) return expected(what);
    ++at_;
    return v;
  }
  Result<std::vector<int64_t>> integers(size_t most) {
    std::vector<int64_t> r;
    MI_TRY_VOID(punct('['));
    while (!now().is(']')) {
      if (!r.empty()) MI_TRY_VOID(punct(','));
      if (r.size() == most) return expected(fmt::format("']' after {} numbers", most));
      MI_TRY(const int64_t v, integer("a number"));
      r.push_back(v);
    }
    ++at_;
    return r;
  }

  Status model(ModelInfo* m) {
    MI_TRY_VOID(word("model"));
    MI_TRY(m->name, string("the model's name in quotes"));
    MI_TRY_VOID(punct('{'));
    const std::vector<std::string> known{"family",        "model_type", "vocab",  "hidden", "layers",
                                         "max_positions", "eos_ids",    "bos_id", "pad_id"};
    std::vector<std::string> seen;
    while (!now().is('}')) {
      const Token key_token = now();
      MI_TRY(const std::string key, any_word("a key of the model, or '}'"));
      if (std::find(seen.begin(), seen.end(), key) != seen.end()) return bad_at(key_token, "'{}' is there twice", key);
      seen.push_back(key);
      MI_TRY_VOID(punct('='));
      if (key == "family") {
        MI_TRY(m->family, string("a string"));
      } else if (key == "model_type") {
        MI_TRY(m->model_type, string("a string"));
      } else if (key == "vocab") {
        MI_TRY(m->vocab, integer("a number"));
      } else if (key == "hidden") {
        MI_TRY(m->hidden, integer("a number"));
      } else if (key == "layers") {
        MI_TRY(m->layers, integer("a number"));
      } else if (key == "max_positions") {
        MI_TRY(m->max_positions, integer("a number"));
      } else if (key == "eos_ids") {
        MI_TRY(m->eos_ids, integers(1024));
      } else if (key == "bos_id") {
        MI_TRY(m->bos_id, integer("a number"));
      } else if (key == "pad_id") {
        MI_TRY(m->pad_id, integer("a number"));
      } else
        return bad_at(key_token, "unknown key '{}'{}", key, did_you_mean(key, known));
    }
    ++at_;
    return {};
  }

  static std::string did_you_mean(std::string_view name, const std::vector<std::string>& known) {
    const std::string near = nearest_name(name, known);
    return near.empty() ? "" : fmt::format(" (did you mean '{}'?)", near);
  }

  // "layers = 0..2, 5"
  Status layers(std::vector<int32_t>* out) {
    MI_TRY_VOID(word("layers"));
    MI_TRY_VOID(punct('='));
    for (;;) {
      const std::string_view s = now().text;
      int64_t a = 0, b = 0;
      const size_t dots = s.find("..");
      const std::string_view first = s.substr(0, dots), last = dots == s.npos ? first : s.substr(dots + 2);
      auto number = [](std::string_view n, int64_t* v) {
        const auto e = std::from_chars(n.data(), n.data() + n.size(), *v);
        return e.ec == std::errc() && e.ptr == n.data() + n.size() && *v >= 0 && *v < kMaxLayersOfAllBlocks;
      };
      if (now().kind != Token::kWord || !number(first, &a) || !number(last, &b) || b < a)
        return expected("layers such as 3 or 0..2");
      layers_ += b - a + 1;
      if (layers_ > kMaxLayersOfAllBlocks) return bad_at(now(), "more than {} layers", kMaxLayersOfAllBlocks);
      for (int64_t l = a; l <= b; ++l) out->push_back(int32_t(l));
      ++at_;
      if (!now().is(',')) return {};
      ++at_;
    }
  }

  Result<ValueType> type() {
    const Token start = now();
    MI_TRY(const std::string elem, any_word("a type such as f32[T, 64]"));
    const auto e = elem_from_name(elem);
    if (!e) return bad_at(start, "unknown element type '{}'; known are f32, q8, i32, route, state", elem);
    if (*e == Elem::kState && !now().is('[')) return kStateValue;
    ValueType t;
    t.elem = *e;
    MI_TRY_VOID(punct('['));
    if (now().text == "T")
      t.rows = Rows::kToken;
    else if (now().text == "P")
      t.rows = Rows::kPair;
    else if (now().text == "L")
      t.rows = Rows::kLogit;
    else
      return expected("T, P or L, the kind of rows");
    ++at_;
    MI_TRY_VOID(punct(','));
    MI_TRY(t.cols, integer("the number of columns"));
    MI_TRY_VOID(punct(']'));
    return t;
  }

  Result<ValueId> define(std::string name, ValueType t, const Token& at) {
    if (b_->values.size() == kMaxPerBlock) return bad_at(at, "more than {} values in a block", kMaxPerBlock);
    if (!values_.try_emplace(name, ValueId(b_->values.size())).second)
      return bad_at(at, "value '{}' is defined twice", name);
    b_->values.push_back({std::move(name), t});
    return ValueId(b_->values.size()) - 1;
  }
  Result<ValueId> value() {
    const Token at = now();
    MI_TRY(const std::string name, any_word("a value's name"));
    const auto it = values_.find(name);
    if (it != values_.end()) return it->second;
    std::vector<std::string> known;
    for (const Value& v : b_->values) known.push_back(v.name);
    return bad_at(at, "value '{}' is not defined before here{}", name,
                  known.size() <= 1000 ? did_you_mean(name, known) : "");
  }
  Result<int32_t> weight() {
    const Token at = now();
    MI_TRY(const std::string name, any_word("a weight's name"));
    const auto it = weights_.find(name);
    if (it != weights_.end()) return it->second;
    std::vector<std::string> known;
    for (const WeightDecl& d : b_->weights) known.push_back(d.name);
    return bad_at(at, "weight '{}' is not declared before here{}", name,
                  known.size() <= 1000 ? did_you_mean(name, known) : "");
  }

  Status block(Block* b, std::string name) {
    b_ = b;
    b->name = std::move(name);
    values_.clear();
    weights_.clear();
    MI_TRY_VOID(punct('{'));
    while (!now().is('}')) {
      if (now().kind != Token::kWord) return expected("a statement or '}'");
      // A word before '=' or ',' is a result's name, whatever it is.
      const bool keyword = !next().is('=') && !next().is(',');
      if (keyword && now().text == "input")
        MI_TRY_VOID(input());
      else if (keyword && now().text == "weight")
        MI_TRY_VOID(weight_decl());
      else if (keyword && now().text == "output")
        MI_TRY_VOID(outputs());
      else
        MI_TRY_VOID(node());
    }
    ++at_;
    return {};
  }

  Status input() {
    ++at_;
    const Token at = now();
    MI_TRY(std::string name, any_word("the input's name"));
    MI_TRY_VOID(punct(':'));
    MI_TRY(const ValueType t, type());
    if (!b_->nodes.empty()) return bad_at(at, "inputs come before the first node");
    MI_TRY(const ValueId v, define(std::move(name), t, at));
    b_->inputs.push_back(v);
    return {};
  }

  Status outputs() {
    ++at_;
    for (;;) {
      MI_TRY(const ValueId v, value());
      b_->outputs.push_back(v);
      if (!now().is(',')) return {};
      ++at_;
    }
  }

  Status weight_decl() {
    ++at_;
    const Token at = now();
    WeightDecl d;
    MI_TRY(d.name, any_word("the weight's name"));
    MI_TRY_VOID(punct(':'));
    const Token format_token = now();
    MI_TRY(const std::string format, any_word("a format such as bf16 or w8a8"));
    if (format == "w8a8") {
      d.format = WeightFormat::kW8A8;
      d.dtype = DType::kI8;
    } else if (format == "w4a8_g32" || format == "w4a8_g64" || format == "w4a8_g128") {
      d.format = WeightFormat::kW4A8;
      d.dtype = DType::kU8;
      d.group = format.ends_with("32") ? 32 : format.ends_with("64") ? 64 : 128;
    } else {
      const auto t = format == lower(format) ? dtype_from_name(upper(format)) : std::nullopt;
      if (!t) return bad_at(format_token, "unknown weight format '{}'; known are f32, bf16, f16, w8a8, w4a8_g32, w4a8_g64, w4a8_g128",
                      format);
      d.dtype = *t;
    }
    MI_TRY(d.shape, integers(8));
    // A mark stands alone; a word before ':', '=' or ',' or after a keyword begins the next statement.
    if (now().kind == Token::kWord && !next().is('=') && !next().is(',')) {
      if (const auto m = mark_from_name(now().text); m && *m != Mark::kNone) {
        d.mark = *m;
        ++at_;
      } else if (now().text != "input" && now().text != "weight" && now().text != "output") {
        return expected("a mark (attention, expert, ...) or a statement");
      }
    }
    if (b_->weights.size() == kMaxPerBlock) return bad_at(at, "more than {} weights in a block", kMaxPerBlock);
    if (!weights_.try_emplace(d.name, int32_t(b_->weights.size())).second)
      return bad_at(at, "weight '{}' is declared twice", d.name);
    b_->weights.push_back(std::move(d));
    return {};
  }

  Status node() {
    Node n;
    std::vector<Token> names;
    for (;;) {
      names.push_back(now());
      if (now().kind != Token::kWord) return expected("a result's name");
      ++at_;
      if (names.size() > 16) return bad_at(names[0], "more than 16 results");
      if (!now().is(',')) break;
      ++at_;
    }
    MI_TRY_VOID(punct('='));
    const Token op_token = now();
    MI_TRY(const std::string op, any_word("an op's name"));
    const auto known_op = op_from_name(op);
    if (!known_op) return bad_at(op_token, "unknown op '{}'{}", op, did_you_mean(op, op_names()));
    n.op = *known_op;
    for (bool first = true; !now().is('{') && !now().is(':'); first = false) {
      if (!first) MI_TRY_VOID(punct(','));
      MI_TRY_VOID(next().is('=') ? weight_arg(&n) : value_arg(&n));
    }
    MI_TRY(n.params, params(n.op));
    MI_TRY_VOID(punct(':'));
    for (size_t i = 0; i < names.size(); ++i) {
      if (i > 0) MI_TRY_VOID(punct(','));
      MI_TRY(const ValueType t, type());
      MI_TRY(const ValueId v, define(std::string(names[i].text), t, names[i]));
      n.out.push_back(v);
    }
    if (b_->nodes.size() == kMaxPerBlock) return bad_at(names[0], "more than {} nodes in a block", kMaxPerBlock);
    b_->nodes.push_back(std::move(n));
    return {};
  }

  static std::vector<std::string> op_names() {
    std::vector<std::string> r;
    for (size_t i = 0; i < std::variant_size_v<OpParams>; ++i) r.emplace_back(op_name(Op(i)));
    return r;
  }

  Status value_arg(Node* n) {
    if (!n->weights.empty()) return expected("a role such as weight=..., values come first");
    if (n->in.size() == 16) return expected("at most 16 inputs");
    MI_TRY(const ValueId v, value());
    n->in.push_back(v);
    return {};
  }
  Status weight_arg(Node* n) {
    const Token at = now();
    const auto role = role_from_name(now().text);
    if (!role) return bad_at(at, "unknown weight role '{}'", at.text.substr(0, 60));
    at_ += 2;
    WeightUse u{*role, {}};
    if (!now().is('[')) {
      MI_TRY(const int32_t w, weight());
      u.weights.push_back(w);
    } else {
      ++at_;
      while (!now().is(']')) {
        if (!u.weights.empty()) MI_TRY_VOID(punct(','));
        MI_TRY(const int32_t w, weight());
        u.weights.push_back(w);
      }
      ++at_;
    }
    if (n->weights.size() == 16) return bad_at(at, "more than 16 roles");
    n->weights.push_back(std::move(u));
    return {};
  }
  Result<OpParams> params(Op op) {
    std::vector<std::pair<std::string, std::string>> fields;
    const Token at = now();
    if (now().is('{')) {
      ++at_;
      while (!now().is('}')) {
        MI_TRY(std::string key, any_word("a field's name or '}'"));
        MI_TRY_VOID(punct('='));
        MI_TRY(std::string text, any_word("a field's value"));
        if (fields.size() == 64) return bad_at(at, "more than 64 fields");
        fields.emplace_back(std::move(key), std::move(text));
      }
      ++at_;
    }
    return params_from_text(op, fields, fmt::format("line {}, column {}", at.line, at.column));
  }

  std::vector<Token> t_;
  size_t at_ = 0;
  int64_t layers_ = 0;
  Block* b_ = nullptr;
  std::unordered_map<std::string, ValueId> values_;
  std::unordered_map<std::string, int32_t> weights_;
};

}  // namespace

Result<Graph> parse(std::string_view text) {
  if (text.size() > kMaxText) return bad_input("the text has {} bytes, more than {}", text.size(), kMaxText);
  MI_TRY(std::vector<Token> tokens, Lexer(text).run());
  return Parser(std::move(tokens)).run();
}

}  // namespace mi::ir
