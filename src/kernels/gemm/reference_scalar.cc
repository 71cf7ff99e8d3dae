// The formulas of gemm/args.h as plain loops: what every other kernel is compared with.

#include "kernels/gemm/epilogue.h"
#include "kernels/gemm/pack.h"
#include "tensor/int4.h"

namespace mi::kernels {
using namespace MI_ISA;

void gemm_i8_scalar(const GemmArgs& a, const GemmRange& r, void*) {
  const int64_t k_pad = pad_k(a.k);
  for (int64_t tile = r.tile_begin; tile < r.tile_end; ++tile) {
    const int8_t* w = (const int8_t*)a.w + tile * 16 * k_pad;
    for (int64_t i = r.m_begin; i < r.m_end; ++i) {
      const int8_t* x = gemm_x_i8(a, i);
      int32_t acc[16] = {};
      for (int64_t k = 0; k < a.k; ++k)
        for (int64_t c = 0; c < 16; ++c) acc[c] += int32_t(x[k]) * int32_t(w[(k / 4 * 16 + c) * 4 + k % 4]);
      I16 v;
      memcpy(&v, acc, 64);
      gemm_finish_i8(a, i, tile, v, false, gemm_x_scale(a, x));
    }
  }
}

void gemm_i4_scalar(const GemmArgs& a, const GemmRange& r, void*) {
  const int64_t k_pad = pad_k(a.k), groups = int4_groups(a.k, a.group);
  for (int64_t tile = r.tile_begin; tile < r.tile_end; ++tile) {
    const uint8_t* w = (const uint8_t*)a.w + tile * 8 * k_pad;
    for (int64_t i = r.m_begin; i < r.m_end; ++i) {
      const int8_t* x = gemm_x_i8(a, i);
      V16 t = v_zero();
      for (int64_t g = 0; g < groups; ++g) {
        int32_t acc[16] = {};
        const int64_t end = (g + 1) * a.group < a.k ? (g + 1) * a.group : a.k;
        for (int64_t k = g * a.group; k < end; ++k)
          for (int64_t c = 0; c < 16; ++c) {
            const int32_t byte = w[k / 8 * 64 + c * 4 + k % 4];
            acc[c] += int32_t(x[k]) * ((k % 8 < 4 ? byte & 15 : byte >> 4) - 8);
          }
        I16 v;
        memcpy(&v, acc, 64);
        t = v_fma(__builtin_convertvector(v, V16), gemm_i4_scale(a, tile * groups + g), t);
      }
      gemm_finish(a, i, tile, t * v_set(gemm_x_scale(a, x)));
    }
  }
}

template <class Weight>  // float weight(tile, k, column)
static void float_product(const GemmArgs& a, const GemmRange& r, Weight weight) {
  for (int64_t tile = r.tile_begin; tile < r.tile_end; ++tile)
    for (int64_t i = r.m_begin; i < r.m_end; ++i) {
      const float* x = gemm_x_f32(a, i);
      float acc[16] = {};
      for (int64_t k = 0; k < a.k; ++k)
        for (int64_t c = 0; c < 16; ++c) acc[c] = s_fma(x[k], weight(tile, k, c), acc[c]);
      gemm_finish(a, i, tile, v_load(acc));
    }
}

void gemm_f32_scalar(const GemmArgs& a, const GemmRange& r, void*) {
  const float* w = (const float*)a.w;
  const int64_t k_pad = pad_k(a.k);
  float_product(a, r, [=](int64_t tile, int64_t k, int64_t c) { return w[(tile * k_pad + k) * 16 + c]; });
}

void gemm_bf16_scalar(const GemmArgs& a, const GemmRange& r, void*) {
  const uint16_t* w = (const uint16_t*)a.w;
  const int64_t k_pad = pad_k(a.k);
  float_product(a, r, [=](int64_t tile, int64_t k, int64_t c) {
    const uint32_t bits = uint32_t(w[(tile * k_pad + k / 2 * 2) * 16 + c * 2 + k % 2]) << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
  });
}

}  // namespace mi::kernels
