#pragma once
// How long this machine takes for products, their weights coming from memory as in a step.

#include <vector>

#include "kernels/gemm/gemm.h"

namespace mi::kernels {

class GemmMeasure {
 public:
  explicit GemmMeasure(hw::ThreadPool& pool);
  // Of `rows` rows with one matrix [n, k], all of the pool's threads at it; about 30 ms, longer where one product takes long.
  // Of many rows a part of the columns is measured. group: of int4.
  double seconds(const GemmKernel& kernel, int64_t rows, int64_t n, int64_t k, int64_t group = 0);

 private:
  hw::ThreadPool& pool_;
  std::vector<char> memory_;
};

}  // namespace mi::kernels
