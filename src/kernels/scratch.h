#pragma once
// Several arrays in the calling thread's scratch (gemm.h, thread_scratch). Valid until the thread's next use of it.
//
//   float* a; int32_t* b;
//   carve_scratch([&](ScratchCarver& c) { a = c.take<float>(n); b = c.take<int32_t>(m); });

#include <cstdint>

#include "kernels/gemm/gemm.h"

namespace mi::kernels {

class ScratchCarver {
 public:
  explicit ScratchCarver(void* base) : base_(static_cast<char*>(base)) {}
  // n uninitialised elements, 64-byte aligned.
  template <typename T>
  T* take(int64_t n) {
    T* p = base_ ? reinterpret_cast<T*>(base_ + bytes_) : nullptr;
    bytes_ += (n * int64_t(sizeof(T)) + 63) / 64 * 64;
    return p;
  }
  int64_t bytes() const { return bytes_; }

 private:
  char* base_;         // null: only count
  int64_t bytes_ = 0;
};

template <typename F>
inline void carve_scratch(F&& takes) {
  ScratchCarver count(nullptr);
  takes(count);
  ScratchCarver carver(thread_scratch(count.bytes()));
  takes(carver);
}

}  // namespace mi::kernels
