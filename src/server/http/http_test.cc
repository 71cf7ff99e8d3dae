#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <condition_variable>
#include <future>
#include <map>
#include <mutex>
#include <thread>

#include "server/http/http_server.h"
#include "server/http/listener.h"
#include "server/http/trace.h"

namespace mi::server {
namespace {

using namespace std::chrono_literals;

class Client {
 public:
  explicit Client(int port, int receive_buffer = 0) : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
    if (receive_buffer) ::setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof(receive_buffer));
    timeval patience{20, 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_port = htons(uint16_t(port));
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = ::connect(fd_, reinterpret_cast<sockaddr*>(&at), sizeof(at)) == 0;
  }
  ~Client() { close(); }
  Client(const Client&) = delete;
  void close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }
  bool send(std::string_view s) { return ::send(fd_, s.data(), s.size(), MSG_NOSIGNAL) == ssize_t(s.size()); }
  void half_close() { ::shutdown(fd_, SHUT_WR); }
  // Until `end` has come, or the connection ended or was silent for too long.
  std::string read_to(std::string_view end) {
    size_t from = 0;
    while (got_.find(end, from) == std::string::npos) {
      from = got_.size() - std::min(got_.size(), end.size());
      if (!read_more()) break;
    }
    return got_;
  }
  std::string read_all() {
    while (read_more()) {
    }
    return got_;
  }
  // The server has closed, or reset, the connection.
  bool ended() {
    read_all();
    char byte;
    return ::recv(fd_, &byte, 1, MSG_DONTWAIT) == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
  }
  bool connected() const { return connected_; }

 private:
  bool read_more() {
    char buffer[4096];
    const ssize_t n = ::recv(fd_, buffer, sizeof(buffer), 0);
    if (n <= 0) return false;
    got_.append(buffer, size_t(n));
    return true;
  }
  int fd_;
  bool connected_;
  std::string got_;
};

// A server whose handler keeps the exchanges for the test to answer; /now is answered at once.
class Http : public testing::Test {
 protected:
  void start(HttpLimits limits) {
    HttpHandlers h;
    h.early = [](const HttpRequest& r) { return r.path == "/no" ? EarlyAnswer{401, "refused", {}} : EarlyAnswer{}; };
    h.handle = [this](std::shared_ptr<Exchange> e) {
      if (e->request().path == "/now") return e->respond(200, "text/plain", "now:" + e->request().body);
      std::lock_guard lock(mutex_);
      e->on_gone([this, path = e->request().path] {
        std::lock_guard lock2(mutex_);
        gone_.push_back(path);
        changed_.notify_all();
      });
      exchanges_[e->request().path] = std::move(e);
      changed_.notify_all();
    };
    h.error_body = [](int status, const std::string& message) { return std::to_string(status) + " " + message; };
    h.done = [this](const AccessRecord& r) {
      std::lock_guard lock(mutex_);
      ends_.push_back({r.status, r.end});
      changed_.notify_all();
    };
    auto listener = open_listener("127.0.0.1", 0);
    ASSERT_TRUE(listener.ok());
    port_ = bound_address(*listener).port;
    server_ = HttpServer::start(*listener, limits, std::move(h));
  }
  void TearDown() override {
    {
      std::lock_guard lock(mutex_);
      exchanges_.clear();
    }
    server_.reset();
  }
  template <typename F>
  bool wait(F f) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, 20s, f);
  }
  template <typename F>
  bool poll_for(F f) {
    for (int i = 0; i < 2000; ++i) {
      if (f()) return true;
      std::this_thread::sleep_for(10ms);
    }
    return false;
  }
  std::shared_ptr<Exchange> exchange(const std::string& path) {
    EXPECT_TRUE(wait([&] { return exchanges_.contains(path); })) << path;
    std::lock_guard lock(mutex_);
    return exchanges_[path];
  }
  size_t number_gone() {
    std::lock_guard lock(mutex_);
    return gone_.size();
  }
  bool is_gone(const std::string& path) {
    return wait([&] { return std::find(gone_.begin(), gone_.end(), path) != gone_.end(); });
  }
  // All that was ended so far, once there are n.
  std::vector<std::pair<int, std::string>> ends(size_t n) {
    EXPECT_TRUE(wait([&] { return ends_.size() >= n; }));
    std::lock_guard lock(mutex_);
    return ends_;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::shared_ptr<Exchange>> exchanges_;
  std::vector<std::string> gone_;
  std::vector<std::pair<int, std::string>> ends_;
  int port_ = 0;
  std::unique_ptr<HttpServer> server_;
};

std::string get(const std::string& path, const std::string& more = "") {
  return "GET " + path + " HTTP/1.1\r\nHost: x\r\n" + more + "\r\n";
}
std::string post(const std::string& path, const std::string& body) {
  return "POST " + path + " HTTP/1.1\r\nHost: x\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}

TEST_F(Http, HalfClosedClientStillGetsItsAnswer) {
  start({});
  Client c(port_);
  c.send(post("/later", "x"));
  c.half_close();
  const auto e = exchange("/later");
  // It hears that it is not forgotten, and stays: that tells it from one that is gone.
  EXPECT_EQ(c.read_to("\r\n\r\n"), "HTTP/1.1 100 Continue\r\n\r\n");
  std::this_thread::sleep_for(300ms);
  EXPECT_EQ(number_gone(), 0u);
  e->respond(200, "text/plain", "late answer");
  EXPECT_TRUE(c.read_all().ends_with("late answer"));
}

TEST_F(Http, HalfClosedClientStillGetsItsStream) {
  start({});
  Client c(port_);
  c.send(get("/stream"));
  c.half_close();
  const auto e = exchange("/stream");
  e->begin_stream("text/event-stream");
  for (int i = 0; i < 3; ++i) {
    e->write("data: " + std::to_string(i) + "\n\n");
    std::this_thread::sleep_for(120ms);
  }
  e->end_stream();
  const std::string all = c.read_all();
  EXPECT_NE(all.find("data: 2"), std::string::npos);
  EXPECT_TRUE(all.ends_with("0\r\n\r\n"));
}

TEST_F(Http, ClientThatLeavesIsNoticedWithoutAWrite) {
  start({});
  for (const char* path : {"/a", "/b"}) {
    Client c(port_);
    c.send(get(path));
    const auto e = exchange(path);
    if (path[1] == 'b') {
      e->begin_stream("text/event-stream");
      c.read_to("\r\n\r\n");
    }
    c.close();
    EXPECT_TRUE(is_gone(path));
  }
  // Who waits for tokens hears of it first; the exchange is counted and logged when it ends.
  EXPECT_EQ(ends(2), (std::vector<std::pair<int, std::string>>{{kClientClosed, "client_gone"}, {200, "client_gone"}}));
  EXPECT_EQ(server_->counters().clients_gone, 2u);
}

TEST_F(Http, AnswerThatComesAfterItsClientLeftIsNone) {
  start({});
  Client c(port_);
  c.send(get("/a"));
  const auto e = exchange("/a");
  c.close();
  EXPECT_TRUE(is_gone("/a"));
  e->respond(200, "text/plain", "for nobody");
  EXPECT_EQ(ends(1)[0], (std::pair<int, std::string>(kClientClosed, "client_gone")));
}

TEST_F(Http, ClientThatLeavesAfterPipeliningIsNoticed) {
  start({});
  Client c(port_);
  c.send(get("/first") + get("/second"));
  exchange("/first");
  c.close();
  EXPECT_TRUE(is_gone("/first"));
}

TEST_F(Http, OldProtocolClientThatLeavesIsNoticed) {
  start({});
  Client c(port_);
  c.send("GET /old HTTP/1.0\r\n\r\n");
  exchange("/old");
  c.close();
  EXPECT_TRUE(is_gone("/old"));
}

TEST_F(Http, SilentEventStreamGetsComments) {
  HttpLimits l;
  l.keep_alive_seconds = 1;
  start(l);
  Client c(port_);
  c.send(get("/stream"));
  const auto e = exchange("/stream");
  e->begin_stream("text/event-stream");
  EXPECT_NE(c.read_to(": keep-alive\n\n").find("\r\n\r\ne\r\n: keep-alive\n\n\r\n"), std::string::npos);
  e->write("data: x\n\n");
  e->end_stream();
  EXPECT_TRUE(c.read_to("0\r\n\r\n").ends_with("9\r\ndata: x\n\n\r\n0\r\n\r\n"));
}

TEST_F(Http, OtherAnswersGetNoComments) {
  HttpLimits l;
  l.keep_alive_seconds = 1;
  start(l);
  Client c(port_);
  c.send(get("/whole"));
  const auto e = exchange("/whole");
  std::this_thread::sleep_for(1500ms);
  e->respond(200, "text/plain", "body");
  EXPECT_EQ(c.read_to("body").find("keep-alive\n"), std::string::npos);
}

TEST_F(Http, SlowReaderIsCutOffAndOthersGoOn) {
  HttpLimits l;
  l.queued_bytes = 1 << 20;
  start(l);
  Client slow(port_, 4096), other(port_);
  slow.send(get("/slow"));
  const auto e = exchange("/slow");
  e->begin_stream("text/event-stream");
  const std::string piece(64 << 10, 'x');
  EXPECT_TRUE(poll_for([&] {
    e->write(piece);
    return server_->counters().slow_readers == 1;
  }));
  EXPECT_TRUE(is_gone("/slow"));
  EXPECT_EQ(ends(1)[0], (std::pair<int, std::string>(200, "slow_reader")));
  other.send(get("/now"));
  EXPECT_TRUE(other.read_to("now:").ends_with("now:"));
  EXPECT_TRUE(poll_for([&] { return server_->counters().open == 1; }));
}

TEST_F(Http, EventLargerThanTheLimitReachesAReaderThatReads) {
  HttpLimits l;
  l.queued_bytes = 4096;
  start(l);
  Client c(port_);
  c.send(get("/stream"));
  const auto e = exchange("/stream");
  e->begin_stream("text/event-stream");
  const std::string large(size_t(16) << 20, 'x');  // more than the kernel holds for a client, too
  for (int i = 0; i < 3; ++i) {
    e->write(large);
    e->write("data: small " + std::to_string(i) + "\n\n");
    c.read_to("small " + std::to_string(i));
  }
  e->end_stream();
  EXPECT_TRUE(c.read_all().ends_with("0\r\n\r\n"));
  EXPECT_EQ(ends(1)[0], (std::pair<int, std::string>(200, "complete")));
}

TEST_F(Http, ManySmallEventsAtOnceAreNoSlowReader) {
  HttpLimits l;
  l.queued_bytes = 4096;
  start(l);
  Client c(port_);
  c.send(get("/stream"));
  const auto e = exchange("/stream");
  e->begin_stream("text/event-stream");
  // The io thread stands still meanwhile, so that it finds all of them at once.
  std::promise<void> written;
  server_->ping([&] { written.get_future().wait(); });
  for (int i = 0; i < 1000; ++i) e->write("data: " + std::string(50, 'x') + "\n\n");
  written.set_value();
  e->write("data: last\n\n");
  e->end_stream();
  EXPECT_TRUE(c.read_to("0\r\n\r\n").find("data: last") != std::string::npos);
  EXPECT_EQ(ends(1)[0], (std::pair<int, std::string>(200, "complete")));
}

TEST_F(Http, ReaderThatTakesNothingIsCutOffInTime) {
  HttpLimits l;
  l.write_seconds = 1;
  start(l);
  Client slow(port_, 4096);
  slow.send(get("/slow"));
  exchange("/slow")->respond(200, "text/plain", std::string(size_t(64) << 20, 'x'));
  EXPECT_TRUE(is_gone("/slow"));
  EXPECT_EQ(server_->counters().slow_readers, 1u);
}

TEST_F(Http, RequestThatDoesNotArriveIsTimedOut) {
  HttpLimits l;
  l.read_seconds = 1;
  start(l);
  Client head(port_), body(port_), dripping(port_), other(port_);
  head.send("GET /now HTT");
  body.send("POST /now HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc");
  std::thread drip([&] {
    for (const char c : std::string("POST /now HTTP/1.1\r\nHost: x\r\nX-Long: 0123456789"))
      if (!dripping.send({&c, 1}) || (std::this_thread::sleep_for(100ms), false)) break;
  });
  other.send(get("/now"));
  EXPECT_TRUE(other.read_to("now:").ends_with("now:"));
  for (Client* c : {&head, &body, &dripping}) EXPECT_TRUE(c->read_all().starts_with("HTTP/1.1 408 "));
  drip.join();
  EXPECT_EQ(server_->counters().timeouts, 3u);
}

TEST_F(Http, LimitsOfHeadersAndBodies) {
  HttpLimits l;
  l.header_bytes = 4096;
  l.header_fields = 20;
  l.body_bytes = 1000;
  start(l);
  std::string many, chunked = "POST /now HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
  for (int i = 0; i < 40; ++i) many += "H" + std::to_string(i) + ": 1\r\n";
  for (int i = 0; i < 20; ++i) chunked += "64\r\n" + std::string(100, 'y') + "\r\n";
  const std::string cases[][2] = {
      {get("/now", "Big: " + std::string(8000, 'a') + "\r\n"), "431"},
      {get(std::string(8000, '/')), "431"},
      {get("/now", many), "431"},
      {"POST /now HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n", "413"},
      {chunked, "413"},
      {"POST /now HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n", "400"},
      {"POST /now HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", "400"},
      {"POST /now HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef", "400"},
      {"POST /now HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "400"},
      {"POST /now HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "400"},
      {"POST /now HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, identity\r\n\r\n", "400"},
      {"POST /now HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "400"},
      {"GET /now HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", "400"},
      {"GET /now HTTP/1.1\r\n\r\n", "400"},
      {"GET /now HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n", "400"},
      {"GET /now HTTP/1.1\r\nHost: x\r\nB\xff\xfe: \x01\r\n\r\n", "400"},
      {"GET /n\x01w HTTP/1.1\r\nHost: x\r\n\r\n", "400"},
      {"\x16\x03\x01\x02\x00\x01\x00", "400"},
      {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "400"},
      {post("/no", std::string(500, 'x')), "401"},
  };
  for (const auto& [request, status] : cases) {
    Client c(port_);
    c.send(request);
    EXPECT_TRUE(c.read_all().starts_with("HTTP/1.1 " + status)) << request.substr(0, 80) << "\n" << c.read_all();
    EXPECT_TRUE(c.ended());
  }
  Client c(port_);
  c.send(post("/now", std::string(1000, 'z')));
  EXPECT_TRUE(c.read_to("zz").starts_with("HTTP/1.1 200 "));
}

TEST_F(Http, BodiesOfAllClientsAreBoundedTogether) {
  HttpLimits l;
  l.body_bytes = 100 << 10;
  l.all_body_bytes = 250 << 10;
  start(l);
  const std::string body(90 << 10, 'b');
  Client a(port_), b(port_), c(port_);
  a.send(post("/a", body));
  b.send(post("/b", body));
  const auto first = exchange("/a");
  exchange("/b");
  c.send(post("/c", body));
  EXPECT_TRUE(c.read_all().starts_with("HTTP/1.1 503 "));
  first->respond(200, "text/plain", "done");
  a.read_to("done");
  Client d(port_);
  d.send(post("/d", body));
  exchange("/d");
}

TEST_F(Http, KeptConnectionsMakeRoom) {
  HttpLimits l;
  l.max_connections = 3;
  start(l);
  Client silent(port_), first(port_), second(port_);
  for (Client* c : {&first, &second}) {
    c->send(get("/now"));
    EXPECT_TRUE(c->read_to("now:").ends_with("now:"));
  }
  Client fresh(port_);
  fresh.send(get("/now"));
  EXPECT_TRUE(fresh.read_to("now:").ends_with("now:"));
  EXPECT_TRUE(first.ended());
  EXPECT_EQ(server_->counters().evicted, 1u);
  // Who has said nothing yet is heard, and others that were answered stay.
  for (Client* c : {&silent, &second}) {
    c->send(post("/now", "still here"));
    EXPECT_TRUE(c->read_to("still here").ends_with("now:still here"));
  }
}

TEST_F(Http, BurstBeyondTheLimitHears503) {
  HttpLimits l;
  l.max_connections = 4;
  l.spare_connections = 2;
  start(l);
  std::vector<std::unique_ptr<Client>> burst;
  for (int i = 0; i < 100; ++i) burst.push_back(std::make_unique<Client>(port_));  // all at once, then all speak
  for (int i = 0; i < 4; ++i) {
    burst[size_t(i)]->send(post("/later" + std::to_string(i), "x"));
    exchange("/later" + std::to_string(i));
  }
  for (size_t i = 4; i < burst.size(); ++i) burst[i]->send(post("/now", "x"));
  for (size_t i = 4; i < burst.size(); ++i) {
    const std::string answer = burst[i]->read_all();
    EXPECT_TRUE(answer.starts_with("HTTP/1.1 503 ")) << answer;
    EXPECT_NE(answer.find("\r\nRetry-After: 1\r\n"), std::string::npos);
  }
  EXPECT_EQ(server_->counters().crowded, 96u);
  EXPECT_EQ(server_->counters().evicted, 0u);
  EXPECT_EQ(server_->counters().turned_away, 0u);
  // Those that were refused hold up no probe, and the answers go on.
  Client probe(port_);
  probe.send(get("/now"));
  EXPECT_TRUE(probe.read_all().ends_with("now:"));
  for (int i = 0; i < 4; ++i) {
    exchange("/later" + std::to_string(i))->respond(200, "text/plain", "done");
    EXPECT_TRUE(burst[size_t(i)]->read_to("done").ends_with("done"));
  }
}

TEST_F(Http, BodiesThatDoNotArriveHoldNoPlace) {
  HttpLimits l;
  l.max_connections = 2;
  start(l);
  Client a(port_), b(port_);
  for (Client* c : {&a, &b}) c->send("POST /now HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc");
  EXPECT_TRUE(poll_for([&] {  // refused while they may yet arrive
    Client fresh(port_);
    fresh.send(post("/now", "x"));
    return fresh.read_to("now:").ends_with("now:x");
  }));
  EXPECT_EQ(server_->counters().evicted, 1u);
}

TEST_F(Http, FloodOfSilentConnectionsShutsNobodyOut) {
  HttpLimits l;
  l.max_connections = 4;
  l.spare_connections = l.heard_connections = 0;
  start(l);
  Client busy(port_);
  busy.send(get("/busy"));
  exchange("/busy");
  std::vector<std::unique_ptr<Client>> idle;
  for (int i = 0; i < 20; ++i) {
    idle.push_back(std::make_unique<Client>(port_));
    if (i % 2) idle.back()->send("GET /half");
  }
  Client fresh(port_);
  fresh.send(get("/now"));
  EXPECT_TRUE(fresh.read_to("now:").ends_with("now:"));
  EXPECT_TRUE(idle[0]->ended());
  EXPECT_GE(server_->counters().evicted, 17u);
  EXPECT_EQ(number_gone(), 0u);  // who is being answered is not put out
}

TEST_F(Http, ProbesGetThroughWhenEveryPlaceIsBusy) {
  HttpLimits l;
  l.max_connections = 2;
  l.spare_connections = l.heard_connections = 1;
  start(l);
  Client a(port_), b(port_);
  a.send(get("/a"));
  b.send(get("/b"));
  exchange("/a");
  exchange("/b");
  {
    Client probe(port_);
    probe.send(get("/now"));
    EXPECT_TRUE(probe.read_all().ends_with("now:"));
  }
  EXPECT_TRUE(poll_for([&] { return server_->counters().open == 2; }));
  {
    Client work(port_);
    work.send(post("/now", "x"));
    const std::string answer = work.read_all();
    EXPECT_TRUE(answer.starts_with("HTTP/1.1 503 ")) << answer;
    EXPECT_NE(answer.find("Retry-After"), std::string::npos);
  }
  EXPECT_TRUE(poll_for([&] { return server_->counters().open == 2; }));
  Client spare(port_);
  spare.send(get("/spare"));
  exchange("/spare");
  {
    Client heard(port_);
    heard.send(get("/now"));
    EXPECT_TRUE(heard.read_all().starts_with("HTTP/1.1 503 "));
  }
  EXPECT_TRUE(poll_for([&] { return server_->counters().open == 3; }));
  EXPECT_EQ(server_->counters().turned_away, 0u);
}

TEST_F(Http, EndWaitsForAnswersAndThenCutsThem) {
  start({});
  Client a(port_), b(port_), idle(port_);
  a.send(get("/a"));
  b.send(get("/b"));
  const auto e = exchange("/a");
  exchange("/b");
  server_->stop_accepting();
  EXPECT_TRUE(idle.ended());
  EXPECT_FALSE(Client(port_).connected());
  std::thread answer([&] {
    std::this_thread::sleep_for(200ms);
    e->respond(200, "text/plain", "in time");
  });
  server_->shut_down(1);
  answer.join();
  EXPECT_TRUE(a.read_all().ends_with("in time"));
  EXPECT_TRUE(b.ended());
  EXPECT_EQ(ends(2)[1], (std::pair<int, std::string>(0, "shutdown")));
}

TEST(Listener, BoundIsTakenButRefusesUntilItListens) {
  const auto fd = bind_listener("127.0.0.1", 0);
  ASSERT_TRUE(fd.ok());
  const int port = bound_address(*fd).port;
  EXPECT_GT(port, 0);
  EXPECT_FALSE(Client(port).connected());
  ASSERT_TRUE(listen_on(*fd).ok());
  EXPECT_TRUE(Client(port).connected());
  EXPECT_TRUE(listen_on(*fd).ok());
  EXPECT_EQ(bind_listener("127.0.0.1", port).error().code(), ErrorCode::kEnvironment);
  ::close(*fd);
}

TEST(Listener, AddressThatIsNoneOrTaken) {
  EXPECT_EQ(open_listener("nowhere", 0).error().code(), ErrorCode::kUsage);
  const auto fd = open_listener("127.0.0.1", 0);
  ASSERT_TRUE(fd.ok());
  const auto at = bound_address(*fd);
  EXPECT_EQ(at.host, "127.0.0.1");
  const auto again = open_listener("127.0.0.1", at.port);
  ASSERT_FALSE(again.ok());
  EXPECT_EQ(again.error().code(), ErrorCode::kEnvironment);
  ::close(*fd);
}

TEST(Trace, OnlyTheStandardForm) {
  const std::string good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
  const auto t = parse_traceparent(good);
  ASSERT_TRUE(t);
  EXPECT_EQ(t->trace_id, "4bf92f3577b34da6a3ce929d0e0e4736");
  EXPECT_EQ(t->span_id, "00f067aa0ba902b7");
  EXPECT_TRUE(parse_traceparent("01" + good.substr(2) + "-more"));
  for (const std::string& bad : std::vector<std::string>{
           "", good.substr(1), good + "-more", "ff" + good.substr(2), "00-" + std::string(32, '0') + good.substr(35),
           good.substr(0, 36) + std::string(16, '0') + "-01", "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
           good.substr(0, 53) + "zz", std::string(55, '-')})
    EXPECT_FALSE(parse_traceparent(bad)) << bad;
}

TEST(Trace, RequestIdsThatWouldHurtALogAreReplaced) {
  EXPECT_EQ(request_id_of("abc-1_2.3"), "abc-1_2.3");
  for (const std::string& bad : std::vector<std::string>{"", "a b", "a\"b", "a\nb", std::string(129, 'a'), "\xc3\xa4"})
    EXPECT_TRUE(request_id_of(bad).starts_with("req-")) << bad;
  EXPECT_NE(new_request_id(), new_request_id());
}

}  // namespace
}  // namespace mi::server
