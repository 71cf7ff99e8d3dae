#include "server/head/head_reader.h"

#include <gtest/gtest.h>

namespace mi::server {
namespace {

// Fed `step` bytes at a time. The status of the refusal, 200 if there is none, 0 if the head did not end.
int status_of(std::string_view head, size_t step, HeadLimits limits = {}) {
  HeadReader r(limits);
  size_t used = 0;
  for (size_t come = 0; come < head.size() && !r.done() && !r.refusal();) {
    come = std::min(head.size(), come + step);
    used += r.push(head.substr(used, come - used));
  }
  return r.refusal() ? r.refusal()->status : r.done() ? 200 : 0;
}

TEST(HeadReader, WhatTwoProgramsMayReadDifferentlyIsRefused) {
  const std::string get = "GET / HTTP/1.1\r\n", host = "Host: x\r\n", end = "\r\n";
  const std::pair<std::string, int> cases[] = {
      {get + host + end, 200},
      {get + "hOST: [::1]:8000\r\n" + end, 200},
      {get + "Host:\r\n" + end, 200},
      {get + host + "A: \t b c \r\n" + end, 200},
      {get + end, 400},
      {get + "Hosts: x\r\n" + end, 400},
      {get + host + host + end, 400},
      {get + host + "Accept: a\r\nHOST: y\r\n" + end, 400},
      {get + "Host: x, y\r\n" + end, 400},
      {get + "Host: x y\r\n" + end, 400},
      {get + "Host: u@x/p\r\n" + end, 400},
      {"GET / HTTP/1.0\r\n\r\n", 200},
      {"GET / HTTP/1.0\r\n" + host + host + end, 400},
      {get + host + "A: b\r\n c\r\n" + end, 400},
      {get + host + "A: b\r\n\tc: d\r\n" + end, 400},
      {get + host + "A:\r\n b\r\n" + end, 400},
      {get + "Host: x\r\n \r\n" + end, 400},
      {get + " A: b\r\n" + host + end, 400},
      {get + host + "A : b\r\n" + end, 400},
      {get + host + "A: b\nC: d\r\n" + end, 400},
      {get + host + "Transfer-Encoding: chunked\r\n" + end, 200},
      {get + host + "Transfer-Encoding: Chunked \r\n" + end, 200},
      {get + host + "Transfer-Encoding: gzip, chunked\r\n" + end, 400},
      {get + host + "Transfer-Encoding: gzip\r\n" + end, 400},
      {get + host + "Transfer-Encoding: chunked, gzip\r\n" + end, 400},
      {get + host + "Transfer-Encoding: chunked, chunked\r\n" + end, 400},
      {get + host + "Transfer-Encoding: chunked;a=b\r\n" + end, 400},
      {get + host + "Transfer-Encoding: \"chunked\"\r\n" + end, 400},
      {get + host + "Transfer-Encoding:\r\n" + end, 400},
      {get + host + "Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n" + end, 400},
      {get + host + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n" + end, 400},
      {get + host + "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n" + end, 400},
      {get + host + "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n" + end, 400},
      {"GET / HTTP/1.0\r\n" + host + "Transfer-Encoding: chunked\r\n" + end, 400},
      {get + host + "Content-Length: 3\r\n" + end, 200},
      {get + host + "Content-Length: 3\r\nContent-Length: 4\r\n" + end, 400},
      {get + host + "Content-Length: 3\r\nContent-Length: 3\r\n" + end, 400},
      {get + host + "Content-Length: +3\r\n" + end, 400},
      {get + host, 0},
  };
  for (const auto& [head, status] : cases)
    for (size_t step : {size_t(1), size_t(7), head.size()})
      EXPECT_EQ(status_of(head, step), status) << step << " bytes at a time:\n" << head;
}

TEST(HeadReader, LimitsHoldHoweverItArrives) {
  std::string many = "GET / HTTP/1.1\r\nHost: x\r\n", large = many;
  for (int i = 0; i < 20; ++i) many += "A: b\r\n";
  for (int i = 0; i < 9; ++i) large += "A: " + std::string(100, 'b') + "\r\n";
  const HeadLimits limits{1000, 10};
  for (size_t step : {size_t(1), size_t(64), size_t(5000)}) {
    EXPECT_EQ(status_of(many + "\r\n", step, limits), 431);
    EXPECT_EQ(status_of(large + "A: b\r\n\r\n", step, {975, 100}), 431);
    EXPECT_EQ(status_of(large, step, {900, 100}), 431) << "without an end";
    EXPECT_EQ(status_of(large + "\r\n", step, {1100, 100}), 200);
    EXPECT_EQ(status_of("GET /" + std::string(2000, 'x'), step, limits), 431);
  }
  // What follows the head is not the head's.
  EXPECT_EQ(status_of("GET / HTTP/1.1\r\nHost: x\r\n\r\n" + std::string(2000, 'x'), 5000, limits), 200);
}

TEST(HeadReader, LeavesWhatFollowsTheHead) {
  const std::string head = "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n";
  HeadReader r({});
  EXPECT_EQ(r.push(head + "abc"), head.size());
  EXPECT_TRUE(r.done());
  EXPECT_EQ(r.parser().content_length().value(), 3u);
}

}  // namespace
}  // namespace mi::server
