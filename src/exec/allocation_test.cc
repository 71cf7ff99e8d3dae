// A step allocates nothing: activations come from the planned arena, kernels' scratch is kept between steps.

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "exec/test_model.h"

namespace {
std::atomic<int64_t> g_allocations = 0;
}  // namespace

#if !defined(MI_SANITIZED)
// Every form of new ends in these two.
void* operator new(std::size_t n) {
  g_allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* p = std::malloc(n ? n : 1)) return p;
  throw std::bad_alloc();
}
void* operator new(std::size_t n, std::align_val_t a) {
  g_allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* p = std::aligned_alloc(std::size_t(a), (n + std::size_t(a) - 1) / std::size_t(a) * std::size_t(a))) return p;
  throw std::bad_alloc();
}
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"  // inlined, they look like free() of what new gave
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }
#pragma GCC diagnostic pop
#endif

namespace mi::exec {
namespace {

TEST(Allocation, StepsAllocateNothingOnceWarm) {
#if defined(MI_SANITIZED)
  GTEST_SKIP() << "the sanitizers have an allocator of their own";
#endif
  for (const artifact::Packing packing : {artifact::Packing::kPackedI8, artifact::Packing::kPackedBF16}) {
    testing::ModelShape shape;
    shape.packing = packing;
    const testing::TestModel model(shape);
    hw::ThreadPool pool(2);
    const auto engine = model.load(pool);
    std::vector<int32_t> ids(40, 3);
    const std::vector<int32_t> pages = {0, 1, 2};
    const auto batch = [&](int64_t prompt) {
      Batch b;
      b.chunks.push_back({std::span(ids).first(size_t(prompt)), 0, pages, prompt - 1});
      return b;
    };
    const Batch large = batch(40), small = batch(1);
    // The first steps grow the threads' scratch; which thread takes which task is chance, so a few of them.
    for (int i = 0; i < 20; ++i) engine->run(large);
    const int64_t before = g_allocations;
    for (int i = 0; i < 20; ++i) {
      engine->run(large);
      engine->run(small);
    }
    EXPECT_EQ(g_allocations - before, 0);
  }
  EXPECT_GT(g_allocations, 0) << "the counter works";
}

}  // namespace
}  // namespace mi::exec
