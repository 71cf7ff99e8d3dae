// Whole checkpoints: every fixture from either config spelling, broken ones, the contents of the output.

#include "model/export.h"

#include <gmock/gmock.h>

#include "model/testing.h"

namespace mi::model {
namespace {

using namespace testing;
using ::testing::HasSubstr;

std::vector<std::string> folders(const std::string& name) {
  std::vector<std::string> out;
  for (const auto& e : fs::directory_iterator(data(name)))
    if (e.is_directory()) out.push_back(e.path().filename().string());
  std::sort(out.begin(), out.end());
  return out;
}

class Golden : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, Golden, ::testing::ValuesIn(folders("goldens")), [](const auto& i) { return i.param; });

TEST_P(Golden, EitherConfigSpellingGivesTheSameModel) {
  TempDir tmp;
  const Path source = tmp / "source";
  fs::copy(data("goldens") / GetParam(), source);
  auto a = export_to(source, tmp / "a", [](ExportOptions& o) { o.name = "m"; });
  ASSERT_TRUE(a.ok()) << a.error().message();
  fs::copy_file(source / "config.released.json", source / "config.json", fs::copy_options::overwrite_existing);
  auto b = export_to(source, tmp / "b", [](ExportOptions& o) { o.name = "m"; });
  ASSERT_TRUE(b.ok()) << b.error().message();
  EXPECT_EQ(read_text(tmp / "a" / "model.mir"), read_text(tmp / "b" / "model.mir"));
  EXPECT_EQ(read_text(tmp / "a" / "weights" / "00001.safetensors"),
            read_text(tmp / "b" / "weights" / "00001.safetensors"));
  const ir::MirDir m = open_mir(tmp / "a");
  EXPECT_EQ(m.graph.info.vocab, 512);
  EXPECT_EQ(m.graph.info.eos_ids, std::vector<int64_t>{511});
  EXPECT_TRUE(m.provenance["source"]["files"].contains("config.json"));
  EXPECT_EQ(read_text(tmp / "a" / ir::kSourceConfig), read_text(data("goldens") / GetParam() / "config.json"));
  EXPECT_EQ(read_text(tmp / "b" / ir::kSourceConfig), read_text(source / "config.released.json"));
}

class Broken : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, Broken, ::testing::ValuesIn(folders("broken")), [](const auto& i) { return i.param; });

TEST_P(Broken, IsRefusedByNameAndLeavesNothing) {
  TempDir tmp;
  const Path dir = data("broken") / GetParam();
  const Json expect = load_json(dir / "expect.json");
  const Path open = dir / expect["open"].get<std::string>();
  auto r = export_to(open, tmp / "out");
  if (expect["must"] == "load") {
    EXPECT_TRUE(r.ok()) << r.error().message();
    return;
  }
  ASSERT_FALSE(r.ok());
  EXPECT_EQ(r.error().code(), ErrorCode::kBadInput);
  for (const Json& word : expect["mention"]) EXPECT_THAT(r.error().message(), HasSubstr(word.get<std::string>()));
  EXPECT_TRUE(fs::is_empty(tmp.path()));
}

}  // namespace
}  // namespace mi::model
