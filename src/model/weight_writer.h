#pragma once
// Streams bound weights into a MIR directory: no copy where the checkpoint's layout is already the wanted one, else
// through a small buffer. Every float is looked at: NaN and infinity are refused with file, tensor and place; rows of
// nothing but subnormal numbers are reported.

#include <string>
#include <vector>

#include "base/util.h"
#include "ir/mir_dir.h"
#include "model/bind.h"

namespace mi::model {

// What a scan of rows of floats found.
struct Scan {
  int64_t bad = -1;            // index of the first NaN or infinity
  int64_t subnormal_rows = 0;  // rows whose numbers are all subnormal or zero, but not all zero
};
Scan scan_floats(const std::byte* data, DType t, int64_t rows, int64_t cols);

class WeightWriter {
 public:
  WeightWriter(ir::MirWriter* out, Progress* progress, std::vector<std::string>* notes)
      : out_(out), progress_(progress), notes_(notes) {}
  Status write(const std::string& full_name, const Source& s);         // the numbers
  Status write_scales(const std::string& full_name, const Source& s);  // of an int8 weight, widened to F32

 private:
  Status write_part(const std::string& full_name, const Source& s, size_t part, int64_t first_row);
  ir::MirWriter* out_;
  Progress* progress_;
  std::vector<std::string>* notes_;
  std::vector<std::byte> buffer_;
};

}  // namespace mi::model
