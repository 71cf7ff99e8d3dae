#include "model/config.h"

#include <cctype>

namespace mi::model {
namespace {

constexpr int64_t kMaxValue = int64_t(1) << 31;  // of one key
constexpr int64_t kMaxInt = int64_t(1) << 40;    // of an expression

// The value at "a.b.c", or nullptr when absent or null.
const Json* at_path(const Json& j, const std::string& path) {
  const Json* at = &j;
  size_t begin = 0;
  while (begin <= path.size()) {
    const size_t dot = std::min(path.find('.', begin), path.size());
    if (!at->is_object()) return nullptr;
    const auto it = at->find(path.substr(begin, dot - begin));
    if (it == at->end()) return nullptr;
    at = &*it;
    begin = dot + 1;
  }
  return at->is_null() ? nullptr : at;
}

std::string short_text(const Json& j) {
  std::string s = dump_json(j);
  return s.size() > 60 ? s.substr(0, 57) + "..." : s;
}

template <typename T>
Status check(const Json& v, const std::string& what) {
  Json holder = Json::object();
  holder["v"] = v;
  auto r = json_get<T>(holder, "v", "");
  if (r.ok()) return {};
  const std::string& m = r.error().message();  // ": v: expected an integer, found a string"
  return bad_input("{}: {}", what, m.substr(m.find("expected")));
}

Status check_type(const Json& v, const KeySpec& spec, const std::string& what) {
  switch (spec.type) {
    case KeyType::kInt: {
      MI_TRY_VOID(check<int64_t>(v, what));
      const int64_t i = v.get<int64_t>();
      if (i < spec.min) return bad_input("{} is {}, expected an integer of at least {}", what, i, spec.min);
      if (i > kMaxValue) return bad_input("{} is {}, more than the limit of {}", what, i, kMaxValue);
      return {};
    }
    case KeyType::kFloat:
      return check<double>(v, what);
    case KeyType::kBool:
      return check<bool>(v, what);
    case KeyType::kString:
      return check<std::string>(v, what);
    case KeyType::kInts:
      return check<std::vector<int64_t>>(v, what);
    case KeyType::kStrings:
      return check<std::vector<std::string>>(v, what);
    case KeyType::kAny:
      return {};
  }
  return {};
}

// Recursive descent over  sum := product {(+|-) product},  product := atom {(*|/) atom},  atom := name | number | ( sum
// ).
class Expression {
 public:
  Expression(const std::string& text, Config* config) : s_(text), config_(config) {}

  Result<int64_t> run() {
    MI_TRY(const int64_t v, sum(0));
    if (peek() != 0) return bad();
    return v;
  }

 private:
  Error bad() const { return bad_input("'{}' is no expression of names, numbers and + - * /", s_); }
  char peek() {
    while (at_ < s_.size() && s_[at_] == ' ') ++at_;
    return at_ < s_.size() ? s_[at_] : 0;
  }
  Result<int64_t> sum(int depth) {
    MI_TRY(int64_t v, product(depth));
    while (peek() == '+' || peek() == '-') {
      const char op = s_[at_++];
      MI_TRY(const int64_t w, product(depth));
      v = op == '+' ? v + w : v - w;
    }
    return v;
  }
  Result<int64_t> product(int depth) {
    MI_TRY(int64_t v, atom(depth));
    while (peek() == '*' || peek() == '/') {
      const char op = s_[at_++];
      MI_TRY(const int64_t w, atom(depth));
      if (op == '/') {
        if (w == 0 || v % w != 0) return bad_input("{}: {} does not divide by {} (in '{}')", config_->path(), v, w, s_);
        v /= w;
      } else if (__builtin_mul_overflow(v, w, &v) || v > kMaxInt || v < -kMaxInt) {
        return bad_input("{}: '{}' is too large", config_->path(), s_);
      }
    }
    return v;
  }
  Result<int64_t> atom(int depth) {
    const char c = peek();
    if (c == '(' && depth < 16) {
      ++at_;
      MI_TRY(const int64_t v, sum(depth + 1));
      if (peek() != ')') return bad();
      ++at_;
      return v;
    }
    if (std::isdigit(static_cast<unsigned char>(c))) {
      int64_t v = 0;
      while (at_ < s_.size() && std::isdigit(static_cast<unsigned char>(s_[at_])) && v < kMaxInt)
        v = v * 10 + (s_[at_++] - '0');
      return v;
    }
    const size_t begin = at_;
    while (at_ < s_.size() && (std::isalnum(static_cast<unsigned char>(s_[at_])) || s_[at_] == '_')) ++at_;
    if (at_ == begin) return bad();
    const std::string name = s_.substr(begin, at_ - begin);
    MI_TRY(const Json v, config_->value(name));
    if (!v.is_number_integer())
      return bad_input("{}: '{}' in '{}' is not given as an integer", config_->path(), name, s_);
    return v.get<int64_t>();
  }

  const std::string& s_;
  Config* config_;
  size_t at_ = 0;
};

}  // namespace

Result<Config> Config::create(Json root, const std::string& path, KeySpecs specs,
                              const std::vector<std::string>& text_keys) {
  Config c;
  if (!root.is_object()) return bad_input("{}: expected an object", path);
  for (const std::string& k : text_keys)
    if (root.contains(k)) {
      if (!root[k].is_object()) return bad_input("{}: {}: expected an object", path, k);
      c.text_key_ = k;
      break;
    }
  c.root_ = std::move(root);
  c.path_ = path;
  c.specs_ = std::move(specs);
  return c;
}

Result<Json> Config::raw(const std::string& path, std::string* source, bool nested_wins) {
  read_.insert(path.substr(0, path.find('.')));
  const Json* top = at_path(root_, path);
  const Json* nested = text_key_.empty() ? nullptr : at_path(text(), path);
  if (top && nested && !nested_wins && *top != *nested)
    return bad_input("{}: {} is {} and {}.{} is {}: one of them is wrong, correct the file", path_, path,
                     short_text(*top), text_key_, path, short_text(*nested));
  const Json* v = nested ? nested : top;
  if (source) *source = !v ? "" : nested ? text_key_ + "." + path : path;
  return v ? *v : Json();
}

Result<Config::Found> Config::find(const std::string& name, const KeySpec& spec) {
  Found found;
  for (const std::string& key : spec.keys) {
    std::string source;
    MI_TRY(Json v, raw(key, &source, spec.nested_wins));
    if (source.empty()) continue;
    MI_TRY_VOID(check_type(v, spec, path_ + ": " + source));
    if (!found.source.empty() && found.value != v)
      return bad_input("{}: {} is {} and {} is {}, but both mean the same ({}): correct the file", path_, found.source,
                       short_text(found.value), source, short_text(v), name);
    if (found.source.empty()) found = {std::move(v), source};
  }
  return found;
}

std::string Config::spelled(const std::string& name) const {
  const auto it = source_.find(name);
  return it == source_.end() ? path_ + ": " + name : path_ + ": " + it->second;
}

Result<bool> Config::is_given(const std::string& name) {
  const auto it = specs_.find(name);
  MI_CHECK(it != specs_.end(), "{}", name);
  MI_TRY(const Found f, find(name, it->second));
  return !f.source.empty();
}

Result<Json> Config::value(const std::string& name) {
  if (const auto c = cache_.find(name); c != cache_.end()) return c->second;
  const auto it = specs_.find(name);
  if (it == specs_.end()) {
    std::vector<std::string> known;
    for (const auto& [n, s] : specs_) known.push_back(n);
    const std::string near = nearest_name(name, known);
    return bad_input("the recipe refers to '{}', which its config section does not declare{}", name,
                     near.empty() ? "" : fmt::format(" (did you mean '{}'?)", near));
  }
  const KeySpec& spec = it->second;
  if (!resolving_.insert(name).second) return bad_input("the recipe's default of '{}' refers to itself", name);
  auto found = find(name, spec);
  if (!found.ok()) return found.error();
  if (found->source.empty()) {
    if (!spec.has_default) {
      const std::vector<std::string> present = keys();
      const std::string first = spec.keys.empty() ? name : spec.keys.front();
      const std::string near = nearest_name(first, present);
      return bad_input("{}: {} is missing{}", path_, first,
                       near.empty() ? "" : fmt::format(" (did you mean '{}'?)", near));
    }
    found->value = spec.fallback;
    found->source = "default";
    if (spec.type == KeyType::kInt && spec.fallback.is_string()) {
      const std::string expression = spec.fallback.get<std::string>();
      MI_TRY(const int64_t v, eval(expression));
      found->value = v;
      found->source = "default: " + expression;
      if (v < spec.min)
        return bad_input("{}: {} would be {} by its default '{}', expected at least {}", path_, name, v, expression,
                         spec.min);
    }
  } else {
    source_[name] = found->source;
  }
  resolving_.erase(name);
  resolved_.push_back({name, short_text(found->value), found->source});
  cache_[name] = found->value;
  return found->value;
}

Result<int64_t> Config::eval(const std::string& expression) { return Expression(expression, this).run(); }

std::vector<std::string> Config::keys() const {
  std::vector<std::string> keys;
  for (const auto& [k, v] : text().items()) keys.push_back(k);
  return keys;
}

std::vector<std::string> Config::unread_keys() const {
  std::vector<std::string> keys;
  for (const auto& [k, v] : text().items())
    if (!read_.count(k) && !v.is_null()) keys.push_back(k);
  return keys;
}

}  // namespace mi::model
