// The text side of a checkpoint: where chat templates come from, token ids of generation_config.json.

#include "model/tokenizer_files.h"

#include <gmock/gmock.h>

#include "model/testing.h"

namespace mi::model {
namespace {

using namespace testing;
using ::testing::Contains;
using ::testing::HasSubstr;

TEST(TokenizerFiles, TemplateOfTheConfigFileOrListOfThem) {
  TempDir tmp;
  write_text(tmp / "tokenizer_config.json", R"({"chat_template": "A"})");
  EXPECT_EQ(read_tokenizer_files(tmp.path())->chat_template, "A");
  write_text(tmp / "tokenizer_config.json",
             R"({"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]})");
  const auto list = read_tokenizer_files(tmp.path());
  EXPECT_EQ(list->chat_template, "D");
  EXPECT_THAT(list->notes, Contains(HasSubstr("tool_use")));
  write_text(tmp / "tokenizer_config.json",
             R"({"chat_template": [{"name": "a", "template": "T"}, {"name": "b", "template": "D"}]})");
  EXPECT_THAT(refusal(read_tokenizer_files(tmp.path())), HasSubstr("default"));
  write_text(tmp / "tokenizer_config.json", R"({"chat_template": "A"})");
  write_text(tmp / "chat_template.jinja", "J");
  const auto both = read_tokenizer_files(tmp.path());
  EXPECT_EQ(both->chat_template, "J");
  EXPECT_THAT(both->notes, Contains(HasSubstr("another chat template")));
}

TEST(TokenizerFiles, AreBroughtIntoOneForm) {
  TempDir tmp;
  const Tiny tiny;
  write_checkpoint(tmp / "m", tiny.config(), tiny.tensors());
  write_text(tmp / "m" / "tokenizer.json", "{}");
  write_text(tmp / "m" / "tokenizer_config.json", R"({"chat_template": "A"})");
  write_text(tmp / "m" / "generation_config.json", R"({"eos_token_id": [7, 9]})");
  const auto r = export_to(tmp / "m", tmp / "out");
  ASSERT_TRUE(r.ok()) << r.error().message();
  EXPECT_TRUE(r->has_tokenizer && r->has_chat_template);
  EXPECT_EQ(read_text(tmp / "out" / "tokenizer" / "chat_template.jinja"), "A");
  EXPECT_EQ(read_text(tmp / "out" / "tokenizer" / "tokenizer.json"), "{}");
  EXPECT_EQ(open_mir(tmp / "out").graph.info.eos_ids, (std::vector<int64_t>{7, 9}));
}

TEST(TokenizerFiles, MissingTokenizerIsSaid) {
  const auto r = check(data("goldens") / "llama");
  ASSERT_TRUE(r.ok());
  EXPECT_FALSE(r->has_tokenizer);
  EXPECT_THAT(r->notes, Contains(HasSubstr("no tokenizer.json")));
}

}  // namespace
}  // namespace mi::model
