#pragma once
// For tests of this room: a batcher with its own model and clock, driven by hand.

#include <memory>
#include <utility>
#include <vector>

#include "runtime/batcher.h"
#include "runtime/testing.h"

namespace mi::runtime::testing {

struct Bench {
  Bench(const FakeStepper::Config& c, LoopOptions o, std::shared_ptr<const text::Tokenizer> t = nullptr)
      : stepper(c), batcher(stepper, std::move(t), std::move(o), 99, [this] { return now += 0.001; }) {}
  Recorder& add(Request r) {
    const Admission a = check_request(r, batcher.limits());
    MI_CHECK(a.ok(), "{}", a.message);
    recorders.push_back(std::make_unique<Recorder>());
    batcher.add(uint64_t(recorders.size()), std::move(r), recorders.back()->sink(), now);
    return *recorders.back();
  }
  // As Batcher::step(); invariants hold after each.
  bool step() {
    const bool worked = batcher.step();
    batcher.check_invariants();
    batcher.deliver_ended();
    return worked;
  }
  void run() {
    for (int i = 0; step(); ++i) MI_CHECK(i < 100000);
  }
  double now = 0;
  FakeStepper stepper;
  Batcher batcher;
  std::vector<std::unique_ptr<Recorder>> recorders;
};

}  // namespace mi::runtime::testing
