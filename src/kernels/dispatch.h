#pragma once
// Choice among the builds of a float kernel that is written once against simd.h and compiled per ISA. All builds return
// the same bits, so the choice is about speed only.
//
//   quantize.cc:         MI_KERNEL(void, quantize_rows_impl, (const float* x, ...))
//                        ... MI_PICK(quantize_rows_impl, cpu)(x, ...);
//   quantize_impl.h:     namespace mi::kernels::MI_ISA { void quantize_rows_impl(...) {...} }
//                        included by quantize_scalar.cc, quantize_avx2.cc and quantize_avx512.cc

#include "hw/cpu.h"

#if defined(MI_SCALAR_ONLY)
#  define MI_KERNEL(ret, name, params) \
    namespace mi::kernels::scalar {    \
    ret name params;                   \
    }
#  define MI_PICK(name, cpu) (static_cast<void>(cpu), &::mi::kernels::scalar::name)
#else
#  define MI_KERNEL(ret, name, params) \
    namespace mi::kernels::scalar {    \
    ret name params;                   \
    }                                  \
    namespace mi::kernels::avx2 {      \
    ret name params;                   \
    }                                  \
    namespace mi::kernels::avx512 {    \
    ret name params;                   \
    }
#  define MI_PICK(name, cpu)                     \
    ((cpu).avx512 ? &::mi::kernels::avx512::name \
     : (cpu).avx2 ? &::mi::kernels::avx2::name   \
                  : &::mi::kernels::scalar::name)
#endif
