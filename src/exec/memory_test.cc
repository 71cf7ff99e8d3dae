#include "exec/memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

namespace mi::exec {
namespace {

TEST(Region, ForgetsWholePagesOnly) {
  constexpr int64_t kBytes = 16 * 4096;
  auto r = Region::map(kBytes, "a test", false);
  ASSERT_TRUE(r.ok()) << r.error().message();
  std::memset(r->data(), 7, kBytes);
  r->forget(r->data() + 4096 + 100, 3 * 4096);  // holds two whole pages
  for (int64_t i = 0; i < kBytes; ++i)
    ASSERT_EQ(int(r->data()[i]), i >= 2 * 4096 && i < 4 * 4096 ? 0 : 7) << i;
  r->forget(r->data() + 100, 4000);
  EXPECT_EQ(int(r->data()[200]), 7);
}

TEST(Region, HugeOnesStartAtAHugePage) {
  constexpr int64_t kHuge = 2 << 20;
  const auto r = Region::map(3 * kHuge + 5, "a test");
  ASSERT_TRUE(r.ok()) << r.error().message();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(r->data()) % kHuge, 0u);
  EXPECT_TRUE(std::all_of(r->data(), r->data() + r->bytes(), [](std::byte b) { return b == std::byte(0); }));
}

}  // namespace
}  // namespace mi::exec
