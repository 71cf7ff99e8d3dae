#include "compiler/emit.h"

#include <algorithm>
#include <cstring>

#include "artifact/layout.h"
#include "kernels/gemm/pack.h"
#include "tensor/finite.h"
#include "tensor/int4.h"

namespace mi::compiler {
namespace {

using artifact::Packing;
using artifact::WeightTensor;

// One source tensor of a plan: [experts][n][k] elements, and scales [experts][n] when it is int8, [experts][n][groups]
// when it is int4.
struct Source {
  std::string name;
  TensorView data, scale;
  int64_t n = 0;           // rows per expert
  int64_t row_offset = 0;  // in the stacked matrix
};

bool has_scales(const WeightTensor& t) { return t.packing == Packing::kPackedI8 || t.packing == Packing::kPackedI4; }

std::vector<Source> open_sources(const ir::MirDir& mir, const WeightPlan& plan) {
  const WeightTensor& t = plan.tensor;
  std::vector<Source> sources;
  int64_t at = 0;
  for (const std::string& name : plan.sources) {
    Source s{name, mir.weight(name), {}, 0, at};
    if (has_scales(t)) {
      MI_CHECK(s.data.dtype == t.dtype, "{}", name);
      s.scale = mir.weight(name + "_scale");
    }
    s.n = s.data.count() / (t.experts * (t.packing == Packing::kPackedI4 ? int4_row_bytes(t.k) : t.k));
    at += s.n;
    sources.push_back(std::move(s));
  }
  MI_CHECK_EQ(at, t.n);
  return sources;
}

// Elements [first, first + count) of v, a tensor of s, are finite.
Status check_finite(const Source& s, const TensorView& v, int64_t first, int64_t count) {
  const int64_t bad = first_not_finite(v.data + size_t(first) * dtype_bytes(v.dtype), v.dtype, count);
  if (bad < 0) return {};
  return bad_input("tensor '{}{}' of shape {} holds {}: the checkpoint is damaged; export it again from an intact copy",
                   s.name, v.data == s.scale.data ? "_scale" : "", shape_text(v.shape), not_finite_text(v, first + bad));
}

// The same elements, checked and widened to float.
Status read_floats(const Source& s, const TensorView& v, int64_t first, int64_t count, float* out) {
  MI_TRY_VOID(check_finite(s, v, first, count));
  convert_to_f32(v.data + size_t(first) * dtype_bytes(v.dtype), v.dtype, out, size_t(count));
  return {};
}

std::span<const std::byte> as_bytes(const void* p, int64_t bytes) {
  return {static_cast<const std::byte*>(p), size_t(bytes)};
}

class Emitter {
 public:
  Emitter(const ir::MirDir& mir, artifact::ArtifactWriter& out, Progress* progress)
      : mir_(mir), out_(out), progress_(progress) {}

  Status emit(WeightPlan& plan) {
    WeightTensor& t = plan.tensor;
    const std::vector<Source> sources = open_sources(mir_, plan);
    MI_TRY_VOID(out_.begin_tensor(stored_bytes(t)));
    MI_TRY(t.offset, out_.align());
    if (t.packing != Packing::kPlain) {
      MI_TRY_VOID(emit_packed(t, sources));
    } else {
      MI_TRY_VOID(emit_plain(t, sources));
    }
    for (const Source& s : sources) mir_.give_back(s.name);
    if (has_scales(t))
      for (const Source& s : sources) mir_.give_back(s.name + "_scale");
    return {};
  }

 private:
  Status write(const void* p, int64_t bytes) {
    MI_TRY_VOID(out_.write(as_bytes(p, bytes)));
    if (progress_) progress_->advance(uint64_t(bytes));
    return {};
  }
  // Rows [r0, r0 + rows) of expert e, all sources, into chunk_ (packed, zero padding).
  Status pack_rows(const WeightTensor& t, const std::vector<Source>& sources, int64_t e, int64_t r0, int64_t rows) {
    chunk_.assign(size_t(artifact::packed_bytes(t.packing, rows * t.k_pad)), std::byte{0});
    for (const Source& s : sources) {
      const int64_t begin = std::max(r0, s.row_offset), end = std::min(r0 + rows, s.row_offset + s.n);
      if (begin >= end) continue;
      const int64_t n = end - begin, first = (e * s.n + begin - s.row_offset) * t.k;
      if (t.packing == Packing::kPackedI8) {
        const auto* w = reinterpret_cast<const int8_t*>(s.data.data) + first;
        kernels::pack_i8(w, n, t.k, reinterpret_cast<int8_t*>(chunk_.data()), begin - r0);
        kernels::colsum_i8(w, n, t.k, colsums_.data() + e * t.n_pad + begin);
        MI_TRY_VOID(read_floats(s, s.scale, e * s.n + begin - s.row_offset, n, scales_.data() + e * t.n_pad + begin));
        for (int64_t i = 0; i < n; ++i)
          if (scales_[size_t(e * t.n_pad + begin + i)] < 0)
            return bad_input("tensor '{}_scale' has a negative scale: quantize the model again", s.name);
        continue;
      }
      if (t.packing == Packing::kPackedI4) {
        MI_TRY_VOID(pack_int4(t, s, e, begin, n, r0));
        continue;
      }
      MI_TRY_VOID(pack_floats(t, s, first, n, begin - r0));
    }
    return {};
  }

  // Rows [begin, begin + n) of expert e, which are all s's, to chunk_, which starts at row r0; scales_: all experts'.
  Status pack_int4(const WeightTensor& t, const Source& s, int64_t e, int64_t begin, int64_t n, int64_t r0) {
    const int64_t first = e * s.n + begin - s.row_offset, groups = int4_groups(t.k, t.group);
    const auto* w = reinterpret_cast<const uint8_t*>(s.data.data) + first * int4_row_bytes(t.k);
    kernels::pack_i4(w, n, t.k, reinterpret_cast<uint8_t*>(chunk_.data()), begin - r0);
    floats_.resize(size_t(n * groups));
    MI_TRY_VOID(read_floats(s, s.scale, first * groups, n * groups, floats_.data()));
    kernels::pack_scales_i4(floats_.data(), n, groups, scales_.data() + artifact::expert_slot(t, e) * t.n_pad * groups, begin);
    return {};
  }

  // n rows of s from element `first` on, to row `at` of chunk_.
  Status pack_floats(const WeightTensor& t, const Source& s, int64_t first, int64_t n, int64_t at) {
    const std::byte* w = s.data.data + size_t(first) * dtype_bytes(s.data.dtype);
    if (s.data.dtype == t.dtype) {  // the common case: straight from the mapped file
      MI_TRY_VOID(check_finite(s, s.data, first, n * t.k));
    } else {
      floats_.resize(size_t(n * t.k));
      MI_TRY_VOID(read_floats(s, s.data, first, n * t.k, floats_.data()));
      w = reinterpret_cast<const std::byte*>(floats_.data());
      if (t.dtype == DType::kBF16) w = reinterpret_cast<const std::byte*>(round_to_bf16(floats_));
    }
    if (t.packing == Packing::kPackedF32)
      kernels::pack_f32(reinterpret_cast<const float*>(w), n, t.k, reinterpret_cast<float*>(chunk_.data()), at);
    else
      kernels::pack_bf16(reinterpret_cast<const uint16_t*>(w), n, t.k, reinterpret_cast<uint16_t*>(chunk_.data()), at);
    return {};
  }
  const uint16_t* round_to_bf16(const std::vector<float>& v) {
    halves_.resize(v.size());
    for (size_t i = 0; i < v.size(); ++i) halves_[i] = to_bf16(v[i]).bits;
    return halves_.data();
  }

  Status emit_packed(WeightTensor& t, const std::vector<Source>& sources) {
    if (has_scales(t)) scales_.assign(size_t(artifact::scale_bytes(t)) / sizeof(float), 0.0f);
    if (t.packing == Packing::kPackedI8) colsums_.assign(size_t(t.experts * t.n_pad), 0);
    const int64_t row_bytes = artifact::packed_bytes(t.packing, t.k_pad);
    const int64_t rows_per_chunk =
        std::max<int64_t>(kernels::kNTile, kChunkBytes / row_bytes / kernels::kNTile * kernels::kNTile);
    std::vector<int64_t> expert_at(static_cast<size_t>(t.experts));
    for (int64_t e = 0; e < t.experts; ++e) expert_at[size_t(artifact::expert_slot(t, e))] = e;
    for (const int64_t e : expert_at)
      for (int64_t r = 0; r < t.n_pad; r += rows_per_chunk) {
        const int64_t rows = std::min(rows_per_chunk, t.n_pad - r);
        MI_TRY_VOID(pack_rows(t, sources, e, r, rows));
        MI_TRY_VOID(write(chunk_.data(), rows * row_bytes));
      }
    if (!has_scales(t)) return {};
    MI_TRY(t.scale_offset, out_.align());
    // int4 reads a scale for every 16 to 64 bytes of weights: half the size where that loses nothing.
    if (t.packing == Packing::kPackedI4 &&
        std::all_of(scales_.begin(), scales_.end(), [](float v) { return to_f32(to_bf16(v)) == v; }))
      t.scale_dtype = DType::kBF16;
    MI_TRY_VOID(write_floats(t.scale_dtype, scales_));
    if (t.packing != Packing::kPackedI8) return {};
    MI_TRY(t.colsum_offset, out_.align());
    return write(colsums_.data(), int64_t(colsums_.size() * sizeof(int32_t)));
  }

  // Vectors (stacked per expert, zero padding) and the embedding table.
  Status emit_plain(const WeightTensor& t, const std::vector<Source>& sources) {
    const int64_t elem = int64_t(dtype_bytes(t.dtype));
    const std::vector<float> padding(size_t(t.n_pad - t.n), 0.0f);  // vectors only: a table has none
    const int64_t rows_per_chunk = std::max<int64_t>(1, kChunkBytes / (t.k * 4));
    for (int64_t e = 0; e < t.experts; ++e) {
      for (const Source& s : sources)
        for (int64_t r = 0; r < s.n; r += rows_per_chunk) {
          const int64_t count = std::min(rows_per_chunk, s.n - r) * t.k;
          floats_.resize(size_t(count));
          MI_TRY_VOID(read_floats(s, s.data, (e * s.n + r) * t.k, count, floats_.data()));
          MI_TRY_VOID(write_floats(t.dtype, floats_));
        }
      if (!padding.empty()) MI_TRY_VOID(write_floats(t.dtype, padding));
    }
    MI_CHECK_EQ(out_.offset() - t.offset, t.experts * t.n_pad * t.k_pad * elem);
    return {};
  }
  Status write_floats(DType dtype, const std::vector<float>& v) {
    if (dtype == DType::kF32) return write(v.data(), int64_t(v.size() * sizeof(float)));
    return write(round_to_bf16(v), int64_t(v.size() * sizeof(uint16_t)));
  }

  const ir::MirDir& mir_;
  artifact::ArtifactWriter& out_;
  Progress* progress_;
  std::vector<std::byte> chunk_;
  std::vector<float> floats_, scales_;
  std::vector<uint16_t> halves_;
  std::vector<int32_t> colsums_;
};

}  // namespace

int64_t stored_bytes(const WeightTensor& t) {
  const int64_t scales = has_scales(t) ? artifact::round_up(artifact::scale_bytes(t), artifact::kAlign) : 0;
  const int64_t colsums =
      t.packing == Packing::kPackedI8 ? artifact::round_up(t.experts * t.n_pad * 4, artifact::kAlign) : 0;
  return artifact::round_up(t.bytes, artifact::kAlign) + scales + colsums;
}

int64_t planned_bytes(const std::vector<WeightPlan>& weights) {
  int64_t sum = 0;
  for (const WeightPlan& w : weights) sum += stored_bytes(w.tensor);
  return sum;
}

Status emit_weights(const ir::MirDir& mir, std::vector<WeightPlan>& weights, artifact::ArtifactWriter& out,
                    Progress* progress) {
  Emitter emitter(mir, out, progress);
  for (WeightPlan& w : weights) MI_TRY_VOID(emitter.emit(w));
  return {};
}

}  // namespace mi::compiler
