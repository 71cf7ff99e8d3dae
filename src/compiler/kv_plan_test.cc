#include "compiler/kv_plan.h"

#include <gtest/gtest.h>

namespace mi::compiler {
namespace {

TEST(KvPlan, WorkedExample) {
  EXPECT_EQ(kv_bytes(48, 8, 128, 4096, 32, 1), int64_t(12884901888));
  EXPECT_EQ(kv_plan_text(48, 8, 128, 4096, 32, 1),
            "2 x 48 layers x 8 KV heads x 128 x 4096 tokens x 32 sequences x 1 byte = 12.88 GB");
}

TEST(KvPlan, SumsLayersOfSeveralForms) {
  std::vector<artifact::LayerCache> caches(4, {2, 16, 16, 0, 0});
  caches[3] = {2, 24, 16, 8, 0};
  EXPECT_EQ(stored_kv_bytes_per_token(caches, kernels::KvKind::kBF16), 2 * (3 * 2 * 32 + 2 * 40 + 8));
  EXPECT_EQ(stored_kv_bytes_per_token(caches, kernels::KvKind::kF32), 4 * (3 * 2 * 32 + 2 * 40 + 8));
  // int8: a float scale per head for K and for V; index keys stay bf16.
  EXPECT_EQ(stored_kv_bytes_per_token(caches, kernels::KvKind::kI8), 3 * 2 * 32 + 2 * 40 + 2 * 8 + 4 * 4 * 4);
  const std::string text = kv_plan_text(caches, 100, 10);
  EXPECT_NE(text.find("2 x 3 layers x 2 KV heads x 16 x 100 tokens x 10 sequences x 2 bytes = 384.00 kB"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("1 layers x 2 KV heads x (24 + 16)"), std::string::npos) << text;
  EXPECT_NE(text.find("index keys of 1 layers"), std::string::npos) << text;
}

}  // namespace
}  // namespace mi::compiler
