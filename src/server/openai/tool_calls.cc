#include "server/openai/tool_calls.h"

#include <algorithm>
#include <optional>

namespace mi::server {
namespace {

constexpr int kMostCalls = 16;

// One {"name": ..., "arguments": ...} object, a character at a time.
class CallReader {
 public:
  enum class State : uint8_t { kReading, kDone, kBad };
  State state() const { return state_; }
  bool announced() const { return announced_; }

  void push(char c, std::vector<ToolPiece>* out) {
    if (state_ != State::kReading) return;
    raw_ += c;
    step(c);
    if (state_ == State::kBad) return;
    if (!announced_ && name_) {
      announced_ = true;
      out->push_back({ToolPiece::kCallBegin, *name_});
    }
    if (announced_ && !arguments_.empty()) {
      out->push_back({ToolPiece::kArguments, std::move(arguments_)});
      arguments_.clear();
    }
    if (state_ == State::kDone && announced_ && !any_arguments_) out->push_back({ToolPiece::kArguments, "{}"});
    if (state_ == State::kDone && !announced_) state_ = State::kBad;
  }
  const std::string& raw() const { return raw_; }

 private:
  static bool blank(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }
  void step(char c) {
    switch (at_) {
      case At::kOpen:
        if (blank(c)) return;
        if (c != '{') return bad();
        at_ = At::kKeyOrEnd;
        return;
      case At::kKeyOrEnd:
        if (blank(c) || c == ',') return;
        if (c == '}') {
          state_ = State::kDone;
          return;
        }
        if (c != '"') return bad();
        token_ = "\"";
        escaped_ = false;
        at_ = At::kKey;
        return;
      case At::kKey:
        token_ += c;
        if (!string_ends(c)) return;
        key_ = decode(token_);
        at_ = At::kColon;
        return;
      case At::kColon:
        if (blank(c)) return;
        if (c != ':') return bad();
        at_ = At::kValueStart;
        return;
      case At::kValueStart:
        if (blank(c)) return;
        token_.clear();
        depth_ = 0;
        in_string_ = escaped_ = false;
        keep_ = key_ == "arguments" || key_ == "parameters";
        encoded_ = keep_ && c == '"';
        if (keep_ && c != '{' && c != '"') return bad();
        at_ = At::kValue;
        value(c);
        return;
      case At::kValue:
        value(c);
        return;
    }
  }

  void value(char c) {
    if (!in_string_ && depth_ == 0 && !token_.empty() && (c == ',' || c == '}' || blank(c)) && token_[0] != '{' &&
        token_[0] != '[' && token_[0] != '"') {
      end_value();  // a number or a word ends before this character
      at_ = At::kKeyOrEnd;
      step(c);
      return;
    }
    token_ += c;
    if (keep_ && !encoded_) arguments_ += c, any_arguments_ = true;
    if (in_string_) {
      if (string_ends(c)) {
        in_string_ = false;
        if (depth_ == 0) end_value();
      }
      return;
    }
    if (c == '"') {
      in_string_ = true;
      escaped_ = false;
    } else if (c == '{' || c == '[')
      ++depth_;
    else if (c == '}' || c == ']') {
      if (--depth_ == 0) end_value();
    }
  }
  void end_value() {
    at_ = At::kKeyOrEnd;
    if (key_ == "name") {
      name_ = decode(token_);
      if (name_->empty()) bad();
    } else if (encoded_) {  // arguments as the text of an object
      arguments_ = decode(token_);
      any_arguments_ = true;
      encoded_ = false;
    }
  }
  bool string_ends(char c) {
    if (escaped_) {
      escaped_ = false;
      return false;
    }
    if (c == '\\') {
      escaped_ = true;
      return false;
    }
    return c == '"';
  }
  std::string decode(const std::string& quoted) {
    const auto j = parse_json(quoted, "call");
    if (!j.ok() || !j->is_string()) {
      bad();
      return {};
    }
    return j->get<std::string>();
  }
  void bad() { state_ = State::kBad; }

  enum class At : uint8_t { kOpen, kKeyOrEnd, kKey, kColon, kValueStart, kValue };
  At at_ = At::kOpen;
  State state_ = State::kReading;
  std::string raw_, token_, key_, arguments_;
  std::optional<std::string> name_;
  int depth_ = 0;
  bool in_string_ = false, escaped_ = false, keep_ = false, encoded_ = false, announced_ = false,
       any_arguments_ = false;
};

void add_content(std::vector<ToolPiece>* out, std::string text) {
  if (text.empty()) return;
  if (!out->empty() && out->back().kind == ToolPiece::kContent)
    out->back().text += text;
  else
    out->push_back({ToolPiece::kContent, std::move(text)});
}
void merge(std::vector<ToolPiece>* out, std::vector<ToolPiece> more) {
  for (ToolPiece& p : more) {
    if (!out->empty() && out->back().kind == p.kind && p.kind != ToolPiece::kCallBegin)
      out->back().text += p.text;
    else
      out->push_back(std::move(p));
  }
}

// Length of the longest end of s that could become the beginning of mark.
size_t held(std::string_view s, std::string_view mark) {
  for (size_t n = std::min(s.size(), mark.size() - 1); n > 0; --n)
    if (s.substr(s.size() - n) == mark.substr(0, n)) return n;
  return 0;
}

class Marked : public ToolSplitter {
 public:
  explicit Marked(CallMarks marks) : marks_(std::move(marks)) {}

  std::vector<ToolPiece> push(std::string_view text) override {
    std::vector<ToolPiece> out;
    pending_ += text;
    while (in_call_ ? inside(&out) : outside(&out)) {
    }
    return out;
  }
  std::vector<ToolPiece> finish() override {
    std::vector<ToolPiece> out;
    // A call that never got its name was only text.
    if (in_call_ && !reader_.announced())
      add_content(&out, marks_.begin + reader_.raw() + pending_);
    else if (!in_call_)
      add_content(&out, std::move(pending_));
    pending_.clear();
    return out;
  }

 private:
  bool outside(std::vector<ToolPiece>* out) {
    const size_t at = pending_.find(marks_.begin);
    if (at == std::string::npos) {
      const size_t keep = held(pending_, marks_.begin);
      add_content(out, pending_.substr(0, pending_.size() - keep));
      pending_.erase(0, pending_.size() - keep);
      return false;
    }
    add_content(out, pending_.substr(0, at));
    pending_.erase(0, at + marks_.begin.size());
    in_call_ = true;
    reader_ = CallReader();
    return true;
  }
  bool inside(std::vector<ToolPiece>* out) {
    size_t used = 0;
    std::vector<ToolPiece> pieces;
    for (; used < pending_.size() && reader_.state() == CallReader::State::kReading; ++used)
      reader_.push(pending_[used], &pieces);
    merge(out, std::move(pieces));
    pending_.erase(0, used);
    if (reader_.state() == CallReader::State::kReading) return false;
    if (reader_.state() == CallReader::State::kBad && !reader_.announced()) {
      add_content(out, marks_.begin + reader_.raw());
      in_call_ = false;
      return true;
    }
    // Whole, or broken after its name was sent: what follows up to the end mark belongs to the call.
    const size_t end = pending_.find(marks_.end);
    if (end == std::string::npos) return false;
    pending_.erase(0, end + marks_.end.size());
    in_call_ = false;
    return true;
  }
  CallMarks marks_;
  std::string pending_;
  bool in_call_ = false;
  CallReader reader_;
};

class List : public ToolSplitter {
 public:
  std::vector<ToolPiece> push(std::string_view text) override {
    std::vector<ToolPiece> out;
    for (char c : text) {
      std::vector<ToolPiece> pieces;
      if (!in_call_) {
        if (c != '{') continue;  // brackets, commas and blanks of the list
        in_call_ = true;
        reader_ = CallReader();
      }
      reader_.push(c, &pieces);
      merge(&out, std::move(pieces));
      if (reader_.state() != CallReader::State::kReading) in_call_ = false;
    }
    return out;
  }
  std::vector<ToolPiece> finish() override { return {}; }

 private:
  bool in_call_ = false;
  CallReader reader_;
};

class Bare : public ToolSplitter {
 public:
  explicit Bare(std::string name) : name_(std::move(name)) {}
  std::vector<ToolPiece> push(std::string_view text) override {
    std::vector<ToolPiece> out = begin();
    if (!text.empty()) out.push_back({ToolPiece::kArguments, std::string(text)});
    return out;
  }
  std::vector<ToolPiece> finish() override { return begin(); }

 private:
  std::vector<ToolPiece> begin() {
    if (begun_) return {};
    begun_ = true;
    return {{ToolPiece::kCallBegin, name_}};
  }
  std::string name_;
  bool begun_ = false;
};

// Local references stay valid when a schema becomes a part of another: its definitions move to the new root under a
// prefix.
void move_references(Json* j, const std::string& prefix) {
  if (j->is_array()) {
    for (Json& e : *j) move_references(&e, prefix);
  } else if (j->is_object()) {
    for (auto& [key, value] : j->items()) {
      if (key == "$ref" && value.is_string()) {
        const std::string ref = value.get<std::string>();
        for (const char* root : {"#/$defs/", "#/definitions/"})
          if (ref.rfind(root, 0) == 0) value = "#/$defs/" + prefix + ref.substr(std::string(root).size());
      } else {
        move_references(&value, prefix);
      }
    }
  }
}

Json with_type(Json schema) {
  if (schema.empty()) schema["type"] = "object";
  return schema;
}

}  // namespace

CallMarks call_marks(const text::Tokenizer& t) {
  for (const auto& [begin, end] : {std::pair{"<|call|>", "<|endcall|>"}, std::pair{"<tool_call>", "</tool_call>"}})
    if (t.id_of(begin) >= 0 && t.id_of(end) >= 0) return {begin, end};
  return {};
}

std::unique_ptr<ToolSplitter> split_marked(CallMarks marks) { return std::make_unique<Marked>(std::move(marks)); }
std::unique_ptr<ToolSplitter> split_list() { return std::make_unique<List>(); }
std::unique_ptr<ToolSplitter> split_bare(std::string name) { return std::make_unique<Bare>(std::move(name)); }

Json named_call_schema(const Tool& tool) { return with_type(tool.parameters); }

Json required_calls_schema(const std::vector<Tool>& tools, bool parallel) {
  Json options = Json::array(), definitions = Json::object();
  for (size_t i = 0; i < tools.size(); ++i) {
    Json parameters = with_type(tools[i].parameters);
    const std::string prefix = fmt::format("tool{}_", i);
    move_references(&parameters, prefix);
    for (const char* key : {"$defs", "definitions"}) {
      if (!parameters.contains(key) || !parameters[key].is_object()) continue;
      for (auto& [name, schema] : parameters[key].items()) definitions[prefix + name] = schema;
      parameters.erase(key);
    }
    options.push_back({{"type", "object"},
                       {"properties", {{"name", {{"const", tools[i].name}}}, {"arguments", std::move(parameters)}}},
                       {"required", {"name", "arguments"}},
                       {"additionalProperties", false}});
  }
  Json schema{{"type", "array"},
              {"minItems", 1},
              {"maxItems", parallel ? kMostCalls : 1},
              {"items", {{"anyOf", std::move(options)}}}};
  if (!definitions.empty()) schema["$defs"] = std::move(definitions);
  return schema;
}

std::string free_calls_grammar(const std::vector<Tool>& tools, bool parallel, int32_t begin, int32_t end) {
  std::vector<Tool> known = tools;
  for (Tool& t : known)
    if (!t.strict) t.parameters = Json::object();
  const Json list = required_calls_schema(known, true);
  Json call = list["items"];
  if (list.contains("$defs")) call["$defs"] = list["$defs"];
  call["x-guidance"] = {{"whitespace_pattern", "[\\x20\\x0A\\x0D\\x09]{1,40}"}};
  return fmt::format(
      "start: {}\n"
      "text: <[^{}]>*\n"
      "call: <[{}]> BLANK? body BLANK? <[{}]>\n"
      "BLANK: /[ \\n\\r\\t]{{1,8}}/\n"
      "body: %json {}\n",
      parallel ? "text (call text)*" : "text (call text)?", begin, begin, end, dump_json(call));
}

}  // namespace mi::server
