#pragma once
// x[t] = scale * W[id_t]: rows of the embedding table widened to float, one rounding for the product.

#include <cstdint>

#include "hw/thread_pool.h"
#include "tensor/dtype.h"

namespace mi::kernels {

struct EmbedArgs {
  int64_t rows = 0, cols = 0;
  const int32_t* ids = nullptr;      // [rows], in range
  const void* table = nullptr;       // [vocab, cols], row-major
  DType dtype = DType::kBF16;        // F32, BF16 or F16
  float scale = 1;
  float* y = nullptr;
  int64_t y_stride = 0;              // bytes
};
void embed_run(const EmbedArgs& a, hw::ThreadPool& pool);

}  // namespace mi::kernels
