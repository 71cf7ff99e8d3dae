#pragma once
// Small things: sizes and times for people, hashes, a counter-based random generator, progress lines.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace mi {

std::string human_bytes(double bytes);        // "12.88 GB" (powers of 1000)
std::string human_seconds(double s);          // "850 ms", "3.2 s", "2 min 5 s"
std::string hex(std::span<const std::byte> b);

// XXH3-128 as 32 hex digits; streaming.
std::string xxh3_hex(std::span<const std::byte> bytes);
class Xxh3 {
 public:
  Xxh3();
  ~Xxh3();
  Xxh3(const Xxh3&) = delete;
  void update(std::span<const std::byte> bytes);
  std::string digest() const;
 private:
  void* state_;
};

// Counter-based: value i of stream `seed` is the same on every machine and in any order.
uint64_t random_u64(uint64_t seed, uint64_t index);
float random_unit(uint64_t seed, uint64_t index);      // [0, 1), 24 bits
float random_normal(uint64_t seed, uint64_t index);    // approximately N(0, 1), exact recipe: sum of 4 uniforms, scaled
uint64_t seed_of(uint64_t seed, std::string_view name);  // sub-stream for a name

// Progress on stderr: "quantize  layer 12/48  310 MB/s  25 % 1 min 3 s left"; redrawn in place on a terminal, a plain
// line every few seconds otherwise; silent when quiet. total 0: unknown. Units are bytes when `bytes`.
class Progress {
 public:
  Progress(std::string what, uint64_t total, bool bytes);
  ~Progress();
  void advance(uint64_t amount, std::string_view note = {});
  void done(std::string_view summary = {});
  static void set_quiet(bool quiet);

 private:
  void draw(bool last, std::string_view note);
  std::string what_;
  uint64_t total_, now_ = 0;
  bool bytes_, finished_ = false;
  std::chrono::steady_clock::time_point start_, drawn_;
};

}  // namespace mi
