#include "server/cors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace mi::server {
namespace {

using testing::HasSubstr;

HttpRequest from(const std::string& origin, const std::string& method = "POST") {
  HttpRequest r;
  r.method = method;
  r.origin = origin;
  return r;
}
HttpRequest question(const std::string& origin, const std::string& headers = "") {
  HttpRequest r = from(origin, "OPTIONS");
  r.asked_method = "POST";
  r.asked_headers = headers;
  return r;
}
std::string value(const Headers& h, const std::string& name) {
  for (const auto& [n, v] : h)
    if (n == name) return v;
  return "";
}

TEST(CorsRules, NobodyUnlessAsked) {
  const Cors none;
  EXPECT_TRUE(none.headers(from("https://a.example")).empty());
  EXPECT_FALSE(none.preflight(question("https://a.example")));
  EXPECT_TRUE(Cors::make({})->headers(from("https://a.example")).empty());
}

TEST(CorsRules, OnlyTheSitesThatAreNamed) {
  const Cors c = Cors::make({"https://a.example", "http://localhost:3000", "https://b.example:443"}).value();
  for (const char* good : {"https://a.example", "http://localhost:3000", "https://b.example"}) {
    const Headers h = c.headers(from(good));
    EXPECT_EQ(value(h, "Access-Control-Allow-Origin"), good);
    EXPECT_EQ(value(h, "Vary"), "Origin");
    EXPECT_THAT(value(h, "Access-Control-Expose-Headers"), HasSubstr("X-Request-Id"));
    EXPECT_TRUE(c.preflight(question(good)));
  }
  for (const char* bad : {"", "null", "https://a.example.evil", "http://a.example", "https://a.example:8443",
                          "https://A.EXAMPLE", "http://localhost", "*"}) {
    const Headers h = c.headers(from(bad));
    EXPECT_EQ(value(h, "Access-Control-Allow-Origin"), "") << bad;
    EXPECT_EQ(value(h, "Vary"), "Origin") << bad;
    EXPECT_FALSE(c.preflight(question(bad))) << bad;
  }
}

TEST(CorsRules, AllSites) {
  const Cors c = Cors::make({"https://a.example", "*"}).value();
  EXPECT_EQ(value(c.headers(from("https://who.ever")), "Access-Control-Allow-Origin"), "*");
  EXPECT_EQ(value(c.headers(from("https://who.ever")), "Vary"), "");
  EXPECT_TRUE(c.headers(from("")).empty());
}

TEST(CorsRules, TheQuestionAndItsAnswer) {
  const Cors c = Cors::make({"*"}).value();
  const auto a = c.preflight(question("https://a.example", "x-stainless-os, authorization"));
  ASSERT_TRUE(a);
  EXPECT_EQ(a->status, 204);
  EXPECT_EQ(value(a->headers, "Access-Control-Allow-Methods"), "GET, HEAD, POST");
  for (const char* header : {"Authorization", "Content-Type", "X-Api-Key", "Anthropic-Version", "x-stainless-os"})
    EXPECT_THAT(value(a->headers, "Access-Control-Allow-Headers"), HasSubstr(header));
  // What is no list of names does not get into a header.
  EXPECT_THAT(
      value(c.preflight(question("https://a.example", "x\r\nSet-Cookie: a"))->headers, "Access-Control-Allow-Headers"),
      testing::Not(HasSubstr("Set-Cookie")));
  // An OPTIONS that is no such question, and a question of no site, go their usual way.
  EXPECT_FALSE(c.preflight(from("https://a.example", "OPTIONS")));
  EXPECT_FALSE(c.preflight(question("")));
  HttpRequest r = question("https://a.example");
  r.method = "POST";
  EXPECT_FALSE(c.preflight(r));
}

TEST(CorsRules, WhatNoBrowserSendsIsRefused) {
  for (const char* bad :
       {"", "a.example", "https://", "https://a.example/", "https://a.example/path", "https://A.example", "null",
        "https://a b", "https://u@a.example", "://a", "https://a.example\r\nX: y"}) {
    const auto c = Cors::make({bad});
    ASSERT_FALSE(c.ok()) << bad;
    EXPECT_EQ(c.error().code(), ErrorCode::kUsage);
  }
  for (const char* good :
       {"https://a.example", "http://[::1]:8080", "chrome-extension://abcdefgh", "tauri://localhost"})
    EXPECT_TRUE(Cors::make({good}).ok()) << good;
}

}  // namespace
}  // namespace mi::server
