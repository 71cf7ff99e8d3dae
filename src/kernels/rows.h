#pragma once
// Rows of a matrix a fixed number of bytes apart, and their split over the pool.

#include <algorithm>
#include <cstdint>
#include <functional>

#include "hw/thread_pool.h"

namespace mi::kernels {

template <typename T>
inline T* row_at(T* base, int64_t stride_bytes, int64_t row) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(base) + row * stride_bytes);
}

// f(task, worker) for every task in [0, tasks). Goes through a reference, so that nothing is allocated; a single task does
// not wake the pool.
template <typename F>
inline void run_tasks(hw::ThreadPool& pool, int64_t tasks, F&& f) {
  if (tasks <= 0) return;
  if (tasks == 1) return f(int64_t{0}, 0);
  pool.run(tasks, std::ref(f));
}

// f(begin, end, worker) over blocks of rows that hold about 16K elements each: small steps stay on the calling thread.
template <typename F>
inline void run_rows(hw::ThreadPool& pool, int64_t rows, int64_t cols, F&& f) {
  const int64_t block = std::max<int64_t>(1, 16384 / std::max<int64_t>(cols, 1));
  auto task = [&](int64_t i, int worker) { f(i * block, std::min(rows, (i + 1) * block), worker); };
  run_tasks(pool, (rows + block - 1) / block, task);
}

}  // namespace mi::kernels
