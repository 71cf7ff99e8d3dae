#include "model/yaml.h"

#include <yaml-cpp/depthguard.h>

#include "model/yaml_node.h"

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
  // yaml-cpp takes 010 for 8.
  if (const size_t digit = s.find_first_not_of("+-"); digit != s.npos && digit + 1 < s.size() && s[digit] == '0' && s[digit + 1] >= '0' && s[digit + 1] <= '9')
    return s;
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
  MI_TRY(const YAML::Node root, load_yaml(text, what));
  try {
    return Converter(what).convert(root, 0);
  } catch (const YAML::Exception& e) {
    return yaml_error(what, e);
  }
}

Result<YAML::Node> load_yaml(std::string_view text, const std::string& what) {
  try {
    const std::vector<YAML::Node> documents = YAML::LoadAll(std::string(text));
    if (documents.size() > 1) return bad_input("{}: holds {} YAML documents, parted by ---; one is read: remove the others", what, documents.size());
    return documents.empty() ? YAML::Node() : documents[0];
  } catch (const YAML::Exception& e) {
    return yaml_error(what, e);
  }
}

Error yaml_error(const std::string& what, const YAML::Exception& e) {
  if (dynamic_cast<const YAML::DeepRecursion*>(&e)) return bad_input("{}: not valid YAML: nested too deep", what);
  if (e.mark.is_null()) return bad_input("{}: not valid YAML: {}", what, e.msg);
  return bad_input("{}: not valid YAML: line {}, column {}: {}", what, e.mark.line + 1, e.mark.column + 1, e.msg);
}

}  // namespace mi::model
