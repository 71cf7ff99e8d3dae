#include "kernels/embed/embed.h"

#include "kernels/rows.h"

namespace mi::kernels {

void embed_run(const EmbedArgs& a, hw::ThreadPool& pool) {
  const int64_t row_bytes = a.cols * int64_t(dtype_bytes(a.dtype));
  run_rows(pool, a.rows, a.cols, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      float* y = row_at(a.y, a.y_stride, r);
      convert_to_f32(static_cast<const char*>(a.table) + a.ids[r] * row_bytes, a.dtype, y, size_t(a.cols));
      if (a.scale != 1.0f)
        for (int64_t j = 0; j < a.cols; ++j) y[j] *= a.scale;
    }
  });
}

}  // namespace mi::kernels
