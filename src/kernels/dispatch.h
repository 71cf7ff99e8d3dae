#pragma once
// Choice among the builds of a float kernel that is written once against simd.h and compiled per ISA. All builds return
// the same bits, so the choice is about speed only.
//
//   // quantize.cc                                          // quantize_impl.h, included by quantize_{scalar,avx2,avx512}.cc
//   MI_KERNEL(void, quantize_rows, (const float* x, ...))   namespace mi::kernels::MI_ISA { void quantize_rows(...) {...} }
//   ... MI_PICK(quantize_rows, cpu)(x, ...);

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
#  define MI_PICK(name, cpu)                              \
    ((cpu).avx512 ? &::mi::kernels::avx512::name          \
     : (cpu).avx2 ? &::mi::kernels::avx2::name            \
                  : &::mi::kernels::scalar::name)
#endif
