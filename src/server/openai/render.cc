#include "server/openai/render.h"

namespace mi::server {
std::string token_name(std::string_view s) {
  for (size_t i = 0; i < s.size();) {
    const size_t n = utf8_bytes(s, i);
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

Json chat_logprob(const text::Tokenizer& t, int32_t token, float logprob,
                  const std::vector<runtime::TokenLogprob>& top) {
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
  Json j{{"tokens", std::move(tokens_)},
         {"token_logprobs", std::move(logprobs_)},
         {"top_logprobs", std::move(tops_)},
         {"text_offset", std::move(offsets_)}};
  tokens_ = logprobs_ = tops_ = offsets_ = Json::array();
  return j;
}

Json usage_json(int64_t prompt, int64_t completion, int64_t cached) {
  return {{"prompt_tokens", prompt},
          {"completion_tokens", completion},
          {"total_tokens", prompt + completion},
          {"prompt_tokens_details", {{"cached_tokens", cached}}}};
}

}  // namespace mi::server
