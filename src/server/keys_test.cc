#include "server/keys.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

namespace mi::server {
namespace {

class Keys : public testing::Test {
 protected:
  void SetUp() override { file_ = testing::TempDir() + "keys" + std::to_string(getpid()); }
  void TearDown() override { std::remove(file_.c_str()); }
  KeyRing ring(const std::string& content) {
    std::ofstream(file_) << content;
    auto r = KeyRing::read(file_);
    EXPECT_TRUE(r.ok());
    return *r;
  }
  std::string file_;
};

HttpRequest with(std::vector<std::string> authorization, std::vector<std::string> api_key = {}) {
  HttpRequest r;
  r.authorization = std::move(authorization);
  r.api_key = std::move(api_key);
  return r;
}

TEST_F(Keys, OneALineCommentsAndBlanksSkipped) {
  const KeyRing r = ring("# of the team\n\nalpha\nbeta  \r\n");
  EXPECT_EQ(r.size(), 2u);
  EXPECT_TRUE(r.admits(with({"Bearer alpha"})));
  EXPECT_TRUE(r.admits(with({"bearer beta"})));
  EXPECT_FALSE(r.admits(with({"Bearer # of the team"})));
  std::ofstream(file_) << "# nothing\n";
  EXPECT_FALSE(KeyRing::read(file_).ok());
}

TEST_F(Keys, OnlyAWholeKeyOpens) {
  const KeyRing r = ring("alpha\n");
  for (const char* a : {"", "alpha", "Bearer", "Bearer ", "Bearer  alpha", "Bearer alph", "Bearer alphaa",
                        "Bearer ALPHA", "Bearer alpha ", "Token alpha", "Basic alpha", "Basic", "Basic ===="})
    EXPECT_FALSE(r.admits(with({a}))) << a;
  EXPECT_FALSE(r.admits(with({})));
  EXPECT_FALSE(r.admits(with({"Bearer alpha", "Bearer alpha"})));
  EXPECT_FALSE(r.admits(with({"Bearer alpha"}, {"alpha"})));
  EXPECT_FALSE(r.admits(with({}, {"alpha", "alpha"})));
  EXPECT_TRUE(r.admits(with({}, {"alpha"})));
}

TEST_F(Keys, BrowserSendsItAsAPassword) {
  const KeyRing r = ring("alpha\nk\n");
  HttpRequest q = with({"Basic bWU6YWxwaGE="});  // me:alpha
  EXPECT_TRUE(r.admits(q));
  EXPECT_TRUE(r.admits(with({"Basic Oms="})));           // :k
  EXPECT_FALSE(r.admits(with({"Basic bWU6YWxwaA=="})));  // me:alph
  EXPECT_FALSE(r.admits(with({"Basic YWxwaGE="})));      // alpha, without a colon
  EXPECT_FALSE(r.admits(with({"Basic bWU6YWxwaGE"})));
  q.host = "models:8000";
  q.origin = "https://models:8000";
  EXPECT_TRUE(r.admits(q));
  for (const char* other : {"https://evil", "null", "https://models:8000.evil", "https://models"}) {
    q.origin = other;
    EXPECT_FALSE(r.admits(q)) << other;
  }
}

}  // namespace
}  // namespace mi::server
