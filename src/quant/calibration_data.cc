#include "quant/calibration_data.h"

#include <algorithm>
#include <sstream>

#include "base/in_file.h"
#include "base/json.h"
#include "base/place.h"
#include "base/util.h"
#include "text/messages.h"

namespace mi::quant {
namespace {

using Ids = std::vector<int32_t>;

constexpr uint64_t kDrawSeed = 8;

Error no_tokenizer(const Path& file) {
  return bad_input(
      "{}: this model has no tokenizer.json, so only lines of the form {{\"ids\": [...]}} can calibrate it",
      file.string());
}

Result<Ids> line_ids(const Json& line, const std::string& what, const CalibrationRequest& r,
                     const text::Tokenizer* tokenizer, const text::ChatTemplate* chat) {
  if (!line.is_object()) return bad_input("{}: expected an object with \"text\", \"messages\" or \"ids\"", what);
  if (int(line.contains("ids")) + int(line.contains("text")) + int(line.contains("messages")) > 1)
    return bad_input("{}: has more than one of \"text\", \"messages\" and \"ids\"; keep the one that is meant", what);
  if (line.contains("ids")) {
    MI_TRY(const std::vector<int64_t> ids, json_get<std::vector<int64_t>>(line, "ids", what));
    Ids out;
    for (int64_t id : ids) {
      if (id < 0 || id >= r.vocab) return bad_input("{}: id {} is outside the vocabulary of {}", what, id, r.vocab);
      out.push_back(int32_t(id));
    }
    return out;
  }
  if (!tokenizer) return no_tokenizer(r.file);
  if (line.contains("text")) {
    MI_TRY(const std::string t, json_get<std::string>(line, "text", what));
    return in_file(tokenizer->encode(t, true), what);
  }
  if (line.contains("messages")) {
    if (!chat) return bad_input("{}: \"messages\" need a chat template, and this model has none", what);
    MI_TRY_VOID(text::check_messages(line, what));
    const std::string tools = line.contains("tools") ? dump_json(line["tools"]) : "";
    MI_TRY(const text::Rendered rendered, in_file(chat->render(dump_json(line["messages"]), tools, "", false), what));
    return in_file(tokenizer->encode_mixed(rendered.text, rendered.user), what);
  }
  return bad_input("{}: expected \"text\", \"messages\" or \"ids\"", what);
}

// Consecutive runs of `length` ids; a last run shorter than a quarter is left out unless it is the only one.
void cut(const Ids& ids, int64_t length, std::vector<Ids>* out) {
  for (size_t i = 0; i < ids.size(); i += size_t(length)) {
    const size_t n = std::min(ids.size() - i, size_t(length));
    if (i > 0 && int64_t(n) * 4 < length) break;
    out->emplace_back(ids.begin() + long(i), ids.begin() + long(i + n));
  }
}

template <typename T>
void shuffle(std::vector<T>& v) {
  for (size_t i = v.size(); i > 1; --i) std::swap(v[i - 1], v[size_t(random_u64(kDrawSeed, i) % i)]);
}

// A text's sequences: those that are used.
void choose(CalibrationSet* set, const CalibrationRequest& r) {
  if (r.draw) shuffle(set->sequences);
  set->unused += std::max<int64_t>(0, int64_t(set->sequences.size()) - r.samples);
  set->sequences.resize(std::min(set->sequences.size(), size_t(r.samples)));
}

CalibrationSet random_ids(const CalibrationRequest& r) {
  CalibrationSet set;
  set.source = "random ids (the model has no tokenizer)";
  const int64_t samples = std::min<int64_t>(r.samples, 32);
  for (int64_t s = 0; s < samples; ++s) {
    Ids ids;
    for (int64_t i = 0; i < std::min<int64_t>(r.length, 128); ++i)
      ids.push_back(int32_t(random_u64(uint64_t(s), uint64_t(i)) % uint64_t(r.vocab)));
    set.sequences.push_back(std::move(ids));
  }
  return set;
}

}  // namespace

Result<CalibrationSet> load_calibration(const CalibrationRequest& r, const text::Tokenizer* tokenizer,
                                        const text::ChatTemplate* chat) {
  MI_CHECK(r.vocab > 0 && r.samples > 0 && r.length > 0);
  CalibrationSet set;
  if (r.file.empty()) {
    if (!tokenizer) {
      set = random_ids(r);
    } else {
      set.source = "built-in text";
      MI_TRY(const Ids ids, tokenizer->encode(builtin_calibration_text(), false));
      cut(ids, r.length, &set.sequences);
      choose(&set, r);
    }
  } else {
    MI_TRY(const std::string content, read_file(r.file));
    set.source = r.file.filename().string();
    const std::string ending = lower_ending(r.file);
    if (ending == ".json")
      return bad_input("{}: text or .jsonl is read, an object a line; rename the file to .jsonl, or to .txt if it is meant as text",
                       r.file.string());
    if (ending == ".jsonl" || ending == ".ndjson") {
      std::vector<std::pair<int64_t, std::string>> lines;
      std::istringstream all(content);
      std::string line;
      for (int64_t n = 1; std::getline(all, line); ++n)
        if (line.find_first_not_of(" \t\r") != std::string::npos) lines.emplace_back(n, std::move(line));
      if (r.draw) shuffle(lines);
      for (const auto& [n, text] : lines) {
        if (int64_t(set.sequences.size()) >= r.samples) {
          ++set.unused;
          continue;
        }
        const std::string what = fmt::format("{} line {}", r.file.string(), n);
        MI_TRY(const Json j, parse_json(text, what));
        MI_TRY(const Ids ids, line_ids(j, what, r, tokenizer, chat));
        cut(ids, r.length, &set.sequences);
      }
      set.sequences.resize(std::min(set.sequences.size(), size_t(r.samples)));
    } else {
      if (!tokenizer) return no_tokenizer(r.file);
      MI_TRY(const Ids ids, in_file(tokenizer->encode(content, false), r.file.string()));
      cut(ids, r.length, &set.sequences);
      choose(&set, r);
    }
    if (set.sequences.empty()) return bad_input("{}: no calibration text in it", r.file.string());
  }
  Xxh3 hash;
  for (const Ids& ids : set.sequences) {
    for (int32_t id : ids)
      if (id < 0 || id >= r.vocab)
        return bad_input(
            "the tokenizer gives id {}, but the model's vocabulary has {} entries: they do not belong together", id,
            r.vocab);
    const int64_t n = int64_t(ids.size());
    hash.update(std::as_bytes(std::span(&n, 1)));
    hash.update(std::as_bytes(std::span(ids)));
    set.tokens += n;
  }
  set.hash = hash.digest();
  return set;
}

}  // namespace mi::quant
