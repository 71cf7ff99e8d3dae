#include "artifact/validate.h"

#include <algorithm>
#include <map>
#include <set>

#include "artifact/layout.h"

namespace mi::artifact {
namespace {

using Wide = __int128;  // products of four bounded sizes fit

constexpr int64_t kMaxArena = int64_t(1) << 40;  // bytes per token
constexpr int64_t kMaxLayers = 1 << 20;
constexpr int64_t kMaxIntK = 131072;  // 128 * 127 * K stays inside int32

bool in_range(int64_t v, int64_t lo, int64_t hi) { return v >= lo && v <= hi; }

bool is_digest(const std::string& s) {
  return s.size() == 32 &&
         std::all_of(s.begin(), s.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

Status validate_facts(const Manifest& m) {
  if (m.format_version > kFormatVersion)
    return refuse(
        "engine format {} is newer than this program's {}: use a newer metainfer, or build the engine again with this "
        "one",
        m.format_version, kFormatVersion);
  if (m.format_version < 1) return refuse("engine format {} does not exist", m.format_version);
  if (m.target != "cpu-x86_64")
    return refuse("target '{}' is not one that this program runs; it runs cpu-x86_64", m.target);
  const ModelFacts& f = m.model;
  if (!in_range(f.vocab, 1, kMaxDim)) return refuse("model.vocab {} is out of range", f.vocab);
  if (!in_range(f.hidden, 1, kMaxDim)) return refuse("model.hidden {} is out of range", f.hidden);
  if (!in_range(f.layers, 1, kMaxLayers)) return refuse("model.layers {} is out of range", f.layers);
  if (!in_range(f.max_positions, 1, kMaxDim)) return refuse("model.max_positions {} is out of range", f.max_positions);
  if (!in_range(f.max_k, 1, kMaxExperts)) return refuse("model.max_k {} is out of range", f.max_k);
  for (int64_t id : f.eos_ids)
    if (!in_range(id, 0, kMaxDim)) return refuse("model.eos_ids has {}, which is no token id", id);
  for (int64_t id : {f.bos_id, f.pad_id})
    if (!in_range(id, -1, kMaxDim)) return refuse("model.bos_id or pad_id {} is no token id", id);
  if (f.total_params < 0 || !in_range(f.active_params, 0, f.total_params))
    return refuse("model.active_params {} and total_params {} do not fit together", f.active_params, f.total_params);
  if (f.precision != "fp32" && f.precision != "bf16" && f.precision != "w8a8" && f.precision != "w4a8")
    return refuse("model.precision '{}' is not fp32, bf16, w8a8 or w4a8", f.precision);
  if (const int needed = needed_format_version(m); m.format_version < needed)
    return refuse("engine format {} has no {}, which came with format {}", m.format_version,
                  needed == 2   ? "int4 weights"
                  : needed == 3 ? "such scales of activations"
                  : needed == 4 ? "such fused instructions"
                                : "experts in another order",
                  needed);
  if (m.default_kv != "f32" && m.default_kv != "bf16" && m.default_kv != "int8")
    return refuse("default_kv '{}' is not f32, bf16 or int8", m.default_kv);
  if (int64_t(m.caches.size()) != f.layers)
    return refuse("there are {} caches for {} layers", m.caches.size(), f.layers);
  Wide kv = 0;
  for (size_t i = 0; i < m.caches.size(); ++i) {
    const LayerCache& c = m.caches[i];
    for (int64_t v : {c.kv_heads, c.k_dim, c.v_dim, c.index_dim, c.window})
      if (!in_range(v, 0, kMaxDim)) return refuse("caches[{}] has a size {} out of range", i, v);
    kv += Wide(2) * (Wide(c.kv_heads) * (c.k_dim + c.v_dim) + c.index_dim);
  }
  if (kv != m.memory.kv_bytes_per_token_bf16)
    return refuse("memory.kv_bytes_per_token_bf16 is {}, the caches take {}", m.memory.kv_bytes_per_token_bf16,
                  int64_t(std::min<Wide>(kv, INT64_MAX)));
  return {};
}

struct Range {
  int64_t begin, end;
  size_t tensor;
};

Status validate_slots(const WeightTensor& w, const std::string& at) {
  if (w.packing == Packing::kPlain) return refuse("{} has expert_slots, which only packed matrices have", at);
  if (int64_t(w.expert_slots.size()) != w.experts)
    return refuse("{} has {} expert_slots for {} experts", at, w.expert_slots.size(), w.experts);
  std::vector<bool> taken(w.expert_slots.size());
  for (const int32_t s : w.expert_slots) {
    if (!in_range(s, 0, w.experts - 1)) return refuse("{} has an expert at place {} of {}", at, s, w.experts);
    if (taken[size_t(s)]) return refuse("{} has two experts at place {}", at, s);
    taken[size_t(s)] = true;
  }
  return {};
}

Status validate_tensor(const Manifest& m, size_t index, std::vector<Range>* ranges) {
  const WeightTensor& w = m.weights[index];
  const std::string at = fmt::format("weights[{}] '{}'", index, w.name);
  if (w.name.empty()) return refuse("{} has no name", at);
  if (!in_range(w.experts, 1, kMaxExperts) || !in_range(w.n, 1, kMaxDim) || !in_range(w.k, 1, kMaxDim))
    return refuse("{} has sizes {} x [{}, {}] out of range", at, w.experts, w.n, w.k);
  const bool int8 = w.packing == Packing::kPackedI8, int4 = w.packing == Packing::kPackedI4;
  const DType want = int8                                ? DType::kI8
                     : int4                              ? DType::kU8
                     : w.packing == Packing::kPackedBF16 ? DType::kBF16
                                                         : DType::kF32;
  const bool plain = w.packing == Packing::kPlain;
  if (w.dtype != want && !(plain && w.dtype == DType::kBF16))
    return refuse("{} has dtype {}, which its packing does not store", at, dtype_name(w.dtype));
  if (plain && w.k > 1 && w.experts > 1)
    return refuse("{} is a plain matrix of several experts, which has to be packed", at);

  if (int4 ? !int4_group_ok(w.group) : w.group != 0)
    return refuse("{} has group {}: it is 32, 64 or 128 for packed_i4 and 0 for other packings", at, w.group);
  if (w.scale_dtype != DType::kF32 && !(int4 && w.scale_dtype == DType::kBF16))
    return refuse("{} has scale_dtype {}: it is F32, or BF16 for packed_i4", at, dtype_name(w.scale_dtype));

  const bool vector = plain && w.k == 1;
  const int64_t n_pad = plain && !vector ? w.n : round_up(w.n, kPackN);
  const int64_t k_pad = plain ? w.k : round_up(w.k, kPackK);
  if (w.n_pad != n_pad || w.k_pad != k_pad)
    return refuse("{} has padded sizes [{}, {}], expected [{}, {}]", at, w.n_pad, w.k_pad, n_pad, k_pad);
  const Wide stride = int4 ? Wide(n_pad) * (k_pad / 2) : Wide(n_pad) * k_pad * int64_t(dtype_bytes(w.dtype));
  if (Wide(w.expert_stride) != stride)
    return refuse("{} has expert_stride {}, which is not the size of one padded matrix", at, w.expert_stride);
  if (Wide(w.bytes) != stride * w.experts)
    return refuse("{} has {} bytes, which is not experts * expert_stride", at, w.bytes);
  if (!w.expert_slots.empty()) MI_TRY_VOID(validate_slots(w, at));
  if ((int8 || int4) && w.k > kMaxIntK)
    return refuse("{} has {} columns; int8 sums over more than {} could leave int32", at, w.k, kMaxIntK);

  // The segment that holds the elements holds the scales and sums too.
  const auto seg = std::find_if(m.segments.begin(), m.segments.end(), [&](const Segment& s) {
    return w.offset >= s.offset && w.offset - s.offset < s.bytes;
  });
  if (seg == m.segments.end()) return refuse("{} starts at {}, outside weights.bin", at, w.offset);
  auto place = [&](const char* part, int64_t offset, Wide bytes) -> Status {
    if (offset % kAlign != 0)
      return refuse("{}: the {} start at {}, not at a multiple of {}", at, part, offset, kAlign);
    if (offset < seg->offset || Wide(offset) + bytes > Wide(seg->offset) + seg->bytes)
      return refuse("{}: the {} leave their segment (offset {}, {} bytes)", at, part, offset,
                    int64_t(std::min<Wide>(bytes, INT64_MAX)));
    ranges->push_back({offset, int64_t(offset + bytes), index});
    return {};
  };
  MI_TRY_VOID(place("elements", w.offset, w.bytes));
  const Wide columns = Wide(w.experts) * n_pad;
  if (int8)
    MI_TRY_VOID(place("scales", w.scale_offset, columns * 4));
  else if (int4)
    MI_TRY_VOID(place("scales", w.scale_offset,
                      columns * int4_groups(w.k, w.group) * int64_t(dtype_bytes(w.scale_dtype))));
  else if (w.scale_offset != 0)
    return refuse("{} has scales, which only packed_i8 and packed_i4 have", at);
  if (int8)
    MI_TRY_VOID(place("column sums", w.colsum_offset, columns * 4));
  else if (w.colsum_offset != 0)
    return refuse("{} has column sums, which only packed_i8 has", at);
  return {};
}

}  // namespace

Status validate_weights(const Manifest& m, int64_t weights_bin_bytes) {
  if (m.memory.weight_bytes != weights_bin_bytes)
    return refuse("weights.bin has {} bytes, {} were written: the file is cut off or belongs to another engine",
                  weights_bin_bytes, m.memory.weight_bytes);
  int64_t end = 0;
  for (size_t i = 0; i < m.segments.size(); ++i) {
    const Segment& s = m.segments[i];
    if (s.offset != end) return refuse("segments[{}] starts at {}, expected {}", i, s.offset, end);
    if (s.offset % kSegmentAlign != 0)
      return refuse("segments[{}] starts at {}, not at a multiple of 2 MiB", i, s.offset);
    if (s.bytes <= 0 || s.bytes % kAlign != 0 || s.bytes > weights_bin_bytes - end)
      return refuse("segments[{}] has {} bytes, which does not fit weights.bin", i, s.bytes);
    if (!is_digest(s.xxh3)) return refuse("segments[{}] has '{}' for a checksum, expected 32 hex digits", i, s.xxh3);
    end += s.bytes;
  }
  if (end != weights_bin_bytes)
    return refuse("the segments cover {} of the {} bytes of weights.bin", end, weights_bin_bytes);

  std::vector<Range> ranges;
  for (size_t i = 0; i < m.weights.size(); ++i) MI_TRY_VOID(validate_tensor(m, i, &ranges));
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < ranges.size(); ++i)
    if (ranges[i].begin < ranges[i - 1].end)
      return refuse("weights '{}' and '{}' share bytes of weights.bin", m.weights[ranges[i - 1].tensor].name,
                    m.weights[ranges[i].tensor].name);
  return {};
}

Status validate_buffers(const Manifest& m) {
  const int64_t instrs = int64_t(m.program.size());
  const int64_t arena = m.memory.activation_bytes_per_token;
  if (!in_range(arena, 0, kMaxArena)) return refuse("memory.activation_bytes_per_token {} is out of range", arena);
  for (size_t i = 0; i < m.buffers.size(); ++i) {
    const Buffer& b = m.buffers[i];
    const std::string at = fmt::format("buffers[{}] '{}'", i, b.name);
    if (b.type.elem == Elem::kState) return refuse("{} is a state, which has no buffer", at);
    if (!in_range(b.type.cols, 1, kMaxDim)) return refuse("{} has {} columns", at, b.type.cols);
    if (b.row_stride != row_bytes(b.type))
      return refuse("{} has row_stride {}, its type takes {}", at, b.row_stride, row_bytes(b.type));
    const int64_t most = b.type.rows == Rows::kPair ? m.model.max_k : 1;
    if (!in_range(b.rows_per_token, 1, most))
      return refuse("{} has {} rows per token, at most {} are possible", at, b.rows_per_token, most);
    if (b.offset_per_token < 0 || b.offset_per_token % kAlign != 0)
      return refuse("{} has offset_per_token {}, not a multiple of {}", at, b.offset_per_token, kAlign);
    if (Wide(b.offset_per_token) + Wide(b.row_stride) * b.rows_per_token > arena)
      return refuse("{} ends outside the arena of {} bytes per token", at, arena);
    if (b.first_instr < 0 || b.first_instr > b.last_instr || b.last_instr >= instrs)
      return refuse("{} lives from instruction {} to {} of {}", at, b.first_instr, b.last_instr, instrs);
  }

  // Sweep over the program: the buffers alive are kept by offset, so that a new one can only overlap its neighbours.
  std::vector<size_t> starts(m.buffers.size()), ends;
  for (size_t i = 0; i < starts.size(); ++i) starts[i] = i;
  ends = starts;
  std::sort(starts.begin(), starts.end(),
            [&](size_t a, size_t b) { return m.buffers[a].first_instr < m.buffers[b].first_instr; });
  std::sort(ends.begin(), ends.end(),
            [&](size_t a, size_t b) { return m.buffers[a].last_instr < m.buffers[b].last_instr; });
  std::map<int64_t, size_t> alive;  // offset -> buffer
  auto bytes = [&](size_t i) { return m.buffers[i].row_stride * m.buffers[i].rows_per_token; };
  size_t next_end = 0;
  for (size_t i : starts) {
    const Buffer& b = m.buffers[i];
    while (next_end < ends.size() && m.buffers[ends[next_end]].last_instr < b.first_instr)
      alive.erase(m.buffers[ends[next_end++]].offset_per_token);
    auto clash = [&](size_t other) {
      return refuse("buffers '{}' and '{}' are alive together and share bytes of the arena", m.buffers[other].name,
                    b.name);
    };
    const auto after = alive.lower_bound(b.offset_per_token);
    if (after != alive.end() && after->first < b.offset_per_token + bytes(i)) return clash(after->second);
    if (after != alive.begin()) {
      const auto before = std::prev(after);
      if (before->first + bytes(before->second) > b.offset_per_token) return clash(before->second);
    }
    alive.emplace(b.offset_per_token, i);
  }
  return {};
}

Status validate(const Manifest& m, int64_t weights_bin_bytes) {
  MI_TRY_VOID(validate_facts(m));
  MI_TRY_VOID(validate_weights(m, weights_bin_bytes));
  MI_TRY_VOID(validate_buffers(m));
  return validate_program(m);
}

}  // namespace mi::artifact
