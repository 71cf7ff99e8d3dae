#include "text/tokenizer.h"

#include <cstddef>
#include <cstring>

#include "base/file.h"
#include "text/rust_buf.h"
#include "text/tokenizer_impl.h"

namespace mi::text {
namespace {

static_assert(sizeof(Tokenizer::Range) == sizeof(mi_text_range) &&
              offsetof(Tokenizer::Range, end) == offsetof(mi_text_range, end));

std::string_view as_text(const uint8_t* data, size_t size) { return {reinterpret_cast<const char*>(data), size}; }

// A decoder handle that frees itself.
class Decoder {
 public:
  Decoder(const RustTokenizer& t, bool skip_special) : handle_(mi_text_decoder_new(t.handle(), skip_special)) {}
  Decoder(const Decoder&) = delete;
  ~Decoder() { mi_text_decoder_free(handle_); }
  std::string_view push(int32_t id) {
    size_t size = 0;
    const uint8_t* data = mi_text_decoder_push(handle_, uint32_t(id), &size);
    return as_text(data, size);
  }
  std::string_view finish() {
    size_t size = 0;
    const uint8_t* data = mi_text_decoder_finish(handle_, &size);
    return as_text(data, size);
  }

 private:
  mi_text_decoder* handle_;
};

}  // namespace

const RustTokenizer& rust_tokenizer(const Tokenizer& t) {
  auto* rust = dynamic_cast<const RustTokenizer*>(&t);
  MI_CHECK(rust != nullptr, "a tokenizer that Tokenizer::load didn't make");
  return *rust;
}

Result<std::shared_ptr<const Tokenizer>> Tokenizer::load(const std::filesystem::path& tokenizer_json) {
  MI_TRY(const std::string json, read_file(tokenizer_json));
  RustBuf out;
  mi_text_tokenizer* handle = nullptr;
  if (mi_text_tokenizer_load(json.data(), json.size(), &handle, out.out()) != 0)
    return out.error().with_context(tokenizer_json.string());
  return std::shared_ptr<const Tokenizer>(std::make_shared<RustTokenizer>(handle));
}

namespace {
Result<std::vector<int32_t>> encode_with(const mi_text_tokenizer* handle, std::string_view text, bool parse_special,
                                         std::span<const Tokenizer::Range> user) {
  RustBuf out;
  if (mi_text_tokenizer_encode(handle, text.data(), text.size(), parse_special,
                               reinterpret_cast<const mi_text_range*>(user.data()), user.size(), out.out()) != 0)
    return out.error();
  std::vector<int32_t> ids(out.text().size() / sizeof(int32_t));
  if (!ids.empty()) std::memcpy(ids.data(), out.text().data(), ids.size() * sizeof(int32_t));
  return ids;
}
}  // namespace

Result<std::vector<int32_t>> RustTokenizer::encode(std::string_view text, bool parse_special) const {
  return encode_with(handle_, text, parse_special, {});
}

Result<std::vector<int32_t>> RustTokenizer::encode_mixed(std::string_view text, std::span<const Range> user) const {
  return encode_with(handle_, text, true, user);
}

Result<std::string> RustTokenizer::decode(std::span<const int32_t> ids, bool skip_special) const {
  Decoder decoder(*this, skip_special);
  std::string text;
  for (int32_t id : ids) text += decoder.push(id);
  text += decoder.finish();
  return text;
}

std::string_view RustTokenizer::token_bytes(int32_t id) const {
  size_t size = 0;
  uint32_t flags = 0;
  const uint8_t* data = mi_text_tokenizer_token(handle_, uint32_t(id), &size, &flags);
  return as_text(data, size);
}

bool RustTokenizer::is_special(int32_t id) const {
  size_t size = 0;
  uint32_t flags = 0;
  mi_text_tokenizer_token(handle_, uint32_t(id), &size, &flags);
  return (flags & MI_TEXT_TOKEN_SPECIAL) != 0;
}

int32_t RustTokenizer::id_of(std::string_view token) const {
  return mi_text_tokenizer_id(handle_, token.data(), token.size());
}

struct StreamDecoder::Impl {
  Impl(std::shared_ptr<const Tokenizer> t, bool skip_special)
      : tokenizer(std::move(t)), decoder(rust_tokenizer(*tokenizer), skip_special) {}
  std::shared_ptr<const Tokenizer> tokenizer;  // outlives the decoder
  Decoder decoder;
};

StreamDecoder::StreamDecoder(std::shared_ptr<const Tokenizer> t, bool skip_special)
    : impl_(std::make_unique<Impl>(std::move(t), skip_special)) {}
StreamDecoder::~StreamDecoder() = default;
StreamDecoder::StreamDecoder(StreamDecoder&&) noexcept = default;

std::string StreamDecoder::push(int32_t id) { return std::string(impl_->decoder.push(id)); }
std::string StreamDecoder::finish() { return std::string(impl_->decoder.finish()); }

}  // namespace mi::text
