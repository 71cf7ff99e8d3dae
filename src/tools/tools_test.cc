#include <gtest/gtest.h>

#include "tools/eval.h"
#include "tools/verify.h"

namespace mi::tools {
namespace {

TEST(EvalTest, Answers) {
  EXPECT_TRUE(answer_is_right("exact", "68", "68"));
  EXPECT_FALSE(answer_is_right("exact", "68", "6"));
  EXPECT_TRUE(answer_is_right("contains", "b", "abc"));
  const Json object = parse_json(R"({"name": "f", "arguments": {"a": 1, "b": 2}})", "x").value();
  EXPECT_TRUE(answer_is_right("json", object, R"({"arguments": {"b": 2, "a": 1}, "name": "f"})"));
  EXPECT_TRUE(answer_is_right("json", R"({"a": 1})", R"({ "a":1 })"));
  EXPECT_FALSE(answer_is_right("json", object, "no json"));
}

TEST(VerifyTest, TextNamesTheFirstDifference) {
  VerifyReport r;
  r.rows.push_back({"seq0 layer 0 output", 0.1, 0.2, true, true, "max abs"});
  r.rows.push_back({"seq0 layer 1 output", 0.3, 0.2, false, true, "max abs"});
  r.first_bad = "seq0 layer 1 output";
  EXPECT_NE(verify_text(r).find("NOT verified: the first difference is seq0 layer 1 output"), std::string::npos);
  EXPECT_FALSE(verify_json(r)["ok"].get<bool>());
}

}  // namespace
}  // namespace mi::tools
