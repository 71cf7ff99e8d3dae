#include "model/weight_writer.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace mi::model {
namespace {

constexpr int64_t kChunkBytes = int64_t(1) << 20;

// A float's bits without the sign order as its magnitude does: the largest of a row tells whether it holds NaN or
// infinity (>= infinity) or only subnormal numbers (< least_normal).
template <typename U>
Scan scan_bits(const std::byte* data, int64_t rows, int64_t cols, U infinity, U least_normal) {
  constexpr U kMagnitude = U(~U(0)) >> 1;
  const auto magnitude = [&](int64_t i) {
    U u;
    std::memcpy(&u, data + i * int64_t(sizeof(U)), sizeof(U));
    return U(u & kMagnitude);
  };
  Scan s;
  for (int64_t r = 0; r < rows; ++r) {
    U most = 0;
    for (int64_t c = 0; c < cols; ++c) most = std::max(most, magnitude(r * cols + c));
    if (most != 0 && most < least_normal) ++s.subnormal_rows;
    if (most < infinity) continue;
    int64_t c = 0;
    while (magnitude(r * cols + c) < infinity) ++c;
    s.bad = r * cols + c;
    return s;
  }
  return s;
}

}  // namespace

Scan scan_floats(const std::byte* data, DType t, int64_t rows, int64_t cols) {
  switch (t) {
    case DType::kBF16:
      return scan_bits<uint16_t>(data, rows, cols, 0x7f80, 0x0080);
    case DType::kF16:
      return scan_bits<uint16_t>(data, rows, cols, 0x7c00, 0x0400);
    case DType::kF32:
      return scan_bits<uint32_t>(data, rows, cols, 0x7f800000u, 0x00800000u);
    default:
      return {};
  }
}

Status WeightWriter::write_part(const std::string& full, const Source& s, size_t part, int64_t first_row) {
  const Part& p = s.parts[part];
  const StridedView& v = p.view;
  const MappedFile& file = p.tensor->file->file();
  const size_t source_bytes = p.tensor->entry->end - p.tensor->entry->begin;
  file.will_need(p.tensor->entry->begin, source_bytes);
  const int64_t cols = v.dim.back(), rows = v.count() / cols, element = int64_t(dtype_bytes(s.dtype));
  const int64_t step = std::max<int64_t>(1, kChunkBytes / (cols * element));
  const bool direct = v.contiguous();
  int64_t subnormal = 0;
  for (int64_t r = 0; r < rows; r += step) {
    const int64_t n = std::min(step, rows - r);
    const std::byte* chunk = v.data + r * cols * element;
    if (!direct) {
      buffer_.resize(size_t(n * cols * element));
      gather(v, r * cols, n * cols, buffer_.data());
      chunk = buffer_.data();
    }
    const Scan scan = scan_floats(chunk, s.dtype, n, cols);
    if (scan.bad >= 0) {
      const int64_t row = first_row + r + scan.bad / cols;
      const bool experts = s.shape.size() == 3;
      float value = 0;
      convert_to_f32(chunk + scan.bad * element, s.dtype, &value, 1);
      return bad_input("{}: tensor {} holds {} ({}{}, row {}, column {}); the checkpoint is damaged, fetch it again",
                       p.tensor->path(), p.tensor->name(), std::isnan(value) ? "NaN" : "infinity", full,
                       experts ? fmt::format(", expert {}", row / s.shape[1]) : "", experts ? row % s.shape[1] : row,
                       scan.bad % cols);
    }
    subnormal += scan.subnormal_rows;
    const size_t bytes = size_t(n * cols * element);
    MI_TRY_VOID(out_->write({chunk, bytes}));
    progress_->advance(bytes, full);
  }
  if (subnormal > 0)
    notes_->push_back(fmt::format("warning: {}: tensor {}: {} rows hold nothing but subnormal numbers",
                                  p.tensor->path(), p.tensor->name(), subnormal));
  if (int64_t(source_bytes) >= kChunkBytes) file.drop(p.tensor->entry->begin, source_bytes);
  return {};
}

Status WeightWriter::write(const std::string& full, const Source& s) {
  int64_t row = 0;
  for (size_t i = 0; i < s.parts.size(); ++i) {
    MI_TRY_VOID(write_part(full, s, i, row));
    row += s.parts[i].view.count() / s.parts[i].view.dim.back();
  }
  return {};
}

Status WeightWriter::write_scales(const std::string& full, const Source& s) {
  for (const Part& p : s.scales) {
    const std::vector<float> scale = to_f32_vector(p.tensor->view());
    for (size_t i = 0; i < scale.size(); ++i)
      if (!std::isfinite(scale[i]) || scale[i] < 0)
        return bad_input("{}: tensor {}: the scale of row {} is {} (for {})", p.tensor->path(), p.tensor->name(), i,
                         scale[i], full);
    MI_TRY_VOID(out_->write(std::as_bytes(std::span(scale))));
    progress_->advance(scale.size() * 4, full);
  }
  return {};
}

}  // namespace mi::model
