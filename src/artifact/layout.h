#pragma once
// The arithmetic of the engine file that writer, validator, compiler and executor share: padded sizes of packed
// matrices and the bytes of a row of an activation buffer. All inputs are true, small sizes; nothing here checks for
// overflow.

#include <algorithm>
#include <cstdint>

#include "artifact/types.h"
#include "tensor/int4.h"

namespace mi::artifact {

inline constexpr int64_t kAlign = 64;  // tensors, rows and buffers start at multiples of a cache line
inline constexpr int64_t kPackN = 16;  // packed matrices: N padded to this (equals kernels/gemm/pack.h)
inline constexpr int64_t kPackK = 64;  // and K to this

constexpr int64_t round_up(int64_t v, int64_t to) { return (v + to - 1) / to * to; }

// Stored bytes of elements of a packed matrix (of int4 an even number); kPlain depends on its dtype.
constexpr int64_t packed_bytes(Packing p, int64_t elements) {
  return p == Packing::kPackedI4     ? elements / 2
         : p == Packing::kPackedI8   ? elements
         : p == Packing::kPackedBF16 ? 2 * elements
                                     : 4 * elements;
}
// Bytes of the scales of a packed int8 or int4 tensor.
constexpr int64_t scale_bytes(const WeightTensor& w) {
  return w.packing == Packing::kPackedI4
             ? w.experts * w.n_pad * int4_groups(w.k, w.group) * int64_t(dtype_bytes(w.scale_dtype))
             : w.experts * w.n_pad * int64_t(sizeof(float));
}
// Where expert e stands among its tensor's matrices, and among their scales in a kPackedI4 tensor.
inline int64_t expert_slot(const WeightTensor& w, int64_t e) { return w.expert_slots.empty() ? e : w.expert_slots[size_t(e)]; }

// The lowest version whose programs can read the engine: 2 has int4, 3 scales of activations that saturate, or that are
// stored with grouped experts, 4 keys that are rotated as they are appended, activations that write int8 and groups of experts,
// 5 experts in another order.
inline int needed_format_version(const Manifest& m) {
  const auto stored_scale = [](const Instr& i) {
    if (const auto* q = std::get_if<QuantizeParams>(&i.params)) return q->saturate;
    return i.op == Op::kGroupedExperts && std::any_of(i.weights.begin(), i.weights.end(), [](const InstrWeight& w) { return w.role == Role::kInScale; });
  };
  const auto fused = [](const Instr& i) {
    if (!i.groups.empty()) return true;
    if (const auto* p = std::get_if<KvAppendParams>(&i.params)) return p->rotary_dim != 0;
    return i.op == Op::kActivation && !i.out.empty() && i.out[0].type.elem == Elem::kQ8;
  };
  if (std::any_of(m.weights.begin(), m.weights.end(), [](const WeightTensor& w) { return !w.expert_slots.empty(); })) return 5;
  if (std::any_of(m.program.begin(), m.program.end(), fused)) return 4;
  if (std::any_of(m.program.begin(), m.program.end(), stored_scale)) return 3;
  const auto int4 = [](const WeightTensor& w) { return w.packing == Packing::kPackedI4; };
  return std::any_of(m.weights.begin(), m.weights.end(), int4) || m.model.precision == "w4a8" ? 2 : 1;
}

// Bytes from one row of a buffer to the next: f32 and i32: 4 * cols; q8: cols, padded, then one line that begins with
// the row's scale; route: k ids, then k weights. A multiple of 64. kState has no buffer: 0.
constexpr int64_t row_bytes(const ValueType& t) {
  switch (t.elem) {
    case Elem::kF32:
    case Elem::kI32:
      return round_up(4 * t.cols, kAlign);
    case Elem::kQ8:
      return round_up(t.cols, kAlign) + kAlign;
    case Elem::kRoute:
      return round_up(8 * t.cols, kAlign);
    case Elem::kState:
      return 0;
  }
  return 0;
}
// What MemoryPlan::kv_bytes_per_token_bf16 has to be. Precondition: sizes that validate.h accepts.
inline int64_t kv_bytes_per_token_bf16(const std::vector<LayerCache>& caches) {
  int64_t elements = 0;
  for (const LayerCache& c : caches) elements += c.kv_heads * (c.k_dim + c.v_dim) + c.index_dim;
  return 2 * elements;
}
// Where in a q8 row its scale stands. `row_stride` is the buffer's.
constexpr int64_t q8_scale_offset(int64_t row_stride) { return row_stride - kAlign; }

}  // namespace mi::artifact
