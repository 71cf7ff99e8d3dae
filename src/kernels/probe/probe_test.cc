#include "kernels/probe/probe.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>

#include "base/util.h"

namespace mi::kernels {
namespace {

std::vector<const ProbeKernel*> runnable(ProbeKind kind) {
  std::vector<const ProbeKernel*> all;
  for (const ProbeKernel& k : probe_kernels())
    if (k.kind == kind && k.runs_on(hw::detect_cpu())) all.push_back(&k);
  return all;
}

TEST(Probe, ReadersSeeEveryWord) {
  const int64_t bytes = 5 * kProbeReadUnit;
  std::unique_ptr<void, void (*)(void*)> memory(std::aligned_alloc(64, size_t(bytes)), std::free);
  uint64_t* words = static_cast<uint64_t*>(memory.get());
  uint64_t sum = 0;
  for (int64_t i = 0; i < bytes / 8; ++i) sum += words[i] = random_u64(1, uint64_t(i));
  for (const ProbeKernel* k : runnable(ProbeKind::kRead)) {
    EXPECT_EQ(uint64_t(k->run({words, bytes, 0})), sum) << k->name;
    EXPECT_EQ(k->run({words, 0, 0}), 0) << k->name;
  }
}

// A rate is operations over time: what a kernel says it did must be what its accumulators hold.
TEST(Probe, ArithmeticCountsItself) {
  for (const ProbeKind kind : {ProbeKind::kInt8, ProbeKind::kF32, ProbeKind::kBF16})
    for (const ProbeKernel* k : runnable(kind)) {
      const int64_t one = k->run({nullptr, 0, 1});
      EXPECT_GT(one, 0) << k->name;
      EXPECT_EQ(one % 16, 0) << k->name << ": whole vectors";
      EXPECT_EQ(k->run({nullptr, 0, 0}), 0) << k->name;
      EXPECT_EQ(k->run({nullptr, 0, 1000}), 1000 * one) << k->name;
    }
}

TEST(Probe, EveryKernelOfTheRegisterThatTheCpuHasIsTested) {
  int absent = 0;
  for (const ProbeKernel& k : probe_kernels()) absent += !k.runs_on(hw::detect_cpu());
  if (absent > 0) std::printf("%d probe kernels were not tested: this CPU lacks what they need\n", absent);
  for (const ProbeKind kind : {ProbeKind::kRead, ProbeKind::kInt8, ProbeKind::kF32}) {
    const auto all = runnable(kind);
    ASSERT_FALSE(all.empty());
    EXPECT_STREQ(all.back()->needs, "") << "plain x86-64 comes last";
  }
}

TEST(Probe, TilesOnlyWhereTheyAreGranted) {
  hw::CpuFeatures f = hw::detect_cpu();
  f.amx_int8 = f.amx_bf16 = false;
  for (const ProbeKernel& k : probe_kernels())
    EXPECT_FALSE(k.runs_on(f) && std::string(k.name).find("amx") != std::string::npos) << k.name;
}

TEST(Probe, MeasuresWithWhatItMayUse) {
#if defined(MI_SCALAR_ONLY)
  constexpr bool kVectors = false;
#else
  constexpr bool kVectors = true;
#endif
  hw::ThreadPool pool(2);
  for (const hw::CpuFeatures& cpu : {hw::CpuFeatures{}, hw::detect_cpu()}) {
    const auto m = probe_machine(pool, {cpu, int64_t(8) << 20, 0.0005});
    ASSERT_TRUE(m.ok()) << m.error().message();
    EXPECT_EQ(m->threads, 2);
    EXPECT_EQ(m->buffer_bytes, int64_t(8) << 20);
    for (const ProbeRate* r : {&m->read_gbs, &m->int8_gops, &m->f32_gflops, &m->bf16_gflops}) {
      EXPECT_GT(r->one, 0) << r->kernel;
      EXPECT_GT(r->all, 0) << r->kernel;
      EXPECT_EQ(r->kernel.find("scalar") != std::string::npos, !(kVectors && cpu.avx2)) << r->kernel;
    }
    EXPECT_EQ(m->notes.size(), m->buffer_bytes < 2 * m->cache_bytes ? 1u : 0u);
  }
}

TEST(Probe, BufferIsFarBeyondTheCachesAndWithinMemory) {
  constexpr int64_t kMiB = int64_t(1) << 20;
  EXPECT_EQ(probe_buffer_bytes(0, 0), 512 * kMiB);
  EXPECT_EQ(probe_buffer_bytes(32 * kMiB, 64000 * kMiB), 512 * kMiB);
  EXPECT_EQ(probe_buffer_bytes(384 * kMiB, 64000 * kMiB), 1536 * kMiB);
  EXPECT_EQ(probe_buffer_bytes(32 * kMiB, 1000 * kMiB), 248 * kMiB) << "a quarter, in whole tasks";
  EXPECT_EQ(probe_buffer_bytes(32 * kMiB, 1), 4 * kMiB);
}

}  // namespace
}  // namespace mi::kernels
