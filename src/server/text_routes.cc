// /tokenize, /detokenize, /apply-template: the text side of the model alone. They run no step and answer in one go.
#include "server/chat_job.h"

namespace mi::server {
namespace {

// These answers are not bounded by the context, and the workers that make them also send the streams.
constexpr size_t kMostText = size_t(2) << 20;
ApiError too_much_text(const char* param) {
  return bad_field(param, fmt::format("{} stands for more than {} bytes of text; send it in parts", param, kMostText));
}

// A job that never starts a request: it has the ways to answer and to count.
class TextJob : public Job {
 public:
  using Job::Job;
  using Answer = std::variant<Json, ApiError>;
  template <typename Make>  // Make: Answer(const Json& body)
  void begin(const std::string& body, Make make) {
    auto parsed = parse_body(body);
    if (const auto* e = std::get_if<ApiError>(&parsed)) return fail(*e);
    if (!context_.text.tokenizer)
      return fail(ApiError{400, "this model has no tokenizer", "invalid_request_error", {}, {}});
    Answer a = make(std::get<Json>(parsed));
    if (const auto* e = std::get_if<ApiError>(&a)) return fail(*e);
    respond_whole(std::get<Json>(a));
  }

 private:
  void on_finish(size_t, const runtime::FinishEvent&) override {}
  void on_all_finished() override {}
};

// These routes may leave the model out; a wrong one is refused all the same.
std::optional<ApiError> wrong_model(const ServerContext& c, const std::string& model) {
  if (model.empty() || c.serves(model)) return std::nullopt;
  return unknown_model(model);
}

Json piece_json(std::string_view bytes) {
  std::string clean = clean_utf8(bytes);
  if (clean == bytes) return clean;
  Json list = Json::array();
  for (char c : bytes) list.push_back(int(static_cast<unsigned char>(c)));
  return list;
}

TextJob::Answer tokenize(const ServerContext& c, const Json& body) {
  TokenizeRequest r;
  if (auto e = parse_tokenize(body, &r)) return *e;
  if (auto e = wrong_model(c, r.chat.model)) return *e;
  std::vector<int32_t> ids;
  if (r.messages) {
    text::Rendered prompt;
    if (auto e = render_chat(c, r.chat, &prompt)) return *e;
    if (auto e = chat_ids(c, prompt, &ids)) return *e;
  } else {
    if (r.text.size() > kMostText) return too_much_text("prompt");
    auto encoded = c.text.tokenizer->encode(r.text, r.parse_special);
    if (!encoded.ok()) return bad_field("prompt", encoded.error().message());
    ids = std::move(encoded).value();
  }
  Json answer{{"tokens", ids}, {"count", ids.size()}, {"max_model_len", c.loop->limits().longest()}};
  for (const auto& [wanted, key] : {std::pair{r.strings, "token_strs"}, std::pair{r.pieces, "pieces"}}) {
    if (!wanted) continue;
    Json list = Json::array();
    for (int32_t id : ids) {
      const std::string_view bytes = c.text.tokenizer->token_bytes(id);
      list.push_back(key == std::string_view("pieces") ? piece_json(bytes) : Json(clean_utf8(bytes)));
    }
    answer[key] = std::move(list);
  }
  return answer;
}

TextJob::Answer detokenize(const ServerContext& c, const Json& body) {
  DetokenizeRequest r;
  if (auto e = parse_detokenize(body, &r)) return *e;
  if (auto e = wrong_model(c, r.model)) return *e;
  size_t bytes = 0;
  for (int32_t id : r.tokens) {
    if (id >= c.text.tokenizer->vocab())
      return bad_field("tokens",
                       fmt::format("tokens holds {}; the tokenizer has {} tokens", id, c.text.tokenizer->vocab()));
    if ((bytes += c.text.tokenizer->token_bytes(id).size()) > kMostText) return too_much_text("tokens");
  }
  auto text = c.text.tokenizer->decode(r.tokens, r.skip_special_tokens);
  if (!text.ok()) return bad_field("tokens", text.error().message());
  const std::string clean = clean_utf8(*text);
  return Json{{"prompt", clean}, {"content", clean}};
}

TextJob::Answer apply_template(const ServerContext& c, const Json& body) {
  ChatRequest r;
  if (auto e = parse_apply_template(body, &r)) return *e;
  if (auto e = wrong_model(c, r.model)) return *e;
  text::Rendered prompt;
  if (auto e = render_chat(c, r, &prompt)) return *e;
  return Json{{"prompt", prompt.text}};
}

}  // namespace

void start_tokenize(ServerContext& c, std::shared_ptr<Exchange> e) {
  std::make_shared<TextJob>(c, e)->begin(e->request().body, [&](const Json& b) { return tokenize(c, b); });
}
void start_detokenize(ServerContext& c, std::shared_ptr<Exchange> e) {
  std::make_shared<TextJob>(c, e)->begin(e->request().body, [&](const Json& b) {
    return detokenize(c, b);
  });
}
void start_apply_template(ServerContext& c, std::shared_ptr<Exchange> e) {
  std::make_shared<TextJob>(c, e)->begin(e->request().body, [&](const Json& b) {
    return apply_template(c, b);
  });
}

}  // namespace mi::server
