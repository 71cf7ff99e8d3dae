#pragma once
// Streams bound weights into a MIR directory: no copy where the checkpoint's layout is already the wanted one, else
// through a small buffer; quantized ones are dequantized a few rows at a time, or one matrix where its layout changes.
// Every float is looked at: NaN and infinity are refused with file, tensor and place; rows of
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
  struct Place {
    const std::string& full_name;
    const Source& source;
    const Part& part;
    int64_t first_row;  // of the part, in the weight
    int64_t subnormal = 0;
  };
  Status write_part(Place* p);
  Status write_dequantized(Place* p);
  // Rows [row, row + n) of the part, in float or the source's type.
  Status check_rows(const std::byte* data, DType t, int64_t row, int64_t n, Place* p) const;
  Status put_floats(std::span<const float> x, int64_t row, Place* p);
  ir::MirWriter* out_;
  Progress* progress_;
  std::vector<std::string>* notes_;
  std::vector<std::byte> buffer_;
  std::vector<float> floats_, moved_;
};

}  // namespace mi::model
