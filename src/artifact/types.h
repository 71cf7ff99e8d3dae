#pragma once
// The engine directory's contents as plain data: the only thing compiler and server share. docs/artifact.md has the
// on-disk form and the rules of compatibility. Everything here was validated (validate.h) before anyone sees it.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tensor/dtype.h"
#include "tensor/op.h"
#include "tensor/tensor_view.h"

namespace mi::artifact {

inline constexpr int kFormatVersion = 5;  // an engine of a newer version is refused
inline constexpr int64_t kSegmentAlign = 2 << 20;
inline constexpr int64_t kSegmentBytes = int64_t(256) << 20;  // a larger one has a single tensor
inline constexpr int64_t kKvPageTokens = 64;

// ---- weights.bin -------------------------------------------------------------------------------------------------
// kPlain: row-major as shape says. kPackedF32 / kPackedBF16 / kPackedI8: matrices [N, K] (or E of them) in the one
// packed layout [N/16][K/g][16][g], g = 4 / bytes per element (kernels/gemm/pack.h); N is padded to 16 and K to 64 with
// zeros. kPackedI4: two int8 lines in one, [N/16][K/8][16][4] bytes of two 4-bit numbers (since version 2).
enum class Packing : uint8_t { kPlain, kPackedF32, kPackedBF16, kPackedI8, kPackedI4 };

struct WeightTensor {
  std::string name;  // source names joined with '+', e.g. "layers.3.attn.q.weight+..."
  Packing packing = Packing::kPlain;
  DType dtype = DType::kF32;  // of the stored elements
  int64_t experts = 1;        // E matrices behind each other, each expert_stride bytes
  int64_t n = 0, k = 0;       // true sizes; kPlain vectors: n elements, k = 1
  int64_t n_pad = 0, k_pad = 0;
  int64_t offset = 0, bytes = 0;  // in weights.bin; 64-byte aligned
  int64_t expert_stride = 0;
  // kPackedI8: float [E][n_pad]; kPackedI4: scale_dtype [E][n_pad/16][groups][16], groups = ceil(k / group); else 0.
  int64_t scale_offset = 0;
  int64_t colsum_offset = 0;  // kPackedI8: int32 [E][n_pad] = 128 * sum_k w, for kernels with unsigned activations
  int64_t group = 0;                   // kPackedI4: 32, 64 or 128
  DType scale_dtype = DType::kF32;     // kPackedI4: F32, or BF16 where that is exact
  // Experts' matrices: expert e stands at place expert_slots[e], and so do its scales of kPackedI4; what int8 has beside its
  // elements, and biases, are in the order of experts. Empty: so are all (since version 5).
  std::vector<int32_t> expert_slots;
};

struct Segment {  // a contiguous, kSegmentAlign-aligned part of weights.bin with its own checksum
  int64_t offset = 0, bytes = 0;
  std::string xxh3;  // 32 hex digits, XXH3-128
};

// ---- program ------------------------------------------------------------------------------------------------------
// Activation buffers live in one arena whose plan is linear in the step's token capacity T: buffer i starts at
// T * offset_per_token and holds rows * row_stride bytes, rows = T (kToken), T*k (kPair) or T (kLogit). So one plan
// fits any T. A kQ8 row is int8 [cols], then padding to 64, then the float scale in the first 4 bytes of a last 64-byte
// line. A kRoute row is int32 ids [k], float weights [k].
struct Buffer {
  std::string name;
  ValueType type;
  int64_t row_stride = 0;                   // bytes, multiple of 64
  int64_t rows_per_token = 1;               // 1, or k for pair rows
  int64_t offset_per_token = 0;             // multiple of 64
  int32_t first_instr = 0, last_instr = 0;  // lifetime, both inclusive, in the flat program
};

// A value as an instruction sees it: columns [col, col + cols) of a buffer; buffer -1 for kState.
struct Operand {
  int32_t buffer = -1;
  int64_t col = 0;
  ValueType type;
};

struct InstrWeight {
  Role role = Role::kWeight;
  int32_t tensor = 0;  // index into Manifest::weights
};

struct Instr {
  Op op = Op::kAdd;
  int32_t layer = -1;  // -1: prologue or epilogue
  std::vector<Operand> in, out;
  int32_t residual = -1;  // index into `in` of the residual operand, -1 if none
  int32_t scratch = -1;   // buffer for the kernel's own use, -1 if none
  std::vector<InstrWeight> weights;
  OpParams params;
  // kGroupedExperts: experts that are computed together, a group after the other, each expert in one group; empty: all at
  // once. The result does not depend on it.
  std::vector<std::vector<int32_t>> groups;
  std::string name;           // result's name in the graph, for taps and reports
  bool layer_output = false;  // out[0] is the residual stream after `layer` (after the embedding for layer -1)
};

// Per layer, per token bytes of cache by kind, independent of the KV type chosen at load.
struct LayerCache {
  int64_t kv_heads = 0, k_dim = 0, v_dim = 0;
  int64_t index_dim = 0;  // 0: no index keys
  int64_t window = 0;
};

// ---- engine.json ---------------------------------------------------------------------------------------------------
struct ModelFacts {
  std::string name, family, model_type;
  int64_t vocab = 0, hidden = 0, layers = 0, max_positions = 0;
  std::vector<int64_t> eos_ids;
  int64_t bos_id = -1, pad_id = -1;
  int64_t total_params = 0, active_params = 0;
  int64_t max_k = 1;      // largest top-k of any MoE layer
  std::string precision;  // "fp32", "bf16", "w8a8", "w4a8": what most matrix weights are
};

struct PassReport {
  std::string name;
  bool skipped = false, changed = false;
  double seconds = 0;  // of the build; not stored, so that equal input gives equal bytes
  int64_t nodes_before = 0, nodes_after = 0;
};

struct Fallback {
  std::string where, what, why, fix;
};  // an op outside the fast path

struct MemoryPlan {
  int64_t weight_bytes = 0;                // weights.bin
  int64_t activation_bytes_per_token = 0;  // arena
  int64_t kv_bytes_per_token_bf16 = 0;     // all layers, K and V and index keys at 2 bytes
};

struct Manifest {
  int format_version = kFormatVersion;  // the writer stores the lowest that has what this engine uses (layout.h)
  std::string tool_version;
  std::string target = "cpu-x86_64";
  ModelFacts model;
  MemoryPlan memory;
  std::vector<PassReport> passes;
  std::vector<Fallback> fallbacks;
  std::map<std::string, std::string> options;  // how it was built: opt_level, precision, disabled passes
  std::vector<Segment> segments;
  std::vector<WeightTensor> weights;
  std::vector<Buffer> buffers;
  std::vector<Instr> program;
  std::vector<LayerCache> caches;   // one per layer
  std::string default_kv = "bf16";  // "f32" for float engines
};

}  // namespace mi::artifact
