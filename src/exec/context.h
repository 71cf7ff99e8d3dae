#pragma once
// What an instruction needs to run: the loaded engine's memory and the step's rows. Built by load.cc, filled per step by
// run.cc, read by ops_*.cc.

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "artifact/layout.h"
#include "artifact/reader.h"
#include "exec/engine.h"
#include "exec/expert_stream.h"
#include "exec/memory.h"
#include "kernels/attention/attention.h"
#include "kernels/gemm/gemm.h"
#include "kernels/moe/grouped.h"
#include "kernels/rope/rope.h"

namespace mi::exec {

// A tensor of weights.bin where it lies in memory.
struct Weight {
  const artifact::WeightTensor* info = nullptr;
  const std::byte* data = nullptr;     // null for streamed experts, and so are int4's scales
  const float* scales = nullptr;       // int8, and int4 unless as bfloat16
  const uint16_t* scales_bf16 = nullptr;
  const int32_t* colsums = nullptr;    // int8
  // Experts' matrices only: where each lies; of streamed experts those that the instruction at hand has in memory.
  std::vector<kernels::ExpertPlace> experts;
  const float* floats() const { return reinterpret_cast<const float*>(data); }   // vectors (validated: plain F32)
};

// A router, and the next one in the program: the residual stream changes little from layer to layer, so that what the next
// router says about this one's input tells which experts it will choose.
struct Foresight {
  size_t router = 0, next_router = 0, next_route = 0;  // instructions
  std::vector<size_t> next_groups;                     // of ExpertStream, whose experts next_route chooses
};

struct Context {
  artifact::LoadedArtifact artifact;
  LoadOptions options;
  hw::ThreadPool* pool = nullptr;
  hw::CpuFeatures cpu;

  std::vector<Weight> weights;                       // by tensor
  const kernels::GemmKernel* gemm[4] = {};           // by GemmFormat
  std::vector<std::unique_ptr<kernels::RopeTable>> rope_tables;
  std::vector<const kernels::RopeTable*> rope;       // by instruction; null where nothing is rotated
  Region memory, arena, kv;                           // memory: the weights, where they were read
  std::string weights_place;
  std::unique_ptr<ExpertStream> stream;              // with LoadOptions::expert_cache_bytes: a group for each instruction of experts
  std::vector<int32_t> stream_group;                 // by instruction; -1 for other ops
  std::vector<int32_t> wanted;                       // experts of the instruction at hand, ascending
  std::vector<Foresight> foresight;                  // by router
  std::vector<int32_t> foreseen;                     // experts of the groups in foresight_groups, the likeliest first
  std::vector<size_t> foreseen_groups;
  std::vector<kernels::KvCache> caches;              // by layer, into kv
  kernels::SumOrder attention_order = kernels::SumOrder::kAscending;   // of every step and row: answers must not depend on how many there are
  int64_t kv_page_bytes = 0;
  int64_t max_positions = 0;                         // of a sequence: what rope tables and pages allow

  // The step.
  int64_t tokens = 0, logit_count = 0;
  std::vector<int32_t> ids, positions, logit_rows;   // [tokens], [tokens], rows whose logits are wanted [logit_count]
  kernels::KvStep kv_step;
  kernels::AttentionWorkspace attention;

  const artifact::Manifest& manifest() const { return artifact.manifest; }
  const artifact::Buffer& buffer(const artifact::Operand& o) const { return manifest().buffers[size_t(o.buffer)]; }
  int64_t rows(const artifact::Operand& o) const {
    return o.type.rows == Rows::kLogit ? logit_count : o.type.rows == Rows::kPair ? tokens * buffer(o).rows_per_token : tokens;
  }
  int64_t stride(const artifact::Operand& o) const { return buffer(o).row_stride; }
  // The operand's first column in its first row.
  std::byte* at(const artifact::Operand& o) const {
    return arena.data() + tokens * buffer(o).offset_per_token + o.col * (o.type.elem == Elem::kQ8 ? 1 : 4);
  }
  float* floats(const artifact::Operand& o) const { return reinterpret_cast<float*>(at(o)); }
  std::byte* scratch(const artifact::Instr& i) const {
    return i.scratch < 0 ? nullptr : arena.data() + tokens * manifest().buffers[size_t(i.scratch)].offset_per_token;
  }
  // Null when the instruction has no weight of this role.
  const Weight* find(const artifact::Instr& i, Role role) const {
    for (const artifact::InstrWeight& w : i.weights)
      if (w.role == role) return &weights[size_t(w.tensor)];
    return nullptr;
  }
  Weight* find(const artifact::Instr& i, Role role) { return const_cast<Weight*>(std::as_const(*this).find(i, role)); }
  size_t index(const artifact::Instr& i) const { return size_t(&i - manifest().program.data()); }
  const float* vector(const artifact::Instr& i, Role role) const {
    const Weight* w = find(i, role);
    return w ? w->floats() : nullptr;
  }
};

inline kernels::StoredScale stored_scale(const Context& c, const artifact::Instr& i, bool saturate) {
  const float* s = c.vector(i, Role::kInScale);
  return {s ? *s : 0.0f, saturate};
}

inline kernels::GemmFormat gemm_format(const Weight& w) {
  switch (w.info->packing) {
    case artifact::Packing::kPackedI8: return kernels::GemmFormat::kI8;
    case artifact::Packing::kPackedI4: return kernels::GemmFormat::kI4;
    case artifact::Packing::kPackedBF16: return kernels::GemmFormat::kBF16;
    default: return kernels::GemmFormat::kF32;
  }
}

Result<std::unique_ptr<Context>> load_context(const std::filesystem::path& dir, const LoadOptions& o, hw::ThreadPool& pool);

// Runs one instruction of the step. index: its place in the program.
void run_instr(Context& c, const artifact::Instr& i, size_t index);

// ops_*.cc
void run_embed(Context& c, const artifact::Instr& i);
void run_norm(Context& c, const artifact::Instr& i);
void run_quantize(Context& c, const artifact::Instr& i);
void run_linear(Context& c, const artifact::Instr& i);
void run_rope(Context& c, const artifact::Instr& i, const kernels::RopeTable& table);
void run_clamp(Context& c, const artifact::Instr& i);
void run_add(Context& c, const artifact::Instr& i);
void run_scale(Context& c, const artifact::Instr& i);
void run_activation(Context& c, const artifact::Instr& i);
void run_sigmoid_mul(Context& c, const artifact::Instr& i);
void run_select_rows(Context& c, const artifact::Instr& i);
void run_kv_append(Context& c, const artifact::Instr& i, const kernels::RopeTable* table);
void run_attention(Context& c, const artifact::Instr& i);
void run_index_append(Context& c, const artifact::Instr& i);
void run_index_select(Context& c, const artifact::Instr& i);
void run_route(Context& c, const artifact::Instr& i);
void run_expert_linear(Context& c, const artifact::Instr& i);
void run_expert_combine(Context& c, const artifact::Instr& i);
void run_grouped_experts(Context& c, const artifact::Instr& i);

// What a kernel is told of the expert whose matrix lies here, and whose scales lie there when they are int4's.
kernels::ExpertPlace expert_place(const artifact::WeightTensor& w, const std::byte* matrix, const std::byte* scales);

// stream_experts.cc. Instead of reading all weights: those that every step needs, and a stream of the others.
Status stream_weights(Context& c);
// Where these experts' matrices lie now, into Weight::experts.
void place_streamed(Context& c, const artifact::Instr& i, std::span<const int32_t> experts);

// place_by_load.cc. A memory node for each block of weights.bin, so that in each layer nodes have equally many, and of what a token
// reads, as far as known by how likely it chooses each expert, about equally much.
std::vector<int> plan_blocks(const artifact::Manifest& m, const std::map<int32_t, std::vector<float>>& chances, const std::vector<int>& nodes, int64_t block_bytes);
// Asks for them, before the weights' memory is touched; false: the kernel refused.
bool place_by_load(Context& c);

// foresight.cc. What a router's input says about the next layer's experts, into Context::foreseen, right after the router ran.
std::vector<Foresight> find_foresight(const Context& c);
void foresee(Context& c, size_t router);

// A linear's product, as run_linear computes it.
kernels::GemmArgs linear_args(const Context& c, const artifact::Instr& i);

// What grouped_experts wants in its scratch buffer, bytes per token.
int64_t grouped_scratch_bytes(const Context& c, const artifact::Instr& i);

// kernel_choices.cc
std::vector<std::string> describe_kernels(const Context& c);
KernelChoice describe_kernel(const Context& c, const artifact::Instr& i);

}  // namespace mi::exec
