#include "kernels/rope/rope.h"

#include <cmath>
#include <cstring>

#include "kernels/rows.h"

namespace mi::kernels {

RopeTable make_rope_table(const float* inv_freq, int64_t rotary_dim, float attention_factor, int64_t positions) {
  RopeTable t;
  t.positions = positions;
  t.half = rotary_dim / 2;
  t.cos.resize(size_t(positions * t.half));
  t.sin.resize(size_t(positions * t.half));
  for (int64_t pos = 0; pos < positions; ++pos)
    for (int64_t i = 0; i < t.half; ++i) {
      const float angle = float(pos) * inv_freq[i];
      t.cos[size_t(pos * t.half + i)] = float(std::cos(double(angle))) * attention_factor;
      t.sin[size_t(pos * t.half + i)] = float(std::sin(double(angle))) * attention_factor;
    }
  return t;
}

void rope_rows(const RopeParams& p, const RopeArgs& a, int64_t begin, int64_t end) {
  const int64_t half = p.rotary_dim / 2;
  for (int64_t r = begin; r < end; ++r) {
    const float* c = a.table->cos.data() + a.positions[r] * half;
    const float* s = a.table->sin.data() + a.positions[r] * half;
    const float* x = row_at(a.x, a.x_stride, r);
    float* y = row_at(a.y, a.y_stride, r);
    for (int64_t h = 0; h < p.heads; ++h, x += p.head_dim, y += p.head_dim) {
      if (p.interleaved) {
        for (int64_t i = 0; i < half; ++i) {
          const float x0 = x[2 * i], x1 = x[2 * i + 1];
          y[2 * i] = x0 * c[i] - x1 * s[i];
          y[2 * i + 1] = x1 * c[i] + x0 * s[i];
        }
      } else {
        for (int64_t i = 0; i < half; ++i) {
          const float x0 = x[i], x1 = x[i + half];
          y[i] = x0 * c[i] - x1 * s[i];
          y[i + half] = x1 * c[i] + x0 * s[i];
        }
      }
      if (x != y) std::memcpy(y + p.rotary_dim, x + p.rotary_dim, size_t(p.head_dim - p.rotary_dim) * 4);
    }
  }
}

void rope_run(const RopeParams& p, const RopeArgs& a, hw::ThreadPool& pool) {
  run_rows(pool, a.rows, p.heads * p.head_dim, [&](int64_t begin, int64_t end, int) { rope_rows(p, a, begin, end); });
}

}  // namespace mi::kernels
