#include "runtime/queue_rate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <deque>
#include <functional>
#include <vector>

#include "base/util.h"

namespace mi::runtime {
namespace {

// A server of `places`, each answer of which takes service(i) seconds, in steps of 10 ms. Arrivals at `rate` a second,
// seeded. Requests that would wait longer than `most` are refused (0: none).
struct Simulation {
  int64_t places = 8;
  double rate = 1, most = 0, seconds = 600;
  std::function<double(uint64_t)> service = [](uint64_t) { return 2.0; };

  struct Waited {
    double at, expected, waited;
  };
  std::vector<Waited> waited;
  std::vector<double> refused_at, retry_after;
  int64_t served = 0;

  void run() {
    struct Asked {
      double at, expected;
      uint64_t id;
    };
    QueueRate rate_of(places);
    std::deque<Asked> queue;
    std::vector<double> ends;
    double next = 0;
    uint64_t id = 0;
    for (double now = 0; now < seconds; now += 0.01) {
      while (next <= now) {
        const int64_t free = queue.empty() ? places - int64_t(ends.size()) : 0;
        const double expected =
            double(starts_until({{0, int64_t(queue.size())}}, 0, free)) * rate_of.seconds_per_start();
        if (most > 0 && expected > most) {
          refused_at.push_back(next);
          retry_after.push_back(expected - most);
        } else {
          queue.push_back({next, expected, id});
        }
        ++id;
        next += -std::log(1 - random_unit(7, id)) / rate;
      }
      served += std::erase_if(ends, [&](double e) { return e <= now; });
      int64_t started = 0;
      while (!queue.empty() && int64_t(ends.size()) < places) {
        waited.push_back({queue.front().at, queue.front().expected, now - queue.front().at});
        ends.push_back(now + service(queue.front().id));
        queue.pop_front();
        ++started;
      }
      if (!ends.empty()) rate_of.step(started, int64_t(queue.size()), now);
    }
  }
};

TEST(QueueRate, ForetellsTheWaitOfEachRequest) {
  for (const double spread : {0.0, 1.0, 1.9}) {
    Simulation s{.rate = 6, .seconds = 120, .service = [spread](uint64_t i) {
                   return 2 + spread * (2 * random_unit(3, i) - 1);
                 }};
    s.run();
    int64_t told = 0;
    for (const auto& w : s.waited) {
      if (w.at < 5) continue;
      ++told;
      EXPECT_NEAR(w.expected, w.waited, 1.0 + (0.1 + spread / 8) * w.waited) << spread << " at " << w.at;
    }
    EXPECT_GT(told, 300);
  }
}

TEST(QueueRate, BeyondCapacityRequestsAreRefusedAndTheOthersWaitNoLongerThanAllowed) {
  for (const double load : {1.5, 4.0}) {
    Simulation s{.rate = 4 * load, .most = 5, .service = [](uint64_t i) { return 1 + 2 * random_unit(3, i); }};
    s.run();
    for (const auto& w : s.waited) EXPECT_LT(w.waited, 5 * 1.4) << load << " at " << w.at;
    EXPECT_GT(double(s.served), 0.97 * 4 * 600) << "no place stays empty for it";
    EXPECT_GT(double(s.refused_at.size()), 0.8 * 4 * (load - 1) * 600);
    EXPECT_LT(s.refused_at.front(), 40);
  }
}

TEST(QueueRate, BelowCapacityNobodyIsRefused) {
  Simulation s{.rate = 0.8 * 4, .most = 5, .service = [](uint64_t i) { return 1 + 2 * random_unit(3, i); }};
  s.run();
  EXPECT_TRUE(s.refused_at.empty());
  EXPECT_GT(s.waited.size(), 1800u);
}

TEST(QueueRate, WhoComesBackWhenToldIsTaken) {
  // One place, answers of a second: the queue holds 5. Each second one leaves it, and who is refused first needs just
  // that.
  QueueRate r(1);
  double now = 0;
  for (int i = 0; i < 20; ++i) r.step(1, 5, now += 1);
  const double wait = double(starts_until({{0, 5}}, 0, 0)) * r.seconds_per_start();
  EXPECT_NEAR(wait, 6, 0.01);
  EXPECT_NEAR(double(starts_until({{0, 4}}, 0, 0)) * r.seconds_per_start(), 5, 0.01)
      << "a second later, as told with a limit of 5";
}

TEST(QueueRate, UnknownUntilEnoughHaveStartedWhileOthersWaited) {
  QueueRate r(32);
  for (int i = 0; i < 100; ++i) r.step(1, 0, i);
  EXPECT_EQ(r.seconds_per_start(), 0) << "nobody had to wait: the pace was that of those who ask";
  r.step(1, 3, 100);
  r.step(1, 3, 120);
  EXPECT_EQ(r.seconds_per_start(), 0) << "one start of a full batch says little";
  for (int i = 0; i < 31; ++i) r.step(1, 3, 120.5);
  EXPECT_NEAR(r.seconds_per_start(), 20.5 / 32, 1e-9);
}

TEST(QueueRate, AnswersThatStartAndEndTogether) {
  QueueRate r(32);
  double now = 0;
  for (int round = 0; round < 10; ++round) {
    r.step(32, 100, now);
    for (int i = 0; i < 100; ++i) r.step(0, 100, now += 0.1);
    if (round == 0) continue;  // not known yet
    EXPECT_NEAR(r.seconds_per_start(), 10.0 / 32, 1e-6) << round;
  }
}

TEST(QueueRate, AQueueThatStandsStillGetsLonger) {
  QueueRate r(4);
  double now = 0;
  for (int i = 0; i < 50; ++i) r.step(1, 9, now += 1);
  EXPECT_NEAR(r.seconds_per_start(), 1, 0.1);
  for (int i = 0; i < 100; ++i) r.step(0, 9, now += 1);
  EXPECT_GT(r.seconds_per_start(), 3);
}

TEST(QueueRate, ForgetsWhatWasWhenNobodyWaitsForLong) {
  QueueRate r(4);
  double now = 0;
  for (int i = 0; i < 50; ++i) r.step(1, 9, now += 10);
  EXPECT_NEAR(r.seconds_per_start(), 10, 1);
  r.step(1, 0, now += 10);
  r.step(1, 0, now += 300);
  EXPECT_EQ(r.seconds_per_start(), 0);
}

TEST(QueueRate, PlaceInTheQueue) {
  EXPECT_EQ(starts_until({}, 0, 1), 0);
  EXPECT_EQ(starts_until({}, 0, 0), 1);
  EXPECT_EQ(starts_until({{0, 3}}, 0, 2), 2) << "two of those who wait have a place already";
  EXPECT_EQ(starts_until({{-1, 2}, {0, 5}, {3, 7}}, 0, 0), 8);
  EXPECT_EQ(starts_until({{-1, 2}, {0, 5}, {3, 7}}, -2, 0), 1);
  EXPECT_EQ(starts_until({{-1, 2}, {0, 5}, {3, 7}}, 9, 0), 15);
}

}  // namespace
}  // namespace mi::runtime
