#include "hw/cpu.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "base/json.h"

namespace mi::hw {
namespace {

constexpr int kArchReqXcompPerm = 0x1023, kXfeatureTileData = 18;

struct Regs { unsigned a = 0, b = 0, c = 0, d = 0; };
Regs cpuid(unsigned leaf, unsigned sub) {
  Regs r;
  __get_cpuid_count(leaf, sub, &r.a, &r.b, &r.c, &r.d);
  return r;
}
bool bit(unsigned v, int i) { return (v >> i) & 1; }

uint64_t xcr0() {
  unsigned lo = 0, hi = 0;
  __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
  return uint64_t(hi) << 32 | lo;
}

}  // namespace

CpuFeatures detect_cpu() {
  CpuFeatures f;
  const Regs r1 = cpuid(1, 0);
  if (!bit(r1.c, 27)) return f;                        // OSXSAVE: without it no wide register is saved
  const uint64_t x = xcr0();
  const bool ymm = (x & 0x6) == 0x6, zmm = (x & 0xe6) == 0xe6, tiles = (x & 0x60000) == 0x60000;
  const Regs r7 = cpuid(7, 0), r71 = r7.a >= 1 ? cpuid(7, 1) : Regs{};
  f.avx2 = ymm && bit(r7.b, 5) && bit(r1.c, 12) && bit(r1.c, 29);                                            // AVX2, FMA, F16C
  f.avx_vnni = f.avx2 && bit(r71.a, 4);
  f.avx512 = zmm && f.avx2 && bit(r7.b, 16) && bit(r7.b, 17) && bit(r7.b, 30) && bit(r7.b, 31);              // F, DQ, BW, VL
  f.avx512_vnni = f.avx512 && bit(r7.c, 11);
  f.avx512_bf16 = f.avx512 && bit(r71.a, 5);
  // The permission is the process's: threads that run already have it too, a forked child inherits it, exec loses it.
  const bool granted = tiles && bit(r7.d, 24) && syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureTileData) == 0;
  f.amx_int8 = granted && bit(r7.d, 25);
  f.amx_bf16 = granted && bit(r7.d, 22);
  return f;
}

Result<CpuFeatures> apply_force(CpuFeatures f, const std::string& force) {
  if (force.empty()) return f;
  const std::vector<std::string> ladder = {"scalar", "avx2", "avx512", "avx512vnni", "amx"};
  size_t level = 0;
  while (level < ladder.size() && ladder[level] != force) ++level;
  if (level == ladder.size()) {
    const std::string near = nearest_name(force, ladder);
    return fail(ErrorCode::kUsage, "MI_FORCE_ISA={}: unknown; it may be scalar, avx2, avx512, avx512vnni or amx{}", force,
                near.empty() ? "" : fmt::format(" (did you mean {}?)", near));
  }
  if (level < 4) f.amx_int8 = f.amx_bf16 = false;
  if (level < 3) f.avx512_vnni = f.avx512_bf16 = f.avx_vnni = false;
  if (level < 2) f.avx512 = false;
  if (level < 1) f.avx2 = false;
  return f;
}

Status check_force_env() {
  const char* force = std::getenv("MI_FORCE_ISA");
  const auto r = apply_force(CpuFeatures{}, force ? force : "");
  if (!r.ok()) return r.error();
  return {};
}

const CpuFeatures& cpu() {
  static const CpuFeatures f = [] {
    const char* force = std::getenv("MI_FORCE_ISA");
    const CpuFeatures found = detect_cpu();
    const auto r = apply_force(found, force ? force : "");
    return r.ok() ? *r : found;
  }();
  return f;
}

std::string describe(const CpuFeatures& f) {
  std::string s;
  const auto add = [&](bool on, const char* name) { if (on) s += (s.empty() ? "" : " ") + std::string(name); };
  add(f.avx2, "avx2");
  add(f.avx_vnni, "avx_vnni");
  add(f.avx512, "avx512");
  add(f.avx512_vnni, "avx512_vnni");
  add(f.avx512_bf16, "avx512_bf16");
  add(f.amx_int8, "amx_int8");
  add(f.amx_bf16, "amx_bf16");
  return s.empty() ? "scalar" : s;
}

std::string cpu_model_name() {
  unsigned v[12];
  if (!__get_cpuid(0x80000000u, &v[0], &v[1], &v[2], &v[3]) || v[0] < 0x80000004u) return "unknown CPU";
  for (unsigned i = 0; i < 3; ++i) __get_cpuid(0x80000002u + i, &v[4 * i], &v[4 * i + 1], &v[4 * i + 2], &v[4 * i + 3]);
  char text[49] = {};
  std::memcpy(text, v, 48);
  std::string s(text);
  const size_t first = s.find_first_not_of(' ');
  return first == std::string::npos ? "unknown CPU" : s.substr(first);
}

}  // namespace mi::hw
