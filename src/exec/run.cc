// The step: rows from the batch, then the program from first to last instruction.

#include <cstring>

#include "base/check.h"
#include "exec/context.h"
#include "exec/tap.h"

namespace mi::exec {

using artifact::Instr;

void run_instr(Context& c, const Instr& i, size_t index) {
  switch (i.op) {
    case Op::kEmbed: return run_embed(c, i);
    case Op::kRmsNorm: return run_norm(c, i);
    case Op::kQuantize: return run_quantize(c, i);
    case Op::kLinear:
      run_linear(c, i);
      if (c.stream) foresee(c, index);
      return;
    case Op::kClamp: return run_clamp(c, i);
    case Op::kRope: return run_rope(c, i, *c.rope[index]);
    case Op::kKvAppend: return run_kv_append(c, i, c.rope[index]);
    case Op::kAttention: return run_attention(c, i);
    case Op::kIndexAppend: return run_index_append(c, i);
    case Op::kIndexSelect: return run_index_select(c, i);
    case Op::kAdd: return run_add(c, i);
    case Op::kScale: return run_scale(c, i);
    case Op::kActivation: return run_activation(c, i);
    case Op::kRoute: return run_route(c, i);
    case Op::kExpertLinear: return run_expert_linear(c, i);
    case Op::kExpertCombine: return run_expert_combine(c, i);
    case Op::kGroupedExperts: return run_grouped_experts(c, i);
    case Op::kSigmoidMul: return run_sigmoid_mul(c, i);
    case Op::kSelectRows: return run_select_rows(c, i);
    case Op::kSlice: break;        // slices are operands' columns
  }
  MI_CHECK(false, "instruction {} ({}) cannot be run", index, op_name(i.op));
}

namespace {

class EngineImpl : public Engine {
 public:
  explicit EngineImpl(std::unique_ptr<Context> c) : c_(std::move(c)) {}

  const artifact::Manifest& manifest() const override { return c_->manifest(); }
  const LoadOptions& options() const override { return c_->options; }
  int64_t kv_pages() const override { return c_->options.kv_pages; }
  int64_t kv_page_bytes() const override { return c_->kv_page_bytes; }
  int64_t arena_bytes() const override { return c_->arena.bytes(); }
  void set_tap(const Tap* tap) override { tap_.set(tap, manifest()); }
  void forget_pages(std::span<const int32_t> pages) override {
    for (const kernels::KvCache& k : c_->caches)
      for (int32_t p : pages) {
        MI_CHECK(p >= 0 && p < c_->options.kv_pages, "page {} of {}", p, c_->options.kv_pages);
        c_->kv.forget(k.page(p), k.page_bytes());
      }
  }
  void save_page(int32_t page, std::span<std::byte> to) const override {
    each_part(page, int64_t(to.size()), [&](std::byte* part, int64_t at, size_t n) { std::memcpy(to.data() + at, part, n); });
  }
  void restore_page(int32_t page, std::span<const std::byte> from) override {
    each_part(page, int64_t(from.size()), [&](std::byte* part, int64_t at, size_t n) { std::memcpy(part, from.data() + at, n); });
  }
  std::string weights_place() const override { return c_->weights_place; }
  void set_timing(Timing* timing) override {
    timing_ = timing;
    if (timing) *timing = {std::vector<InstrTime>(manifest().program.size()), 0, 0};
  }
  KernelChoice kernel_choice(size_t instr) const override { return describe_kernel(*c_, manifest().program[instr]); }
  std::vector<MemoryPart> memory() const override {
    std::vector<MemoryPart> parts;
    if (const ExpertStream* s = c_->stream.get()) {
      parts.push_back({"weights but experts", c_->memory.data(), c_->memory.bytes()});
      parts.push_back({"expert cache", s->memory().data(), s->memory().bytes()});
      for (const Instr& i : manifest().program)
        if (i.op == Op::kEmbed) parts.push_back({"embedding, mapped", c_->find(i, Role::kWeight)->data, c_->find(i, Role::kWeight)->info->bytes});
    } else {
      parts.push_back({"weights", c_->artifact.bytes.data(), int64_t(c_->artifact.bytes.size())});
    }
    parts.push_back({"KV cache", c_->kv.data(), c_->kv.bytes()});
    parts.push_back({"activations", c_->arena.data(), c_->arena.bytes()});
    return parts;
  }
  std::optional<StreamStats> stream_stats() const override {
    return c_->stream ? std::optional(c_->stream->stats()) : std::nullopt;
  }
  std::vector<std::string> kernel_choices() const override { return describe_kernels(*c_); }

  std::span<const float> run(const Batch& b) override {
    if (!timing_) return step(b, [this](const Instr& i, size_t n) { run_instr(*c_, i, n); });
    StepClock clock(timing_);
    return step(b, [&](const Instr& i, size_t n) {
      clock.time(n, [&] { run_instr(*c_, i, n); }, [this] { return c_->pool->jobs(); });
    });
  }

 private:
  template <typename F>
  void each_part(int32_t page, int64_t bytes, F f) const {
    MI_CHECK(page >= 0 && page < c_->options.kv_pages && bytes == c_->kv_page_bytes, "page {} of {}, {} bytes", page, c_->options.kv_pages, bytes);
    int64_t at = 0;
    for (const kernels::KvCache& k : c_->caches) {
      f(k.page(page), at, size_t(k.page_bytes()));
      at += k.page_bytes();
    }
  }

  template <typename RunInstr>
  std::span<const float> step(const Batch& b, RunInstr run) {
    fill_rows(b);
    if (c_->tokens == 0) return {};
    const auto& program = manifest().program;
    for (size_t n = 0; n < program.size(); ++n) {
      const Instr& i = program[n];
      if (c_->logit_count == 0 && i.out[0].type.rows == Rows::kLogit) continue;
      tap_.before(*c_, i, n);
      run(i, n);
      tap_.after(*c_, i, n);
    }
    return logits();
  }

  void fill_rows(const Batch& b) {
    Context& c = *c_;
    c.ids.clear();
    c.positions.clear();
    c.logit_rows.clear();
    c.kv_step.clear();
    for (const Chunk& k : b.chunks) {
      const int64_t n = int64_t(k.tokens.size()), row = int64_t(c.ids.size());
      MI_CHECK(n > 0 && k.start >= 0 && k.logits_from >= 0 && k.logits_from <= n, "a chunk of {} tokens at {} with logits from {}", n, k.start, k.logits_from);
      MI_CHECK(row + n <= c.options.max_tokens_per_step, "a step of more than {} tokens", c.options.max_tokens_per_step);
      MI_CHECK(k.start + n <= c.max_positions, "positions up to {}, this engine has {}", k.start + n, c.max_positions);
      MI_CHECK((k.start + n + kernels::kPageTokens - 1) / kernels::kPageTokens <= int64_t(k.pages.size()), "{} pages for {} tokens", k.pages.size(), k.start + n);
      for (int32_t p : k.pages) MI_CHECK(p >= 0 && p < c.options.kv_pages, "page {} of {}", p, c.options.kv_pages);
      c.kv_step.add({row, n, k.start, k.pages.data()});
      for (int64_t i = 0; i < n; ++i) {
        const int32_t id = k.tokens[size_t(i)];
        MI_CHECK(id >= 0 && id < manifest().model.vocab, "token {} of a vocabulary of {}", id, manifest().model.vocab);
        c.ids.push_back(id);
        c.positions.push_back(int32_t(k.start + i));
        if (i >= k.logits_from) c.logit_rows.push_back(int32_t(row + i));
      }
    }
    c.tokens = int64_t(c.ids.size());
    c.logit_count = int64_t(c.logit_rows.size());
  }

  // The last instruction's rows without the padding between them.
  std::span<const float> logits() const {
    if (c_->logit_count == 0) return {};
    const artifact::Operand& o = manifest().program.back().out[0];
    float* to = c_->floats(o);
    const int64_t stride = c_->stride(o) / 4, cols = o.type.cols;
    if (stride != cols)
      for (int64_t r = 1; r < c_->logit_count; ++r) std::memmove(to + r * cols, to + r * stride, size_t(cols) * 4);
    return {to, size_t(c_->logit_count * cols)};
  }

  std::unique_ptr<Context> c_;
  TapRunner tap_;
  Timing* timing_ = nullptr;
};

}  // namespace

Result<std::unique_ptr<Engine>> Engine::load(const std::filesystem::path& dir, const LoadOptions& o, hw::ThreadPool& pool) {
  MI_TRY(auto context, load_context(dir, o, pool));
  return std::unique_ptr<Engine>(std::make_unique<EngineImpl>(std::move(context)));
}

}  // namespace mi::exec
