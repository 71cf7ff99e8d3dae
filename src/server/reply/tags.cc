// Calls whose arguments are spelled as tagged values. The JSON of the arguments is made here: strings go out as they
// come, other values when they are whole.
#include <algorithm>

#include "base/utf8.h"
#include "server/reply/scan.h"

namespace mi::server {
namespace {

constexpr int kDeepest = 32;

// The JSON types that a schema allows, as far as it says so plainly; empty: unknown.
std::vector<std::string> types_of(const Json& schema) {
  std::vector<std::string> types;
  if (!schema.is_object()) return types;
  if (schema.contains("type")) {
    const Json& t = schema["type"];
    if (t.is_string()) types.push_back(t.get<std::string>());
    if (t.is_array())
      for (const Json& e : t)
        if (e.is_string()) types.push_back(e.get<std::string>());
    return types;
  }
  if (schema.contains("enum") && schema["enum"].is_array() && !schema["enum"].empty() &&
      std::all_of(schema["enum"].begin(), schema["enum"].end(), [](const Json& e) { return e.is_string(); }))
    return {"string"};
  for (const char* key : {"anyOf", "oneOf"})
    if (schema.contains(key) && schema[key].is_array())
      for (const Json& e : schema[key]) {
        const auto more = types_of(e);
        if (more.empty()) return {};
        types.insert(types.end(), more.begin(), more.end());
      }
  return types;
}
Json member_schema(const Json& schema, const std::string& key) {
  if (schema.is_object() && schema.contains("properties") && schema["properties"].is_object() &&
      schema["properties"].contains(key))
    return schema["properties"][key];
  return nullptr;
}
bool allows(const std::vector<std::string>& types, const char* type) {
  return types.empty() || std::find(types.begin(), types.end(), type) != types.end();
}

const char* json_type(const Json& j) {
  if (j.is_null()) return "null";
  if (j.is_boolean()) return "boolean";
  if (j.is_number_integer()) return "integer";
  if (j.is_number()) return "number";
  if (j.is_array()) return "array";
  return j.is_object() ? "object" : "string";
}

Json value_of(const std::string& text, const Json& schema, const std::string& nested, int depth);

// "]<]minimax[>[<a>1]<]minimax[>[</a>..." as an object, or as a list if all tags are <item>.
std::optional<Json> nested_value(std::string_view text, const Json& schema, const std::string& nested, int depth) {
  Json object = Json::object(), list = Json::array();
  bool items = true, any = false;
  while (true) {
    const size_t open = text.find(nested + "<");
    if (open == std::string_view::npos) break;
    if (!all_blank(text.substr(0, open))) return std::nullopt;
    text.remove_prefix(open + nested.size() + 1);
    const size_t name_end = text.find('>');
    if (name_end == std::string_view::npos) return std::nullopt;
    const std::string name(text.substr(0, name_end));
    text.remove_prefix(name_end + 1);
    const std::string begin = nested + "<" + name + ">", end = nested + "</" + name + ">";
    size_t at = 0;
    for (int level = 1; level > 0;) {
      const auto found = first_mark(text.substr(at), {end, begin});
      if (!found) return std::nullopt;
      level += found->which == 0 ? -1 : 1;
      at += found->at + (found->which == 0 ? end.size() : begin.size());
    }
    const bool item = name == "item";
    items = items && item;
    any = true;
    Json value =
        value_of(std::string(text.substr(0, at - end.size())),
                 item && schema.is_object() && schema.contains("items") ? schema["items"] : member_schema(schema, name),
                 nested, depth + 1);
    list.push_back(value);
    object[name] = std::move(value);
    text.remove_prefix(at);
  }
  if (!any || !all_blank(text)) return std::nullopt;
  return items ? list : object;
}

Json value_of(const std::string& text, const Json& schema, const std::string& nested, int depth) {
  const auto types = types_of(schema);
  if (!nested.empty() && depth < kDeepest && text.find(nested + "<") != std::string::npos)
    if (auto value = nested_value(text, schema, nested, depth)) return std::move(*value);
  if (types == std::vector<std::string>{"string"}) return text;
  const std::string bare = trimmed(text);
  JsonLimits limits;
  limits.max_depth = kDeepest;
  limits.refuse_duplicate_keys = false;
  if (auto parsed = parse_json(bare, "value", limits); parsed.ok()) {
    const std::string type = json_type(*parsed);
    if (allows(types, type.c_str()) || (type == "integer" && allows(types, "number"))) return std::move(parsed).value();
    if (!allows(types, "string")) return std::move(parsed).value();  // wrong, but the model's word
    return text;
  }
  if (allows(types, "boolean") && (bare == "True" || bare == "False")) return bare == "True";
  if (allows(types, "null") && bare == "None") return nullptr;
  return text;
}

// Bytes at the end of s that may be the beginning of a character.
size_t cut_character(std::string_view s) {
  for (size_t n = 1; n <= std::min<size_t>(3, s.size()); ++n) {
    const unsigned char c = static_cast<unsigned char>(s[s.size() - n]);
    if ((c & 0xc0) == 0x80) continue;
    const size_t need = c >= 0xf0 ? 4 : c >= 0xe0 ? 3 : c >= 0xc0 ? 2 : 1;
    return need > n ? n : 0;
  }
  return 0;
}

class Tags : public StepSplitter {
 public:
  Tags(const TagMarks& m, const std::vector<Tool>& tools) : marks_(m), tools_(tools), outside_(call_and_sections(m.call, m.section)) {}

  std::vector<ToolPiece> finish() override {
    std::vector<ToolPiece> out;
    if (at_ == At::kName)
      outside_.content(marks_.call + pending_, &out);
    else if (at_ == At::kOutside)
      outside_.content(pending_, &out);
    else if (at_ == At::kValue && string_)
      string_part(pending_, &out);
    pending_.clear();
    return out;
  }

 private:
  enum class At : uint8_t { kOutside, kName, kBetween, kKey, kValueBegin, kValue };

  bool step(std::vector<ToolPiece>* out) override {
    switch (at_) {
      case At::kOutside: {
        const auto mark = outside_.take(&pending_, out);
        if (!mark) return false;
        if (*mark == 0) at_ = At::kName;
        return true;
      }
      case At::kName: {
        // Blanks before the name, then the name up to whatever ends it.
        const size_t first = pending_.find_first_not_of(" \t\r\n");
        if (first == std::string::npos) return false;
        const std::vector<std::string> ends = {marks_.name_end, marks_.param, marks_.call_end};
        const auto found = first_mark(std::string_view(pending_).substr(first), ends);
        if (!found) return false;
        const std::string name = trimmed(std::string_view(pending_).substr(first, found->at));
        if (name.empty()) {
          const size_t n = first + found->at + ends[found->which].size();
          outside_.content(marks_.call + pending_.substr(0, n), out);
          pending_.erase(0, n);
          at_ = At::kOutside;
          return true;
        }
        out->push_back({ToolPiece::kCallBegin, name});
        pending_.erase(0, first + found->at + (found->which == 0 ? marks_.name_end.size() : 0));
        schema_ = nullptr;
        for (const Tool& t : tools_)
          if (t.name == name) schema_ = t.parameters;
        keys_.clear();
        at_ = At::kBetween;
        return true;
      }
      case At::kBetween: {
        // The mark of a parameter may be a beginning of the mark of the end (]<]minimax[>[< and
        // ]<]minimax[>[</invoke>).
        const std::vector<std::string> ends = {marks_.call_end, marks_.param};
        const size_t at = pending_.find(marks_.param);
        const size_t end = pending_.find(marks_.call_end);
        if (at == std::string::npos && end == std::string::npos) {
          pending_.erase(0, pending_.size() - held_by_any(pending_, ends));
          return false;
        }
        if (at < end) {
          const std::string_view rest = std::string_view(pending_).substr(at);
          if (rest.size() < marks_.call_end.size() && marks_.call_end.compare(0, rest.size(), rest) == 0) return false;
          pending_.erase(0, at + marks_.param.size());
          at_ = At::kKey;
          return true;
        }
        pending_.erase(0, end + marks_.call_end.size());
        add_piece(out, ToolPiece::kArguments, keys_.empty() ? "{}" : "}");
        at_ = At::kOutside;
        return true;
      }
      case At::kKey: {
        const size_t end = pending_.find(marks_.key_end);
        if (end == std::string::npos) return false;
        std::string key = pending_.substr(0, end);
        pending_.erase(0, end + marks_.key_end.size());
        // `NAME" string="true"`: the mark of the key ends the tag, attributes and all.
        std::optional<bool> said;
        if (const size_t quote = key.find('"'); quote != std::string::npos && marks_.param.back() == '"') {
          const size_t attribute = key.find("string=\"", quote);
          if (attribute != std::string::npos) said = key.compare(attribute + 8, 4, "true") == 0;
          key.resize(quote);
        }
        key = trimmed(key);
        end_ = marks_.param_end;
        if (const size_t hole = end_.find("{}"); hole != std::string::npos) end_.replace(hole, 2, key);
        value_schema_ = member_schema(schema_, key);
        if (said) value_schema_ = *said ? Json{{"type", "string"}} : Json(nullptr);
        string_ = types_of(value_schema_) == std::vector<std::string>{"string"};
        // A key that comes twice would make the JSON ambiguous: the first one stays.
        skip_ = std::find(keys_.begin(), keys_.end(), key) != keys_.end();
        if (!skip_)
          add_piece(out, ToolPiece::kArguments,
                    (keys_.empty() ? "{\"" : ", \"") + json_text(key) + (string_ ? "\": \"" : "\": "));
        keys_.push_back(key);
        begun_ = false;
        name_ = key;
        at_ = marks_.value.empty() ? At::kValue : At::kValueBegin;
        return true;
      }
      case At::kValueBegin: {
        const size_t at = pending_.find(marks_.value);
        if (at == std::string::npos) return false;
        pending_.erase(0, at + marks_.value.size());
        at_ = At::kValue;
        return true;
      }
      case At::kValue: {
        const size_t end = value_end();
        if (string_) {
          size_t n = end;
          if (end == std::string::npos) {
            size_t keep = held_back(pending_, end_);
            // The line end before the mark is not part of the value.
            if (marks_.lines && keep < pending_.size() && pending_[pending_.size() - keep - 1] == '\n') ++keep;
            keep = std::max(keep, cut_character(pending_));
            n = pending_.size() - keep;
          }
          std::string text = pending_.substr(0, n);
          if (end != std::string::npos && marks_.lines && !text.empty() && text.back() == '\n' &&
              (begun_ || text.size() > 1))
            text.pop_back();
          string_part(std::move(text), out);
          pending_.erase(0, n);
          if (end == std::string::npos) return false;
          if (!skip_) add_piece(out, ToolPiece::kArguments, "\"");
        } else {
          if (end == std::string::npos) return false;
          std::string text = pending_.substr(0, end);
          if (marks_.lines && !text.empty() && text.front() == '\n') text.erase(0, 1);
          if (marks_.lines && !text.empty() && text.back() == '\n') text.pop_back();
          if (!skip_) add_piece(out, ToolPiece::kArguments, dump_json(value_of(text, value_schema_, marks_.nested, 0)));
          pending_.erase(0, end);
        }
        pending_.erase(0, end_.size());
        at_ = At::kBetween;
        return true;
      }
    }
    return false;
  }

  void string_part(std::string text, std::vector<ToolPiece>* out) {
    if (text.empty()) return;
    if (!begun_ && marks_.lines && text.front() == '\n') text.erase(0, 1);
    begun_ = true;
    if (!skip_) add_piece(out, ToolPiece::kArguments, json_text(text));
  }

  // Where the value's end mark begins; a nested value may hold tags of its own name.
  size_t value_end() const {
    if (marks_.nested.empty() || string_) return pending_.find(end_);
    const std::string begin = marks_.nested + "<" + name_ + ">";
    size_t at = 0;
    for (int level = 1;;) {
      const auto found = first_mark(std::string_view(pending_).substr(at), {end_, begin});
      if (!found) return std::string::npos;
      at += found->at;
      level += found->which == 0 ? -1 : 1;
      if (level == 0) return at;
      at += found->which == 0 ? end_.size() : begin.size();
    }
  }

  const TagMarks marks_;
  const std::vector<Tool> tools_;
  Outside outside_;
  At at_ = At::kOutside;
  std::string name_, end_;
  std::vector<std::string> keys_;
  Json schema_, value_schema_;
  bool string_ = false, skip_ = false, begun_ = false;
};

}  // namespace

std::unique_ptr<ToolSplitter> split_tags(const TagMarks& marks, const std::vector<Tool>& tools) {
  return std::make_unique<Tags>(marks, tools);
}

}  // namespace mi::server
