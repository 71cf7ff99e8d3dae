// From an engine directory to a Context: weights mapped, memory allocated, kernels chosen, rope tables computed.

#include <algorithm>
#include <cstring>

#include "artifact/expert_reads.h"
#include "base/util.h"
#include "exec/context.h"
#include "hw/memory.h"

namespace mi::exec {
namespace {

using artifact::Instr;

Result<kernels::KvKind> kv_kind(const std::string& name) {
  if (name == "f32") return kernels::KvKind::kF32;
  if (name == "bf16") return kernels::KvKind::kBF16;
  if (name == "int8") return kernels::KvKind::kI8;
  return fail(ErrorCode::kUsage, "unknown KV type '{}': use f32, bf16 or int8", name);
}

Result<kernels::SumOrder> attention_order(const std::string& name, kernels::KvKind kind, const hw::CpuFeatures& cpu) {
  const bool bf16 = kind == kernels::KvKind::kBF16;
  std::optional<kernels::SumOrder> asked;
  if (name == "pairs")
    asked = kernels::SumOrder::kPairs;
  else if (name == "tiles")
    asked = kernels::SumOrder::kTiles;
  else if (name != "auto" && (name != "ascending" || bf16))  // options() of another engine may say so
    return fail(ErrorCode::kUsage, "unknown attention order '{}': use auto, pairs or tiles", name);
  if (asked && !bf16)
    return fail(ErrorCode::kUsage,
                "attention order '{}': sums over an {} cache have one order; leave it out, or keep keys and values as bf16",
                name, kind == kernels::KvKind::kF32 ? "f32" : "int8");
  return kernels::attention_order(kind, asked, cpu);
}

struct Cache {
  std::string name;
  kernels::KvKind kind;
  kernels::SumOrder order;
};
Result<Cache> choose_cache(const LoadOptions& o, const artifact::Manifest& m, const hw::CpuFeatures& cpu) {
  Cache c;
  c.name = o.kv_type.empty() ? m.default_kv : o.kv_type;
  MI_TRY(c.kind, kv_kind(c.name));
  MI_TRY(c.order, attention_order(o.attention_order, c.kind, cpu));
  return c;
}

// Leave this much beside the weights when the memory decides.
constexpr int64_t kSpare = int64_t(1) << 30;

// Before memory is touched: what a control group or the machine lacks is else found out by the kernel, which ends the process.
Status check_room(int64_t bytes, const std::string& what, const char* way_out) {
  const int64_t available = hw::available_memory("/");
  if (bytes <= available) return {};
  return fail(ErrorCode::kEnvironment, "no memory for {} ({}): {} are available; {}", what, human_bytes(double(bytes)),
              human_bytes(double(available)), way_out);
}

// A mapped file has pages of 4 KB. Reading it into huge pages more than doubles the speed of one stream on Zen 4 (13 to 30 GB/s of
// one thread), for as much memory as the page cache would take; the file's pages then count as free.
Status place_weights(Context& c) {
  const int64_t bytes = int64_t(c.artifact.bytes.size());
  const LoadOptions& o = c.options;
  if (o.expert_cache_bytes > 0) return stream_weights(c);
  const artifact::ParallelFor parallel = [&](int64_t tasks, const auto& f) { c.pool->run(tasks, f); };
  const int64_t available = o.weights == "auto" ? hw::available_memory("/") : 0;
  if (o.weights == "map" || (o.weights == "auto" && available - kSpare < bytes)) {
    c.weights_place = fmt::format("{} mapped{}", human_bytes(double(bytes)),
                                  o.weights == "map" ? "" : fmt::format(", slower: {} of memory are available", human_bytes(double(available))));
    return o.verify_checksums ? artifact::verify_weights(c.artifact, parallel, o.progress) : Status();
  }
  if (o.weights == "read") MI_TRY_VOID(check_room(bytes, "the weights", "map them: they are then read as they are needed"));
  MI_TRY(c.memory, Region::map(bytes, "the weights"));
  c.weights_place = fmt::format("{} read into memory, huge pages asked for", human_bytes(double(bytes)));
  const bool by_load = o.weight_nodes.size() > 1 && !o.expert_chances.empty();
  if (!(by_load ? place_by_load(c) : c.memory.place_on(o.weight_nodes))) {
    c.weights_place += ", placed by the kernel: it refused the wish for memory nodes";
  } else if (by_load) {
    c.weights_place += ", over memory nodes by what the profile expects to be read";
  }
  return artifact::read_weights(&c.artifact, {c.memory.data(), size_t(bytes)}, o.verify_checksums, parallel, o.progress);
}

void view_weights(Context& c) {
  for (const artifact::WeightTensor& w : c.manifest().weights)
    c.weights.push_back({&w, artifact::view_weight(c.artifact, w), artifact::view_scales(c.artifact, w), artifact::view_scales_bf16(c.artifact, w),
                         artifact::view_colsums(c.artifact, w), {}});
  for (const Instr& i : c.manifest().program)
    for (const Role role : artifact::expert_roles(i)) {
      Weight& w = *c.find(i, role);
      const int64_t scales = artifact::scale_bytes(*w.info) / w.info->experts;
      w.experts.resize(size_t(w.info->experts));
      for (int64_t e = 0; e < w.info->experts; ++e) {
        const int64_t slot = artifact::expert_slot(*w.info, e);
        w.experts[size_t(e)] = expert_place(*w.info, w.data + slot * w.info->expert_stride, c.artifact.bytes.data() + w.info->scale_offset + slot * scales);
      }
    }
}

Status bind_weights(Context& c) {
  if (!c.stream) view_weights(c);
  for (const Instr& i : c.manifest().program) {
    if (i.op == Op::kEmbed) {
      const artifact::WeightTensor& w = *c.find(i, Role::kWeight)->info;
      if (w.dtype != DType::kF32 && w.dtype != DType::kBF16 && w.dtype != DType::kF16)
        return bad_input("{}: the embedding '{}' is stored as {}, which this version cannot read", c.artifact.dir.string(), w.name, dtype_name(w.dtype));
    }
    if (i.op == Op::kGroupedExperts) {
      const int64_t need = grouped_scratch_bytes(c, i);
      const artifact::Buffer* b = i.scratch < 0 ? nullptr : &c.manifest().buffers[size_t(i.scratch)];
      const int64_t have = b ? b->row_stride * b->rows_per_token : 0;
      if (have < need)
        return bad_input("{}: '{}' of layer {} plans {} bytes of scratch per token, this version needs {}: build the engine again",
                         c.artifact.dir.string(), i.name, i.layer, have, need);
    }
  }
  return {};
}

Status make_caches(Context& c, kernels::KvKind kind) {
  for (const artifact::LayerCache& l : c.manifest().caches) {
    kernels::KvCache k;
    k.kind = kind;
    k.kv_heads = l.kv_heads;
    k.k_dim = l.k_dim;
    k.v_dim = l.v_dim;
    k.index_dim = l.index_dim;
    c.caches.push_back(k);
    c.kv_page_bytes += k.page_bytes();
  }
  MI_TRY(c.kv, Region::map(c.kv_page_bytes * c.options.kv_pages, fmt::format("the KV cache of {} pages", c.options.kv_pages),
                             c.options.memory_pool));
  std::byte* at = c.kv.data();
  for (kernels::KvCache& k : c.caches) {
    k.data = at;
    at += k.page_bytes() * c.options.kv_pages;
  }
  return {};
}

// rotary_dim 0: the instruction rotates nothing.
RopeParams rotation(const Instr& i) {
  if (const auto* rope = std::get_if<RopeParams>(&i.params)) return *rope;
  const auto* append = std::get_if<KvAppendParams>(&i.params);
  return append ? append->rope() : RopeParams{};
}

// Layers usually share their frequencies: one table for each different set.
void make_rope_tables(Context& c) {
  c.rope.resize(c.manifest().program.size());
  std::vector<std::pair<std::vector<float>, float>> known;
  for (size_t n = 0; n < c.rope.size(); ++n) {
    const Instr& i = c.manifest().program[n];
    const RopeParams p = rotation(i);
    if (p.rotary_dim == 0) continue;
    const float* freq = c.vector(i, Role::kInvFreq);
    std::pair<std::vector<float>, float> key{{freq, freq + p.rotary_dim / 2}, p.attention_factor};
    const size_t at = size_t(std::find(known.begin(), known.end(), key) - known.begin());
    if (at == known.size()) {
      known.push_back(std::move(key));
      c.rope_tables.push_back(std::make_unique<kernels::RopeTable>(kernels::make_rope_table(freq, p.rotary_dim, p.attention_factor, c.max_positions)));
    }
    c.rope[n] = c.rope_tables[at].get();
  }
}

}  // namespace

// A step reads the weights of every expert that one of its tokens chose, nearly all of them: more tokens share that. Qwen3-30B-A3B's
// layers on two cores with AMX: a prompt of 2048 in one step instead of four takes the experts 93 ms a layer instead of 160.
int64_t step_tokens(int64_t bytes_per_token) {
  constexpr int64_t kArena = int64_t(256) << 20;
  return std::clamp<int64_t>(kArena / std::max<int64_t>(bytes_per_token, 1) / 64 * 64, 512, 2048);
}

Status check_options(const LoadOptions& o, const artifact::Manifest& m) {
  if (o.max_tokens_per_step < 0) return fail(ErrorCode::kUsage, "max_tokens_per_step is {}, expected at least 1, or 0 for as many as pay", o.max_tokens_per_step);
  if (o.kv_pages < 1) return fail(ErrorCode::kUsage, "kv_pages is {}, expected at least 1", o.kv_pages);
  if (o.weights != "auto" && o.weights != "read" && o.weights != "map")
    return fail(ErrorCode::kUsage, "unknown place for weights '{}': use auto, read or map", o.weights);
  MI_TRY(const Cache cache, choose_cache(o, m, hw::cpu()));
  static_cast<void>(cache);
  return {};
}

Result<std::unique_ptr<Context>> load_context(const std::filesystem::path& dir, const LoadOptions& o, hw::ThreadPool& pool) {
  auto c = std::make_unique<Context>();
  c->options = o;
  c->pool = &pool;
  c->cpu = o.cpu ? *o.cpu : hw::cpu();
  MI_TRY(c->artifact, artifact::open_artifact(dir));
  const artifact::Manifest& m = c->manifest();
  MI_TRY_VOID(check_options(o, m));
  MI_TRY(Cache cache, choose_cache(o, m, c->cpu));
  c->options.kv_type = std::move(cache.name);
  c->attention_order = cache.order;
  c->options.attention_order = kernels::sum_order_name(cache.order);
  MI_TRY_VOID(place_weights(*c));

  MI_TRY_VOID(bind_weights(*c));
  for (auto f : {kernels::GemmFormat::kI8, kernels::GemmFormat::kI4, kernels::GemmFormat::kBF16, kernels::GemmFormat::kF32}) c->gemm[size_t(f)] = &kernels::select_gemm(f, c->cpu);
  if (o.max_tokens_per_step == 0) c->options.max_tokens_per_step = step_tokens(m.memory.activation_bytes_per_token);
  const int64_t rows = c->options.max_tokens_per_step;
  const std::string activations = fmt::format("the activations of {} tokens per step", rows);
  MI_TRY(c->arena, Region::map(m.memory.activation_bytes_per_token * rows, activations));
  // Else the first long prompt pays: 90 of 260 ms for 512 tokens of Qwen3-30B-A3B's layers. A larger one takes memory only as far
  // as steps use it: 1048576 rows of a model of 11 million parameters are 9.8 GB, and most steps are far from full.
  if (rows <= step_tokens(m.memory.activation_bytes_per_token)) {
    MI_TRY_VOID(check_room(c->arena.bytes(), activations, "make room"));
    c->arena.commit(pool);
  }
  MI_TRY_VOID(make_caches(*c, cache.kind));
  c->max_positions = o.kv_pages * kernels::kPageTokens;
  if (m.model.max_positions > 0) c->max_positions = std::min(c->max_positions, m.model.max_positions);
  make_rope_tables(*c);

  c->ids.reserve(size_t(rows));
  c->positions.reserve(size_t(rows));
  c->logit_rows.reserve(size_t(rows));
  c->kv_step.chunks.reserve(size_t(rows));
  c->kv_step.segments.reserve(size_t(rows));
  return c;
}

}  // namespace mi::exec
