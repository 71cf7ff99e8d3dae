#include "text/constraint.h"

#include "text/rust_buf.h"
#include "text/tokenizer_impl.h"

namespace mi::text {
namespace {

class RustConstraint final : public Constraint {
 public:
  explicit RustConstraint(mi_text_matcher* handle) : handle_(handle) {}
  ~RustConstraint() override { mi_text_matcher_free(handle_); }

  std::unique_ptr<Constraint> clone() const override {
    mi_text_matcher* copy = mi_text_matcher_clone(handle_);
    MI_CHECK(copy != nullptr, "a grammar could not be copied");
    return std::make_unique<RustConstraint>(copy);
  }
  bool fill_mask(std::span<uint32_t> mask) override {
    return mi_text_matcher_fill(handle_, mask.data(), mask.size()) != 0;
  }
  Status failure() const override {
    RustBuf out;
    if (mi_text_matcher_failure(handle_, out.out()) != 0) return out.error(ErrorCode::kUsage);
    return {};
  }
  Status accept(int32_t token) override {
    RustBuf out;
    if (mi_text_matcher_accept(handle_, uint32_t(token), out.out()) != 0) return out.error(ErrorCode::kUsage);
    return {};
  }
  bool finished() const override { return mi_text_matcher_finished(handle_) != 0; }

 private:
  mi_text_matcher* handle_;
};

class RustFactory final : public ConstraintFactory {
 public:
  explicit RustFactory(mi_text_grammars* handle) : handle_(handle) {}
  ~RustFactory() override { mi_text_grammars_free(handle_); }

  Result<std::unique_ptr<Constraint>> json_schema(std::string_view schema_json) const override {
    return make("json_schema", schema_json);
  }
  Result<std::unique_ptr<Constraint>> json_object() const override {
    return make("json_schema", R"({"type": "object"})");
  }
  Result<std::unique_ptr<Constraint>> regex(std::string_view rx) const override { return make("regex", rx); }
  Result<std::unique_ptr<Constraint>> lark(std::string_view grammar) const override { return make("lark", grammar); }

 private:
  Result<std::unique_ptr<Constraint>> make(std::string_view kind, std::string_view grammar) const {
    RustBuf out;
    mi_text_matcher* handle = nullptr;
    if (mi_text_matcher_new(handle_, kind.data(), kind.size(), grammar.data(), grammar.size(), &handle, out.out()) != 0)
      return out.error(ErrorCode::kUsage);
    return std::unique_ptr<Constraint>(std::make_unique<RustConstraint>(handle));
  }
  mi_text_grammars* handle_;
};

}  // namespace

Result<std::shared_ptr<const ConstraintFactory>> ConstraintFactory::make(std::shared_ptr<const Tokenizer> t,
                                                                         std::span<const int64_t> eos_ids,
                                                                         int64_t vocab) {
  std::vector<uint32_t> ends;
  for (int64_t id : eos_ids) {
    if (id < 0 || id >= vocab) return bad_input("the end token {} is outside of the vocabulary of {}", id, vocab);
    ends.push_back(uint32_t(id));
  }
  RustBuf out;
  mi_text_grammars* handle = nullptr;
  if (mi_text_grammars_new(rust_tokenizer(*t).handle(), ends.data(), ends.size(), size_t(vocab), &handle, out.out()) !=
      0)
    return out.error();
  return std::shared_ptr<const ConstraintFactory>(std::make_shared<RustFactory>(handle));
}

}  // namespace mi::text
