#pragma once
// The activation kernels' arguments as plain data, for the files with ISA suffixes.

#include <stdint.h>

namespace mi::kernels {

// The values of ActKind (tensor/op.h), checked in activation.cc.
inline constexpr int kActSilu = 0, kActGelu = 1, kActGeluTanh = 2, kActRelu = 3, kActSwigluOai = 4;

struct ActArgs {
  int kind = 0;
  float alpha = 0, limit = 0;
  const float* gate = nullptr;
  const float* up = nullptr;
  int64_t gate_stride = 0, up_stride = 0;  // bytes
  int64_t rows = 0, cols = 0;
  float* h = nullptr;
  int64_t h_stride = 0;
  const int32_t* h_rows = nullptr;  // row i goes to row h_rows[i] of h
};

}  // namespace mi::kernels
