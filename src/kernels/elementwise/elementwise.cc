#include "kernels/elementwise/elementwise.h"

#include <cstring>

#include "kernels/rows.h"
#include "kernels/simd.h"

namespace mi::kernels {

void add_run(const MapArgs& a, const float* b, int64_t b_stride, hw::ThreadPool& pool) {
  run_rows(pool, a.rows, a.cols, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const float* x = row_at(a.x, a.x_stride, r);
      const float* z = row_at(b, b_stride, r);
      float* y = row_at(a.y, a.y_stride, r);
      for (int64_t j = 0; j < a.cols; ++j) y[j] = x[j] + z[j];
    }
  });
}

void scale_run(const MapArgs& a, float factor, hw::ThreadPool& pool) {
  run_rows(pool, a.rows, a.cols, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const float* x = row_at(a.x, a.x_stride, r);
      float* y = row_at(a.y, a.y_stride, r);
      for (int64_t j = 0; j < a.cols; ++j) y[j] = x[j] * factor;
    }
  });
}

void clamp_run(const MapArgs& a, float lo, float hi, hw::ThreadPool& pool) {
  run_rows(pool, a.rows, a.cols, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const float* x = row_at(a.x, a.x_stride, r);
      float* y = row_at(a.y, a.y_stride, r);
      for (int64_t j = 0; j < a.cols; ++j) y[j] = x[j] < lo ? lo : x[j] > hi ? hi : x[j];
    }
  });
}

void sigmoid_mul_run(const MapArgs& a, const float* gate, int64_t gate_stride, hw::ThreadPool& pool) {
  run_rows(pool, a.rows, a.cols, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const float g = MI_ISA::s_sigmoid(*row_at(gate, gate_stride, r));
      const float* x = row_at(a.x, a.x_stride, r);
      float* y = row_at(a.y, a.y_stride, r);
      for (int64_t j = 0; j < a.cols; ++j) y[j] = x[j] * g;
    }
  });
}

void select_rows(const void* x, int64_t x_stride, const int32_t* index, int64_t rows, int64_t bytes, void* y, int64_t y_stride) {
  for (int64_t r = 0; r < rows; ++r)
    std::memcpy(static_cast<char*>(y) + r * y_stride, static_cast<const char*>(x) + index[r] * x_stride, size_t(bytes));
}

}  // namespace mi::kernels
