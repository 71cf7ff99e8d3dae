#include "base/util.h"

#include <fmt/format.h>
#include <unistd.h>
#include <xxhash.h>

#include <atomic>
#include <cmath>
#include <cstdio>

namespace mi {
namespace {

std::atomic<bool> g_quiet{false};
constexpr std::chrono::milliseconds kRedraw{100}, kPlainLine{5000};

uint64_t mix(uint64_t z) {   // finalizer of splitmix64
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

std::string digest_text(XXH128_hash_t h) { return fmt::format("{:016x}{:016x}", h.high64, h.low64); }

}  // namespace

std::string human_bytes(double b) {
  const char* units[] = {"B", "kB", "MB", "GB", "TB", "PB"};
  int u = 0;
  while (b >= 999.995 && u < 5) { b /= 1000; ++u; }
  return u == 0 ? fmt::format("{:.0f} B", b) : fmt::format("{:.2f} {}", b, units[u]);
}

std::string human_seconds(double s) {
  if (s < 0.9995) return fmt::format("{:.3g} ms", s * 1000);
  if (s < 60) return fmt::format("{:.1f} s", s);
  const long long t = std::llround(s);
  return t < 3600 ? fmt::format("{} min {} s", t / 60, t % 60) : fmt::format("{} h {} min", t / 3600, t % 3600 / 60);
}

std::string hex(std::span<const std::byte> b) {
  std::string s;
  for (std::byte x : b) s += fmt::format("{:02x}", unsigned(x));
  return s;
}

std::string xxh3_hex(std::span<const std::byte> bytes) { return digest_text(XXH3_128bits(bytes.data(), bytes.size())); }

Xxh3::Xxh3() : state_(XXH3_createState()) { XXH3_128bits_reset(static_cast<XXH3_state_t*>(state_)); }
Xxh3::~Xxh3() { XXH3_freeState(static_cast<XXH3_state_t*>(state_)); }
void Xxh3::update(std::span<const std::byte> b) {
  if (!b.empty()) XXH3_128bits_update(static_cast<XXH3_state_t*>(state_), b.data(), b.size());
}
std::string Xxh3::digest() const { return digest_text(XXH3_128bits_digest(static_cast<const XXH3_state_t*>(state_))); }

uint64_t random_u64(uint64_t seed, uint64_t index) { return mix(mix(seed + 0x9e3779b97f4a7c15ull) + (index + 1) * 0x9e3779b97f4a7c15ull); }
float random_unit(uint64_t seed, uint64_t index) { return float(random_u64(seed, index) >> 40) * 0x1p-24f; }
float random_normal(uint64_t seed, uint64_t index) {
  // Four 16-bit uniforms of one draw: mean 2, variance 4/12.
  const uint64_t r = random_u64(seed, index);
  const float sum = float(r & 0xffff) + float((r >> 16) & 0xffff) + float((r >> 32) & 0xffff) + float(r >> 48);
  return (sum * 0x1p-16f - 2.0f) * 1.7320508f;
}
uint64_t seed_of(uint64_t seed, std::string_view name) { return mix(seed ^ XXH3_64bits(name.data(), name.size())); }

Progress::Progress(std::string what, uint64_t total, bool bytes)
    : what_(std::move(what)), total_(total), bytes_(bytes), start_(std::chrono::steady_clock::now()), drawn_(start_) {}
Progress::~Progress() {
  if (!finished_ && !g_quiet && isatty(2)) std::fputs("\r\x1b[K", stderr);
}
void Progress::set_quiet(bool quiet) { g_quiet = quiet; }

void Progress::advance(uint64_t amount, std::string_view note) {
  now_ += amount;
  if (g_quiet) return;
  const auto now = std::chrono::steady_clock::now();
  if (now - drawn_ < (isatty(2) ? kRedraw : kPlainLine)) return;
  drawn_ = now;
  draw(false, note);
}

void Progress::done(std::string_view summary) {
  if (finished_) return;
  finished_ = true;
  if (!g_quiet) draw(true, summary);
}

void Progress::draw(bool last, std::string_view note) {
  const double s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  const double rate = s > 0 ? double(now_) / s : 0;
  std::string line = fmt::format("{}  {}", what_, bytes_ ? human_bytes(double(now_)) : std::to_string(now_));
  if (total_ > 0 && !last) line += fmt::format(" of {}  {:.0f} %", bytes_ ? human_bytes(double(total_)) : std::to_string(total_), 100.0 * double(now_) / double(total_));
  line += fmt::format("  {}/s", bytes_ ? human_bytes(rate) : fmt::format("{:.4g}", rate));
  if (last) line += "  in " + human_seconds(s);
  else if (total_ > now_ && rate > 0) line += fmt::format("  {} left", human_seconds(double(total_ - now_) / rate));
  if (!note.empty()) line += fmt::format("  {}", note);
  line = isatty(2) ? fmt::format("\r\x1b[K{}{}", line, last ? "\n" : "") : line + "\n";
  std::fputs(line.c_str(), stderr);     // does not throw: work goes on when nobody can read about it
  std::fflush(stderr);
}

}  // namespace mi
