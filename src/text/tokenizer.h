#pragma once
// Tokenizer of a model: the reference implementation (Rust crate tokenizers) behind a thin face. Immutable, thread-safe.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace mi::text {

class Tokenizer {
 public:
  static Result<std::shared_ptr<const Tokenizer>> load(const std::filesystem::path& tokenizer_json);
  virtual ~Tokenizer() = default;

  virtual int64_t vocab() const = 0;   // largest id + 1
  // Special tokens in `text` become their ids when parse_special, plain text otherwise. No bos/eos is added.
  virtual Result<std::vector<int32_t>> encode(std::string_view text, bool parse_special) const = 0;
  // The same for text of which some byte ranges come from the user: within them special tokens stay plain text.
  struct Range { size_t begin, end; };
  virtual Result<std::vector<int32_t>> encode_mixed(std::string_view text, std::span<const Range> user) const = 0;
  virtual Result<std::string> decode(std::span<const int32_t> ids, bool skip_special) const = 0;
  // The bytes a token stands for (may be a part of a UTF-8 character); special tokens: their text.
  virtual std::string_view token_bytes(int32_t id) const = 0;
  virtual bool is_special(int32_t id) const = 0;
  virtual int32_t id_of(std::string_view token) const = 0;   // -1 if none
};

// Turns a growing list of ids into text piece by piece: holds back an unfinished UTF-8 tail, never re-sends, and the
// pieces joined equal decode() of the whole.
class StreamDecoder {
 public:
  StreamDecoder(std::shared_ptr<const Tokenizer> t, bool skip_special);
  ~StreamDecoder();
  StreamDecoder(StreamDecoder&&) noexcept;
  std::string push(int32_t id);    // text that became certain
  std::string finish();            // what was held back; invalid bytes become U+FFFD

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mi::text
