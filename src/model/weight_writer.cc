#include "model/weight_writer.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/check.h"

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

Status WeightWriter::check_rows(const std::byte* data, DType t, int64_t row, int64_t n, Place* p) const {
  const int64_t cols = p->part.view.dim.back();
  const Scan scan = scan_floats(data, t, n, cols);
  p->subnormal += scan.subnormal_rows;
  if (scan.bad < 0) return {};
  const Shape& shape = p->source.shape;
  const int64_t at = p->first_row + row + scan.bad / cols;
  const bool experts = shape.size() == 3;
  float value = 0;
  convert_to_f32(data + scan.bad * int64_t(dtype_bytes(t)), t, &value, 1);
  return bad_input("{}: tensor {} holds {} ({}{}, row {}, column {}); the checkpoint is damaged, fetch it again",
                   p->part.tensor->path(), p->part.tensor->name(), std::isnan(value) ? "NaN" : "infinity", p->full_name,
                   experts ? fmt::format(", expert {}", at / shape[1]) : "", experts ? at % shape[1] : at,
                   scan.bad % cols);
}

Status WeightWriter::write_part(Place* p) {
  const StridedView& v = p->part.view;
  const DType dtype = p->source.dtype;
  const int64_t cols = v.dim.back(), rows = v.count() / cols, element = int64_t(dtype_bytes(dtype));
  const int64_t step = std::max<int64_t>(1, kChunkBytes / (cols * element));
  const bool direct = v.contiguous();
  for (int64_t r = 0; r < rows; r += step) {
    const int64_t n = std::min(step, rows - r);
    const std::byte* chunk = v.data + r * cols * element;
    if (!direct) {
      buffer_.resize(size_t(n * cols * element));
      gather(v, r * cols, n * cols, buffer_.data());
      chunk = buffer_.data();
    }
    MI_TRY_VOID(check_rows(chunk, dtype, r, n, p));
    const size_t bytes = size_t(n * cols * element);
    MI_TRY_VOID(out_->write({chunk, bytes}));
    progress_->advance(bytes, p->full_name);
  }
  return {};
}

// Narrowed to the source's type, which holds these numbers exactly (Binder::settle_dtypes).
Status WeightWriter::put_floats(std::span<const float> x, int64_t row, Place* p) {
  const DType dtype = p->source.dtype;
  MI_TRY_VOID(check_rows(reinterpret_cast<const std::byte*>(x.data()), DType::kF32, row,
                         int64_t(x.size()) / p->part.view.dim.back(), p));
  std::span<const std::byte> bytes = std::as_bytes(x);
  if (dtype != DType::kF32) {
    buffer_.resize(x.size() * 2);
    for (size_t i = 0; i < x.size(); ++i) {
      const uint16_t u = dtype == DType::kBF16 ? to_bf16(x[i]).bits : to_f16(x[i]).bits;
      std::memcpy(buffer_.data() + i * 2, &u, 2);
    }
    bytes = buffer_;
  }
  MI_TRY_VOID(out_->write(bytes));
  progress_->advance(bytes.size(), p->full_name);
  return {};
}

Status WeightWriter::write_dequantized(Place* p) {
  const StridedView& v = p->part.view;
  const int64_t cols = v.dim.back(), rows = v.count() / cols;
  if (!p->part.stored) {  // a float among quantized ones
    const int64_t step = std::max<int64_t>(1, kChunkBytes / (cols * 4)), element = int64_t(dtype_bytes(v.dtype));
    std::vector<std::byte> raw;
    for (int64_t r = 0; r < rows; r += step) {
      const int64_t n = std::min(step, rows - r);
      raw.resize(size_t(n * cols * element));
      gather(v, r * cols, n * cols, raw.data());
      floats_.resize(size_t(n * cols));
      convert_to_f32(raw.data(), v.dtype, floats_.data(), floats_.size());
      MI_TRY_VOID(put_floats(floats_, r, p));
    }
    return {};
  }
  const formats::Stored& stored = *p->part.stored;
  MI_TRY(const auto matrix, formats::open_stored(stored));
  const std::vector<ViewOp>& ops = p->source.origin.ops;
  const int64_t in = stored.cols(), all = stored.rows(), rank = int64_t(stored.shape.size());
  const int64_t each = rank > 1 ? stored.shape[size_t(rank - 2)] : 1;
  // Without a change of layout a few rows suffice, else it is expert by expert.
  const int64_t step = ops.empty() ? std::max<int64_t>(1, kChunkBytes / (in * 4)) : each;
  int64_t written = 0;
  for (int64_t r = 0; r < all; r += step) {
    const int64_t n = std::min(step, all - r);
    floats_.resize(size_t(n * in));
    matrix->rows(r, n, floats_.data());
    std::span<const float> x = floats_;
    if (!ops.empty()) {
      const TensorView whole{
          DType::kF32, {n, in}, reinterpret_cast<const std::byte*>(floats_.data()), floats_.size() * 4};
      MI_TRY(const StridedView moved, apply(ops, view_of(whole), false));
      moved_.resize(size_t(moved.count()));
      gather(moved, 0, moved.count(), reinterpret_cast<std::byte*>(moved_.data()));
      x = moved_;
    }
    MI_TRY_VOID(put_floats(x, written, p));
    written += int64_t(x.size()) / cols;
  }
  MI_CHECK_EQ(written, rows);
  return {};
}

Status WeightWriter::write(const std::string& full, const Source& s) {
  int64_t row = 0;
  const bool dequantized = s.dequantized();
  for (const Part& part : s.parts) {
    Place p{full, s, part, row};
    const Checkpoint::Tensor& t = *part.tensor;
    const size_t begin = t.entry->begin, bytes = t.entry->end - begin;
    t.file->will_need(begin, bytes);
    MI_TRY_VOID(dequantized ? write_dequantized(&p) : write_part(&p));
    if (p.subnormal > 0)
      notes_->push_back(fmt::format("warning: {}: tensor {}: {} rows hold nothing but subnormal numbers", t.path(),
                                    t.name(), p.subnormal));
    if (int64_t(bytes) >= kChunkBytes) t.file->drop(begin, bytes);
    row += part.view.count() / part.view.dim.back();
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
    const std::vector<float> rows = scale.size() == 1 ? std::vector<float>(size_t(p.stored->rows()), scale[0]) : scale;
    MI_TRY_VOID(out_->write(std::as_bytes(std::span(rows))));
    progress_->advance(rows.size() * 4, full);
  }
  return {};
}

}  // namespace mi::model
