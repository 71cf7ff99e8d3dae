// Which kernel serves which instruction, for people: one line for the same instruction of all layers.

#include <algorithm>
#include <map>

#include "exec/context.h"

namespace mi::exec {
namespace {

using artifact::Instr;

const char* float_isa(const hw::CpuFeatures& cpu) {
#if defined(MI_SCALAR_ONLY)
  return "scalar";
#else
  return cpu.avx512 ? "avx512" : cpu.avx2 ? "avx2" : "scalar";
#endif
}

// What multiplies the cache's numbers in the engine's order.
const char* attention_isa(const Context& c) {
  if (!kernels::attention_uses_bf16(c.attention_order, c.cpu)) return float_isa(c.cpu);
  return c.attention_order == kernels::SumOrder::kTiles ? "amx_bf16" : "avx512_bf16";
}

// Empty: as for any float kernel.
std::string why_attention(const Context& c) {
  using kernels::SumOrder;
  if (c.attention_order == SumOrder::kAscending) return {};
  const bool tiles = c.attention_order == SumOrder::kTiles;
  if (kernels::attention_uses_bf16(c.attention_order, c.cpu))
    return fmt::format("the cache is bfloat16 and this CPU multiplies {} of it", tiles ? "tiles" : "pairs");
  return fmt::format("sums are added in the order '{}', for which this CPU has no instruction ({})", kernels::sum_order_name(c.attention_order),
                     tiles ? "amx_bf16" : "avx512_bf16");
}

std::string kernel_of(const Context& c, const Instr& i) {
  std::string text;
  for (const artifact::InstrWeight& w : i.weights) {
    const Weight& weight = c.weights[size_t(w.tensor)];
    if (weight.info->packing == artifact::Packing::kPlain) continue;
    const kernels::GemmFormat f = gemm_format(weight);
    const std::string group = weight.info->group > 0 ? fmt::format(" in groups of {}", weight.info->group) : "";
    const std::string one = fmt::format("{}{} {}", kernels::gemm_format_name(f), group, c.gemm[size_t(f)]->name);
    if (text.find(one) == std::string::npos) text += (text.empty() ? "" : ", ") + one;
  }
  if (i.op == Op::kAttention || i.op == Op::kKvAppend) text = fmt::format("{} cache, {}", c.options.kv_type, i.op == Op::kAttention ? attention_isa(c) : float_isa(c.cpu));
  return text.empty() ? float_isa(c.cpu) : text;
}

// Why the register's choice for this format fell on the kernel it did.
std::string why_gemm(const Context& c, kernels::GemmFormat format) {
  const kernels::GemmKernel& chosen = *c.gemm[size_t(format)];
  std::string text = *chosen.needs ? fmt::format("the first in the register that this CPU runs (it has {})", chosen.needs)
                                   : "the reference, which every CPU runs";
  for (const kernels::GemmKernel& k : kernels::gemm_kernels()) {
    if (&k == &chosen) break;
    if (k.format != format) continue;
    text += kernels::gemm_left_out(k) ? fmt::format("; {} is left out by MI_WITHOUT_KERNEL", k.name) : fmt::format("; {} needs {}", k.name, k.needs);
  }
  return text;
}

std::string why_float(const Context& c) {
  const std::string isa = float_isa(c.cpu);
  if (isa == "avx512") return "the widest build; this CPU has avx512";
#if defined(MI_SCALAR_ONLY)
  return "the only build of a program without ISA-specific kernels";
#else
  return isa == "avx2" ? "avx512 is absent or capped" : "avx2 and avx512 are absent or capped";
#endif
}

}  // namespace

KernelChoice describe_kernel(const Context& c, const Instr& i) {
  KernelChoice choice{kernel_of(c, i), {}};
  for (const artifact::InstrWeight& w : i.weights) {
    const Weight& weight = c.weights[size_t(w.tensor)];
    if (weight.info->packing == artifact::Packing::kPlain) continue;
    const std::string why = why_gemm(c, gemm_format(weight));
    if (choice.why.find(why) == std::string::npos) choice.why += (choice.why.empty() ? "" : "; ") + why;
  }
  if (i.op == Op::kAttention) choice.why = why_attention(c);
  if (choice.why.empty()) choice.why = why_float(c);
  return choice;
}

std::vector<std::string> describe_kernels(const Context& c) {
  std::vector<std::pair<std::string, int>> lines;      // in program order, with the number of layers
  std::map<std::string, size_t> at;
  for (const Instr& i : c.manifest().program) {
    const bool matrix = std::any_of(i.weights.begin(), i.weights.end(), [&](const artifact::InstrWeight& w) {
      return c.weights[size_t(w.tensor)].info->packing != artifact::Packing::kPlain;
    });
    if (!matrix && i.op != Op::kAttention) continue;   // the rest is the float kernels' one ISA
    const std::string line = fmt::format("{} {}{}: {}", op_name(i.op), i.layer < 0 ? "" : "layers.*.", i.name, kernel_of(c, i));
    const auto [found, fresh] = at.emplace(line, lines.size());
    if (fresh)
      lines.emplace_back(line, 1);
    else
      ++lines[found->second].second;
  }
  std::vector<std::string> out;
  for (const auto& [line, count] : lines) out.push_back(count > 1 ? fmt::format("{} ({} times)", line, count) : line);
  out.push_back(fmt::format("norm, rope, route, elementwise: {}", float_isa(c.cpu)));
  return out;
}

}  // namespace mi::exec
