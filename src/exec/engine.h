#pragma once
// A loaded engine: weights mapped, activation arena allocated, KV pages owned, kernels chosen. run() executes one step.
// Not thread-safe: one step at a time; the step itself uses the pool's threads.

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "artifact/types.h"
#include "base/result.h"
#include "exec/batch.h"
#include "exec/stream_stats.h"
#include "exec/timing.h"
#include "hw/cpu.h"
#include "hw/thread_pool.h"

namespace mi::exec {

enum class KvType : uint8_t { kF32, kBF16, kI8 };

struct LoadOptions {
  int64_t max_tokens_per_step = 512;   // capacity of the arena in token rows; 0: 512 to 2048, as long as the arena is below 256 MB
  int64_t kv_pages = 64;               // pages of 64 tokens, all layers each
  std::string kv_type;                 // "", "f32", "bf16", "int8"; "" = the engine's default
  // In which order sums over a bfloat16 cache are added (kernels/attention): "pairs", "tiles", "auto": tiles on CPUs with
  // AMX-BF16, otherwise pairs. A loaded engine's options have what was chosen; "ascending" with any other cache, which has
  // no other order.
  std::string attention_order = "auto";
  bool verify_checksums = true;
  bool memory_pool = true;             // KV memory stays with the engine once used; false: forget_pages() is called on what is free
  std::string weights = "auto";        // "read" into huge pages, "map" the file, "auto": read when the memory is there
  // > 0: experts' matrices stay on disk and are read as steps choose them, into so much memory (exec/expert_stream.h); the
  // other weights are read into memory, but for the embedding, which is mapped. `weights` then must be "auto".
  int64_t expert_cache_bytes = 0;
  // By layer, how likely a token chooses each expert, if that is known: the likeliest are read at load, and stay longer.
  std::map<int32_t, std::vector<float>> expert_chances;
  std::vector<int> weight_nodes;       // memory nodes for weights that are read (hw::NumaPlan); empty: as the kernel likes
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress;   // may be empty
  std::optional<hw::CpuFeatures> cpu;  // kernels are chosen for it instead of hw::cpu(); tests compare ISAs in one process
};

// Errors (kUsage): what load() refuses of its options for this engine, before it reads weights.
Status check_options(const LoadOptions& o, const artifact::Manifest& m);

// Rows of a step where LoadOptions::max_tokens_per_step is 0, for a model whose activations take so much per token.
int64_t step_tokens(int64_t activation_bytes_per_token);

// What a tap sees right after an instruction (inputs: right before it): the operand's rows widened to float, or a route's ids and weights.
struct TapEvent {
  const artifact::Instr* instr = nullptr;
  int32_t instr_index = 0;
  const artifact::Operand* operand = nullptr;   // one of instr->out, or of instr->in for input taps
  bool is_input = false;
  int64_t rows = 0, cols = 0;
  const float* values = nullptr;       // [rows, cols]; for kRoute: weights [rows, k]
  const int32_t* ids = nullptr;        // kRoute only: [rows, k]
};
struct Tap {
  std::function<bool(const artifact::Instr&, bool input)> want;   // asked once per instruction and side
  std::function<void(const TapEvent&)> see;
  // First float results that are replaced before anything reads or sees them; both may be empty. `replace` gets each row of
  // the step, with what the instruction made of it.
  std::function<bool(const artifact::Instr&)> replaces;           // asked once per instruction
  std::function<void(const artifact::Instr&, int64_t row, std::span<float> values)> replace;
};

// Which kernel runs an instruction, and why this one.
struct KernelChoice {
  std::string kernel;   // "int8 gemm_i8_avx512vnni"
  std::string why;      // "needs avx512 avx512_vnni, which this CPU has; gemm_i8_amx needs amx_int8, which it lacks"
};

// Memory that the engine planned, as it lies in this process.
struct MemoryPart {
  std::string name;     // "weights", "KV cache", "activations"
  const void* data = nullptr;
  int64_t bytes = 0;
};

class Engine {
 public:
  static Result<std::unique_ptr<Engine>> load(const std::filesystem::path& dir, const LoadOptions& o, hw::ThreadPool& pool);
  virtual ~Engine() = default;

  virtual const artifact::Manifest& manifest() const = 0;
  virtual const LoadOptions& options() const = 0;
  virtual int64_t kv_pages() const = 0;
  virtual int64_t kv_page_bytes() const = 0;        // all layers, as stored
  virtual int64_t arena_bytes() const = 0;

  // Runs the step. logits: [sum over chunks of (tokens - logits_from), vocab] in row order, valid until the next run().
  // Preconditions (MI_CHECK): total tokens <= max_tokens_per_step, pages in range and large enough, ids in [0, vocab).
  virtual std::span<const float> run(const Batch& b) = 0;

  // The kernel gets the memory of these pages back; what they held is lost. (Parts of 4 KB that two pages share stay.)
  virtual void forget_pages(std::span<const int32_t> pages) = 0;

  // What the page holds, all layers one after the other: kv_page_bytes() of them. Between two steps.
  virtual void save_page(int32_t page, std::span<std::byte> to) const = 0;
  virtual void restore_page(int32_t page, std::span<const std::byte> from) = 0;

  virtual void set_tap(const Tap* tap) = 0;         // nullptr: none. Not owned.

  // "2.6 GB read into huge pages", "2.6 GB mapped (only 1.9 GB of memory are available)": for the start-up print.
  virtual std::string weights_place() const = 0;
  virtual void set_timing(Timing* timing) = 0;      // nullptr: none, then nothing is measured. Not owned.

  virtual KernelChoice kernel_choice(size_t instr) const = 0;   // instr: place in the program
  virtual std::vector<MemoryPart> memory() const = 0;
  virtual std::optional<StreamStats> stream_stats() const = 0;   // where experts are streamed

  // "linear layers.*.attn: int8 gemm_i8_avx512vnni": which kernel serves which op, for the start-up print.
  virtual std::vector<std::string> kernel_choices() const = 0;
};

}  // namespace mi::exec
