#pragma once
// Restricts generation to a grammar: fill a mask of allowed tokens, accept the sampled one. One Constraint per request.

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "base/result.h"
#include "text/tokenizer.h"

namespace mi::text {

class Constraint {
 public:
  virtual ~Constraint() = default;
  virtual std::unique_ptr<Constraint> clone() const = 0;
  // Bit i of mask set = token i allowed now. mask has (vocab + 31) / 32 words. Returns false when generation must stop:
  // the text is complete, unless failure() says otherwise.
  virtual bool fill_mask(std::span<uint32_t> mask) = 0;
  // An error if the grammar cannot be followed further (a limit of its size at run time, or no token that fits).
  virtual Status failure() const { return {}; }
  virtual Status accept(int32_t token) = 0;
  virtual bool finished() const = 0;          // the text is complete; only the end token may follow
};

class ConstraintFactory {
 public:
  static Result<std::shared_ptr<const ConstraintFactory>> make(std::shared_ptr<const Tokenizer> t, std::span<const int64_t> eos_ids, int64_t vocab);
  virtual ~ConstraintFactory() = default;
  virtual Result<std::unique_ptr<Constraint>> json_schema(std::string_view schema_json) const = 0;
  virtual Result<std::unique_ptr<Constraint>> json_object() const = 0;      // any JSON object
  virtual Result<std::unique_ptr<Constraint>> regex(std::string_view rx) const = 0;
  virtual Result<std::unique_ptr<Constraint>> lark(std::string_view grammar) const = 0;
};

}  // namespace mi::text
