#include "text/tokenizer.h"

#include <gtest/gtest.h>
namespace mi::text {
TEST(Tok, Hi) {
  auto t = Tokenizer::load(std::string(MI_SOURCE_DIR) + "/tests/data/text/mini-m3/tokenizer.json");
  ASSERT_TRUE(t.ok()) << t.error().message();
  auto ids = t.value()->encode("<|user|>What is 7+5?<|end|>", true);
  ASSERT_TRUE(ids.ok());
  EXPECT_EQ(t.value()->decode(*ids, false).value(), "<|user|>What is 7+5?<|end|>");
}
}
