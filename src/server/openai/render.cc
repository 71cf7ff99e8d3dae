#include "server/openai/render.h"

namespace mi::server {
namespace {

// Bytes of the character that starts at s[i], 0 if it is broken there.
size_t character_bytes(std::string_view s, size_t i) {
  const auto b = [&](size_t k) { return static_cast<unsigned char>(s[i + k]); };
  const unsigned char c = b(0);
  const size_t n = c < 0x80 ? 1 : c >= 0xc2 && c < 0xe0 ? 2 : (c & 0xf0) == 0xe0 ? 3 : c >= 0xf0 && c < 0xf5 ? 4 : 0;
  if (n == 0 || i + n > s.size()) return 0;
  for (size_t k = 1; k < n; ++k)
    if ((b(k) & 0xc0) != 0x80) return 0;
  if (c == 0xe0 && b(1) < 0xa0) return 0;      // overlong
  if (c == 0xed && b(1) >= 0xa0) return 0;     // surrogate
  if (c == 0xf0 && b(1) < 0x90) return 0;      // overlong
  if (c == 0xf4 && b(1) >= 0x90) return 0;     // above U+10FFFF
  return n;
}

}  // namespace

std::string clean_utf8(std::string_view s) {
  std::string out;
  for (size_t i = 0; i < s.size();) {
    const size_t n = character_bytes(s, i);
    if (n == 0) {
      out += "\xef\xbf\xbd";
      ++i;
    } else {
      out += s.substr(i, n);
      i += n;
    }
  }
  return out;
}

std::string token_name(std::string_view s) {
  for (size_t i = 0; i < s.size();) {
    const size_t n = character_bytes(s, i);
    if (n == 0) {
      std::string out = "bytes:";
      for (char c : s) out += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
      return out;
    }
    i += n;
  }
  return std::string(s);
}

int64_t count_characters(std::string_view s) {
  int64_t n = 0;
  for (char c : s) n += (static_cast<unsigned char>(c) & 0xc0) != 0x80;
  return n;
}

Json chat_logprob(const text::Tokenizer& t, int32_t token, float logprob, const std::vector<runtime::TokenLogprob>& top) {
  const auto entry = [&](int32_t id, float lp) {
    const std::string_view bytes = t.token_bytes(id);
    Json list = Json::array();
    for (char c : bytes) list.push_back(int(static_cast<unsigned char>(c)));
    return Json{{"token", clean_utf8(bytes)}, {"logprob", lp}, {"bytes", std::move(list)}};
  };
  Json j = entry(token, logprob);
  j["top_logprobs"] = Json::array();
  for (const runtime::TokenLogprob& o : top) j["top_logprobs"].push_back(entry(o.token, o.logprob));
  return j;
}

void CompletionLogprobs::add(int32_t token, float logprob, const std::vector<runtime::TokenLogprob>& top, bool scored) {
  const std::string_view bytes = tokenizer_.token_bytes(token);
  const std::string name = token_name(bytes);
  tokens_.push_back(name);
  offsets_.push_back(offset_);
  offset_ += count_characters(bytes);
  logprobs_.push_back(scored ? Json(logprob) : Json());
  if (!scored || top.empty()) {
    tops_.push_back(nullptr);
    return;
  }
  Json map = Json::object();
  for (const runtime::TokenLogprob& o : top) map[token_name(tokenizer_.token_bytes(o.token))] = o.logprob;
  map[name] = logprob;
  tops_.push_back(std::move(map));
}

Json CompletionLogprobs::take() {
  Json j{{"tokens", std::move(tokens_)}, {"token_logprobs", std::move(logprobs_)}, {"top_logprobs", std::move(tops_)}, {"text_offset", std::move(offsets_)}};
  tokens_ = logprobs_ = tops_ = offsets_ = Json::array();
  return j;
}

Json usage_json(int64_t prompt, int64_t completion) { return {{"prompt_tokens", prompt}, {"completion_tokens", completion}, {"total_tokens", prompt + completion}}; }

}  // namespace mi::server
