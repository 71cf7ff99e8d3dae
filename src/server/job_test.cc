#include "server/job.h"

#include <gtest/gtest.h>

namespace mi::server {
namespace {

TEST(Refusals, RetryAfterIsWhatTheRuntimeExpects) {
  runtime::Admission a;
  a.refusal = runtime::Refusal::kQueueFull;
  a.retry_after = 12.3;
  const ApiError e = refusal_error(a, {});
  EXPECT_EQ(e.status, 429);
  EXPECT_EQ(retry_after(e.retry_after), "13");
  EXPECT_EQ(retry_after(0), "1") << "at once would only be refused again";
  EXPECT_EQ(retry_after(12), "12");
  EXPECT_EQ(retry_after(1e300), "86400");
}

}  // namespace
}  // namespace mi::server
