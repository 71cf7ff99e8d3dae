#include "model/yaml.h"

#include <yaml-cpp/yaml.h>

namespace mi::model {
namespace {

constexpr int kMaxDepth = 32;
constexpr int64_t kMaxValues = 1'000'000;

Json scalar(const YAML::Node& n) {
  if (n.Tag() == "!") return n.Scalar();  // quoted
  bool b = false;
  int64_t i = 0;
  double d = 0;
  const std::string& s = n.Scalar();
  if (s == "true" || s == "false") {
    YAML::convert<bool>::decode(n, b);
    return b;
  }
  if (YAML::convert<int64_t>::decode(n, i)) return i;
  if (YAML::convert<double>::decode(n, d)) return d;
  return s;
}

class Converter {
 public:
  explicit Converter(const std::string& what) : what_(what) {}

  Result<Json> convert(const YAML::Node& n, int depth) {
    if (depth > kMaxDepth) return bad_input("{}: nested more than {} deep", what_, kMaxDepth);
    if (++values_ > kMaxValues) return bad_input("{}: more than {} values", what_, kMaxValues);
    if (!n || n.IsNull()) return Json();
    if (n.IsScalar()) return scalar(n);
    if (n.IsSequence()) {
      Json list = Json::array();
      for (const YAML::Node& e : n) {
        MI_TRY(Json v, convert(e, depth + 1));
        list.push_back(std::move(v));
      }
      return list;
    }
    Json map = Json::object();
    for (const auto& e : n) {
      if (!e.first.IsScalar()) return bad_input("{}: line {}: a key has to be a word", what_, e.first.Mark().line + 1);
      const std::string key = e.first.Scalar();
      if (map.contains(key))
        return bad_input("{}: line {}: the key '{}' occurs twice", what_, e.first.Mark().line + 1, key);
      MI_TRY(map[key], convert(e.second, depth + 1));
    }
    return map;
  }

 private:
  const std::string& what_;
  int64_t values_ = 0;
};

}  // namespace

Result<Json> parse_yaml(std::string_view text, const std::string& what) {
  try {
    return Converter(what).convert(YAML::Load(std::string(text)), 0);
  } catch (const YAML::Exception& e) {
    return bad_input("{}: not valid YAML: {}", what, e.what());
  }
}

}  // namespace mi::model
