#include "model/pattern.h"

#include <algorithm>
#include <optional>

namespace mi::model {
namespace {

struct Answer {
  bool given = false;  // by the file
  std::string keys;    // spelled, for messages
  std::vector<bool> in;
};

class Rule {
 public:
  Rule(const Json& j, int64_t layers, Config& c, const std::string& what)
      : j_(j), layers_(layers), c_(c), what_(what) {}

  // nullopt: the rule cannot answer (its value is absent or of another form).
  Result<std::optional<Answer>> run() {
    if (j_.is_string()) {
      const std::string s = j_.get<std::string>();
      if (s != "all" && s != "none") return bad_input("{}: '{}' is neither all nor none", what_, s);
      return std::optional(Answer{false, "", std::vector<bool>(size_t(layers_), s == "all")});
    }
    if (j_.contains("names")) return names();
    if (j_.contains("flags")) return flags();
    return arithmetic();
  }

 private:
  Result<Json> read(const char* field, Answer* a) {
    MI_TRY(const std::string key, json_get<std::string>(j_, field, what_));
    MI_TRY(const Json v, c_.value(key));
    MI_TRY(const bool given, c_.is_given(key));
    if (given) {
      const std::string spelled = c_.spelled(key).substr(c_.path().size() + 2);
      a->keys += (a->keys.empty() ? "" : ", ") + spelled;
    }
    a->given = a->given || given;
    return v;
  }
  Status check_length(const Json& v, const Answer& a) {
    if (int64_t(v.size()) == layers_) return {};
    return bad_input("{}: {} has {} entries for {} layers", c_.path(), a.keys, v.size(), layers_);
  }

  Result<std::optional<Answer>> names() {
    MI_TRY_VOID(refuse_unknown_keys(j_, {"names", "yes", "no"}, what_));
    MI_TRY(const auto yes, json_get_or<std::vector<std::string>>(j_, "yes", {}, what_));
    MI_TRY(const auto no, json_get_or<std::vector<std::string>>(j_, "no", {}, what_));
    Answer a;
    MI_TRY(const Json v, read("names", &a));
    if (!v.is_array()) return std::optional<Answer>();
    MI_TRY_VOID(check_length(v, a));
    for (const Json& e : v) {
      if (!e.is_string()) return bad_input("{}: {}: expected a list of names", c_.path(), a.keys);
      const std::string name = e.get<std::string>();
      const bool is_yes = std::find(yes.begin(), yes.end(), name) != yes.end();
      if (!is_yes && std::find(no.begin(), no.end(), name) == no.end())
        return bad_input("{}: {}: the layer kind '{}' is not known for this model (known: {}, {})", c_.path(), a.keys,
                         name, fmt::join(yes, ", "), fmt::join(no, ", "));
      a.in.push_back(is_yes);
    }
    return std::optional(std::move(a));
  }

  Result<std::optional<Answer>> flags() {
    MI_TRY_VOID(refuse_unknown_keys(j_, {"flags"}, what_));
    Answer a;
    MI_TRY(const Json v, read("flags", &a));
    if (!v.is_array()) return std::optional<Answer>();
    MI_TRY_VOID(check_length(v, a));
    for (const Json& e : v) {
      const bool zero_or_one = e.is_number_integer() && (e == 0 || e == 1);
      if (!e.is_boolean() && !zero_or_one) return bad_input("{}: {}: expected a list of 0 and 1", c_.path(), a.keys);
      a.in.push_back(e.is_boolean() ? e.get<bool>() : e == 1);
    }
    return std::optional(std::move(a));
  }

  Result<std::optional<Answer>> arithmetic() {
    MI_TRY_VOID(refuse_unknown_keys(j_, {"from", "until", "last", "every", "offset", "except"}, what_));
    Answer a;
    bool answers = true;
    const auto number = [&](const char* field, int64_t fallback) -> Result<int64_t> {
      if (!j_.contains(field)) return fallback;
      if (j_[field].is_number_integer()) return j_[field].get<int64_t>();
      MI_TRY(const Json v, read(field, &a));
      if (v.is_number_integer()) return v.get<int64_t>();
      if (!v.is_null() && !v.is_array()) return bad_input("{}: {}: expected an integer", c_.path(), a.keys);
      answers = false;  // absent, or a list, which a flags rule reads
      return fallback;
    };
    MI_TRY(const int64_t from, number("from", 0));
    MI_TRY(const int64_t until, number("until", layers_));
    MI_TRY(const int64_t last, number("last", -1));
    MI_TRY(const int64_t every, number("every", 1));
    MI_TRY(const int64_t offset, number("offset", 0));
    if (every < 1 || offset < 0) return bad_input("{}: {}: the layer interval has to be at least 1", c_.path(), a.keys);
    std::vector<int64_t> except;
    if (j_.contains("except")) {
      MI_TRY(const Json v, read("except", &a));
      for (const Json& e : v) {
        if (!e.is_number_integer()) return bad_input("{}: {}: expected a list of layer numbers", c_.path(), a.keys);
        except.push_back(e.get<int64_t>());
      }
    }
    if (!answers) return std::optional<Answer>();
    for (int64_t i = 0; i < layers_; ++i)
      a.in.push_back(i >= from && i < until && (last < 0 || i <= last) && (i + offset) % every == 0 &&
                     std::find(except.begin(), except.end(), i) == except.end());
    return std::optional(std::move(a));
  }

  const Json& j_;
  int64_t layers_;
  Config& c_;
  const std::string& what_;
};

}  // namespace

Result<std::vector<bool>> resolve_layers(const Json& rules, int64_t layers, Config& c, const std::string& what) {
  const Json list = rules.is_array() ? rules : Json::array({rules});
  std::optional<Answer> given, fallback;
  for (const Json& r : list) {
    MI_TRY(std::optional<Answer> a, Rule(r, layers, c, what).run());
    if (!a) continue;
    if (!a->given) {
      if (!fallback) fallback = std::move(a);
      continue;
    }
    if (given)
      for (int64_t i = 0; i < layers; ++i)
        if (given->in[size_t(i)] != a->in[size_t(i)])
          return bad_input("{}: {} and {} say different things about layer {}: correct the file", c.path(), given->keys,
                           a->keys, i);
    if (!given) given = std::move(a);
  }
  if (given) return given->in;
  if (fallback) return fallback->in;
  return bad_input("{}: nothing says which layers are meant by {}", c.path(), what);
}

}  // namespace mi::model
