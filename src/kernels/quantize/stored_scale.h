#pragma once

namespace mi::kernels {

// A scale of activations from calibration (quantize.h). 0: none, every row has its own. saturate: rows have their own as
// long as it is not above `value`.
struct StoredScale {
  float value = 0;
  bool saturate = false;
};

}  // namespace mi::kernels
