#include "kernels/probe/probe.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "base/util.h"
#include "hw/memory.h"
#include "kernels/rows.h"

namespace mi::kernels {

#define MI_PROBE(name, kind, needs, condition) int64_t name(const ProbeWork& w);
#include "kernels/probe/kernels.inc"
#undef MI_PROBE

namespace {

const ProbeKernel kProbeKernels[] = {
#define MI_PROBE(name, kind, needs, condition) \
  {#name, ProbeKind::kind, needs,              \
   [](const hw::CpuFeatures& f) -> bool {      \
     static_cast<void>(f);                     \
     return condition;                         \
   },                                          \
   name},
#include "kernels/probe/kernels.inc"
#undef MI_PROBE
};

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

constexpr int kRuns = 4;
constexpr int64_t kReadTask = int64_t(4) << 20;
constexpr int64_t kTasksPerThread = 4;  // so that a thread that was held up has others take its part

// Memory of our own, every page of it written: an untouched page would be the kernel's one page of zeros.
class Buffer {
 public:
  static Result<Buffer> make(int64_t bytes, hw::ThreadPool& pool) {
    void* p = mmap(nullptr, size_t(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
      return fail(ErrorCode::kEnvironment, "no memory to measure the read bandwidth with ({}): {}",
                  human_bytes(double(bytes)), std::strerror(errno));
    madvise(p, size_t(bytes), MADV_HUGEPAGE);  // advice: a kernel without it is fine
    Buffer b(p, bytes);
    run_tasks(pool, (bytes + kReadTask - 1) / kReadTask, [&](int64_t i, int) {
      std::memset(b.data_ + i * kReadTask, 1, size_t(std::min(kReadTask, bytes - i * kReadTask)));
    });
    return b;
  }
  Buffer(Buffer&& o) noexcept : data_(std::exchange(o.data_, nullptr)), bytes_(o.bytes_) {}
  ~Buffer() {
    if (data_) munmap(data_, size_t(bytes_));
  }
  const char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  Buffer(void* p, int64_t bytes) : data_(static_cast<char*>(p)), bytes_(bytes) {}
  char* data_;
  int64_t bytes_;
};

double read_rate(const ProbeKernel& k, const Buffer& b, hw::ThreadPool& pool) {
  double best = 0;
  std::atomic<int64_t> sink{0};
  for (int r = 0; r < kRuns; ++r) {
    const auto start = Clock::now();
    run_tasks(pool, (b.bytes() + kReadTask - 1) / kReadTask, [&](int64_t i, int) {
      sink.fetch_add(k.run({b.data() + i * kReadTask, std::min(kReadTask, b.bytes() - i * kReadTask), 0}),
                     std::memory_order_relaxed);
    });
    best = std::max(best, double(b.bytes()) / seconds_since(start));
  }
  return best / 1e9;
}

// Operations per second, in units of 1e9.
double arithmetic_rate(const ProbeKernel& k, hw::ThreadPool& pool, double run_seconds) {
  int64_t loops = 256;
  for (double t = 0; loops < kProbeMaxLoops; loops *= 2) {
    const auto start = Clock::now();
    k.run({nullptr, 0, loops});
    t = seconds_since(start);
    if (t * kTasksPerThread * 2 < run_seconds) continue;
    loops = std::clamp<int64_t>(int64_t(double(loops) * run_seconds / (t * kTasksPerThread)), 64, kProbeMaxLoops);
    break;
  }
  double best = 0;
  for (int r = 0; r < kRuns; ++r) {
    std::atomic<int64_t> done{0};
    const auto start = Clock::now();
    run_tasks(pool, pool.threads() * kTasksPerThread, [&](int64_t, int) {
      done.fetch_add(k.run({nullptr, 0, loops}), std::memory_order_relaxed);
    });
    best = std::max(best, 2.0 * double(done.load()) / seconds_since(start));
  }
  return best / 1e9;
}

// The best kernel by the register, and for arithmetic the fastest of all that run: a wide unit may be a slow one.
template <typename Measure>
ProbeRate fastest(ProbeKind kind, const hw::CpuFeatures& cpu, bool first_only, Measure measure) {
  ProbeRate best;
  for (const ProbeKernel& k : kProbeKernels) {
    if (k.kind != kind || !k.runs_on(cpu)) continue;
    const bool plain = *k.needs == '\0';
    if (!best.kernel.empty() && (first_only || plain)) break;
    const auto [one, all] = measure(k);
    if (all > best.all) best = {k.name, one, all};
  }
  return best;
}

}  // namespace

std::span<const ProbeKernel> probe_kernels() { return kProbeKernels; }

int64_t probe_buffer_bytes(int64_t cache_bytes, int64_t available_bytes) {
  const int64_t wanted = std::max(int64_t(512) << 20, 4 * cache_bytes);
  const int64_t most = available_bytes > 0 ? available_bytes / 4 : wanted;
  return std::max<int64_t>(std::min(wanted, most) / kReadTask * kReadTask, kReadTask);
}

Result<MachineLimits> probe_machine(hw::ThreadPool& pool, const ProbeOptions& o) {
  const auto start = Clock::now();
  MachineLimits m;
  m.threads = pool.threads();
  m.cache_bytes = hw::last_level_cache_bytes("/");
  m.buffer_bytes = o.buffer_bytes > 0 ? o.buffer_bytes : probe_buffer_bytes(m.cache_bytes, hw::available_memory("/"));
  MI_CHECK(m.buffer_bytes % kProbeReadUnit == 0, "{} bytes", m.buffer_bytes);
  if (m.buffer_bytes < 2 * m.cache_bytes)
    m.notes.push_back(fmt::format("read bandwidth was measured on {} beside {} of cache: part of it is the cache's",
                                  human_bytes(double(m.buffer_bytes)), human_bytes(double(m.cache_bytes))));
  hw::ThreadPool alone(1);
  {
    MI_TRY(const Buffer buffer, Buffer::make(m.buffer_bytes, pool));
    m.read_gbs = fastest(ProbeKind::kRead, o.cpu, true, [&](const ProbeKernel& k) {
      return std::pair(read_rate(k, buffer, alone), read_rate(k, buffer, pool));
    });
  }
  const auto arithmetic = [&](const ProbeKernel& k) {
    return std::pair(arithmetic_rate(k, alone, o.run_seconds), arithmetic_rate(k, pool, o.run_seconds));
  };
  m.int8_gops = fastest(ProbeKind::kInt8, o.cpu, false, arithmetic);
  m.f32_gflops = fastest(ProbeKind::kF32, o.cpu, false, arithmetic);
  m.bf16_gflops = fastest(ProbeKind::kBF16, o.cpu, false, arithmetic);
  if (m.bf16_gflops.kernel.empty()) m.bf16_gflops = m.f32_gflops;
  m.seconds = seconds_since(start);
  return m;
}

}  // namespace mi::kernels
