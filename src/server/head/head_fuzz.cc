// libFuzzer: heads of requests. However one arrives it is judged alike, and what is accepted says in one way only for
// whom it is and where its body ends.
#include <algorithm>

#include "base/check.h"
#include "server/head/head_reader.h"

namespace {

using namespace mi::server;
namespace http = boost::beast::http;

constexpr HeadLimits kLimits{4096, 32};

struct Judged {
  bool done = false;
  int status = 0;
  size_t used = 0;
};

Judged judge(HeadReader& r, std::string_view bytes, size_t step) {
  Judged j;
  for (size_t come = 0; come < bytes.size() && !r.done() && !r.refusal();) {
    come = std::min(bytes.size(), come + step);
    j.used += r.push(bytes.substr(j.used, come - j.used));
    MI_CHECK(j.used <= come);
  }
  j.done = r.done();
  j.status = r.refusal() ? r.refusal()->status : 0;
  return j;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  HeadReader whole(kLimits), single(kLimits);
  const Judged a = judge(whole, bytes, std::max<size_t>(size, 1)), b = judge(single, bytes, 1);
  // When a fault is found may differ, or that it is while more is waited for.
  MI_CHECK_EQ(a.done && a.status == 0, b.done && b.status == 0);
  if (!a.done || a.status != 0) return 0;
  MI_CHECK_EQ(a.used, b.used);
  const auto& head = whole.parser().get();
  MI_CHECK(a.used <= kLimits.bytes && size_t(std::distance(head.begin(), head.end())) <= kLimits.fields);
  const size_t hosts = head.count(http::field::host), codings = head.count(http::field::transfer_encoding);
  MI_CHECK(hosts == 1 || (hosts == 0 && head.version() == 10));
  MI_CHECK(codings + head.count(http::field::content_length) <= 1);
  MI_CHECK_EQ(codings == 1, whole.parser().chunked());
  MI_CHECK(bytes.substr(0, a.used).ends_with("\r\n\r\n"));
  return 0;
}
