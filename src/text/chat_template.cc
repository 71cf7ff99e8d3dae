#include "text/chat_template.h"

#include <cstring>

#include "base/json.h"
#include "text/rust_buf.h"

namespace mi::text {
namespace {

class RustTemplate final : public ChatTemplate {
 public:
  explicit RustTemplate(mi_text_template* handle) : handle_(handle) {}
  ~RustTemplate() override { mi_text_template_free(handle_); }

  Result<Rendered> render(std::string_view messages_json, std::string_view tools_json, std::string_view extra_json,
                          bool add_generation_prompt) const override {
    RustBuf user, out;
    if (mi_text_template_render(handle_, messages_json.data(), messages_json.size(), tools_json.data(),
                                tools_json.size(), extra_json.data(), extra_json.size(), add_generation_prompt,
                                user.out(), out.out()) != 0)
      return out.error(ErrorCode::kUsage);
    Rendered rendered{std::string(out.text()), {}};
    rendered.user.resize(user.text().size() / sizeof(Tokenizer::Range));
    if (!rendered.user.empty()) std::memcpy(rendered.user.data(), user.text().data(), user.text().size());
    return rendered;
  }

 private:
  mi_text_template* handle_;
};

}  // namespace

Result<std::shared_ptr<const ChatTemplate>> ChatTemplate::compile(std::string source, TemplateVars vars) {
  // A token that the model doesn't have stays undefined.
  Json variables = Json::object();
  for (auto [name, value] : {std::pair{"bos_token", &vars.bos_token},
                             {"eos_token", &vars.eos_token},
                             {"pad_token", &vars.pad_token},
                             {"unk_token", &vars.unk_token}})
    if (!value->empty()) variables[name] = *value;
  const std::string json = dump_json(variables);
  RustBuf out;
  mi_text_template* handle = nullptr;
  if (mi_text_template_compile(source.data(), source.size(), json.data(), json.size(), &handle, out.out()) != 0)
    return out.error();
  return std::shared_ptr<const ChatTemplate>(std::make_shared<RustTemplate>(handle));
}

}  // namespace mi::text
