// /v1/embeddings
#include <bit>
#include <cmath>
#include <cstring>

#include "server/job.h"

namespace mi::server {
namespace {

std::string base64(std::string_view bytes) {
  static const char* digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t group = 0;
    const size_t n = std::min<size_t>(3, bytes.size() - i);
    for (size_t k = 0; k < 3; ++k) group = group << 8 | (k < n ? static_cast<unsigned char>(bytes[i + k]) : 0u);
    for (size_t k = 0; k < 4; ++k) out += k <= n ? digits[group >> (18 - 6 * k) & 63] : '=';
  }
  return out;
}
static_assert(std::endian::native == std::endian::little, "base64 embeddings are little-endian floats");

class EmbeddingJob : public Job {
 public:
  EmbeddingJob(ServerContext& c, std::shared_ptr<Exchange> e) : Job(c, std::move(e)) {}

  void begin(const std::string& body) {
    auto parsed = parse_body(body);
    if (const auto* e = std::get_if<ApiError>(&parsed)) return fail(*e);
    if (const auto e = parse_embedding(std::get<Json>(parsed), &request_)) return fail(*e);
    if (!context_.serves(request_.model)) return fail(unknown_model(request_.model));
    const int64_t hidden = context_.loop->limits().hidden;
    if (!context_.text.tokenizer || hidden == 0)
      return fail(ApiError{400,
                           "this model makes no embeddings: it has no tokenizer, or no hidden state before its logits",
                           "invalid_request_error",
                           "model",
                           {}});
    if (request_.dimensions >= 0 && request_.dimensions != hidden)
      return fail(bad_field("dimensions", fmt::format("dimensions is {}; this model's embeddings have {} values, and "
                                                      "they cannot be shortened",
                                                      request_.dimensions, hidden)));
    std::vector<runtime::Request> requests;
    int64_t tokens = 0;
    for (const auto& input : request_.inputs) {
      runtime::Request r;
      if (auto e = prompt_ids(context_, "input", input, &r.prompt)) return fail(*e);
      tokens += int64_t(r.prompt.size());
      r.max_tokens = 0;
      r.pooling = request_.pooling;
      r.priority = request_.priority;
      r.cache_salt = request_.cache_salt;
      requests.push_back(std::move(r));
    }
    set_prompt_tokens(tokens);
    embeddings_.resize(requests.size());
    start(std::move(requests), false);
  }

 private:
  void on_embedding(size_t index, runtime::EmbeddingEvent&& e) override { embeddings_[index] = std::move(e.values); }
  void on_finish(size_t index, const runtime::FinishEvent&) override {
    std::vector<float>& v = embeddings_[index];
    double square = 0;
    for (float x : v) square += double(x) * double(x);
    if (square > 0)
      for (float& x : v) x = float(double(x) / std::sqrt(square));
  }
  void on_all_finished() override {
    Json data = Json::array();
    for (size_t i = 0; i < embeddings_.size(); ++i) {
      const std::vector<float>& v = embeddings_[i];
      Json values = Json::array();
      if (request_.base64)
        values = base64({reinterpret_cast<const char*>(v.data()), v.size() * sizeof(float)});
      else
        for (float x : v) values.push_back(x);
      data.push_back({{"object", "embedding"}, {"index", i}, {"embedding", std::move(values)}});
    }
    respond_whole({{"object", "list"},
                   {"data", std::move(data)},
                   {"model", request_.model},
                   {"usage", {{"prompt_tokens", prompt_tokens()}, {"total_tokens", prompt_tokens()}}}});
  }

  EmbeddingRequest request_;
  std::vector<std::vector<float>> embeddings_;
};

}  // namespace

void start_embedding(ServerContext& c, std::shared_ptr<Exchange> e) {
  std::make_shared<EmbeddingJob>(c, e)->begin(e->request().body);
}

}  // namespace mi::server
