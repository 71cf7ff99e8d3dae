#pragma once
// The one Tokenizer there is: an owner of the Rust handle. Internal to this room (the constraint factory needs the
// handle).

#include "mi_text.h"
#include "text/tokenizer.h"

namespace mi::text {

class RustTokenizer final : public Tokenizer {
 public:
  explicit RustTokenizer(mi_text_tokenizer* handle)
      : handle_(handle), vocab_(int64_t(mi_text_tokenizer_vocab(handle))) {}
  ~RustTokenizer() override { mi_text_tokenizer_free(handle_); }
  const mi_text_tokenizer* handle() const { return handle_; }

  int64_t vocab() const override { return vocab_; }
  Result<std::vector<int32_t>> encode(std::string_view text, bool parse_special) const override;
  Result<std::vector<int32_t>> encode_mixed(std::string_view text, std::span<const Range> user) const override;
  Result<std::string> decode(std::span<const int32_t> ids, bool skip_special) const override;
  std::string_view token_bytes(int32_t id) const override;
  bool is_special(int32_t id) const override;
  int32_t id_of(std::string_view token) const override;

 private:
  mi_text_tokenizer* handle_;
  int64_t vocab_;
};

// The tokenizers of this program are all of this class (checked).
const RustTokenizer& rust_tokenizer(const Tokenizer& t);

}  // namespace mi::text
