#pragma once
// Seeded random weights for benchmarks of shapes whose checkpoint is not at hand. Matrices are N(0, 1/K), so that
// activations keep their size; what is added to the residual stream is smaller by sqrt(2 layers); norms are near 1. The
// bytes depend on the seed and the tensor's name only.

#include <string>
#include <vector>

#include "base/util.h"
#include "ir/mir_dir.h"
#include "model/arch.h"

namespace mi::model {

class DummyWeights {
 public:
  DummyWeights(const ArchSpec& a, uint64_t seed);
  DType dtype() const { return dtype_; }  // of matrices: the config's
  Status write(const SafetensorsWriter::Decl& d, ir::Mark mark, ir::MirWriter* out, Progress* progress);

 private:
  const ArchSpec& a_;
  uint64_t seed_;
  DType dtype_;
  std::vector<float> normal_;  // 65536 values of N(0, 1); a random 16-bit index picks one
  std::vector<std::byte> buffer_;
};

}  // namespace mi::model
