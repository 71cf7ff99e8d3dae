#pragma once
// How long this machine takes for products, their weights coming from memory as in a step.

#include <memory>

#include "kernels/gemm/gemm.h"

namespace mi::kernels {

class GemmMeasure {
 public:
  explicit GemmMeasure(hw::ThreadPool& pool);
  // Of `rows` rows with one matrix [n, k]; about 30 ms, longer where one product takes long. Of many rows a part of the
  // columns is measured. group: of int4. kTogether: all of the pool's threads at one matrix. kEach: every thread at a matrix
  // of its own, as with experts; of one of them, so that a layer's are this times their number.
  enum class Threads : uint8_t { kTogether, kEach };
  double seconds(const GemmKernel& kernel, int64_t rows, int64_t n, int64_t k, int64_t group = 0,
                 Threads threads = Threads::kTogether);

 private:
  struct Free {
    void operator()(char* p) const;
  };
  void reserve(int64_t bytes);

  hw::ThreadPool& pool_;
  int64_t size_ = 0;
  std::unique_ptr<char, Free> memory_;  // in huge pages where allowed, as an engine's weights are
};

}  // namespace mi::kernels
