#include "compiler/kernel_fallbacks.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <optional>
#include <tuple>

#include "base/util.h"
#include "compiler/fallbacks.h"
#include "hw/thread_pool.h"
#include "kernels/gemm/measure.h"

namespace mi::compiler {
namespace {

using kernels::GemmFormat;
using kernels::GemmKernel;

std::optional<GemmFormat> format_of(const artifact::WeightTensor& t) {
  switch (t.packing) {
    case artifact::Packing::kPackedI8: return GemmFormat::kI8;
    case artifact::Packing::kPackedI4: return GemmFormat::kI4;
    case artifact::Packing::kPackedBF16: return GemmFormat::kBF16;
    case artifact::Packing::kPackedF32: return GemmFormat::kF32;
    case artifact::Packing::kPlain: break;
  }
  return {};
}

// "layers.3.attn.q.weight+layers.3.attn.k.weight" -> "attn.q.weight+attn.k.weight"
std::string name_in_layer(const std::string& name, int32_t layer) {
  if (layer < 0) return name;
  const std::string prefix = fmt::format("layers.{}.", layer);
  std::string out;
  for (size_t at = 0; at < name.size();) {
    const size_t end = std::min(name.find('+', at), name.size());
    std::string part = name.substr(at, end - at);
    if (part.starts_with(prefix)) part.erase(0, prefix.size());
    out += (out.empty() ? "" : "+") + part;
    at = end + 1;
  }
  return out;
}

// The same product of several layers.
struct Product {
  std::string name;
  Op op = Op::kLinear;
  const artifact::WeightTensor* w = nullptr;
  int64_t k = 0;  // chosen experts of a token, 0: no experts
  bool head = false;
  std::vector<int32_t> layers;
};

std::vector<Product> products_of(const artifact::Manifest& m) {
  std::vector<Product> out;
  std::map<std::tuple<std::string, int64_t, int64_t, artifact::Packing, int64_t>, size_t> at;
  for (const artifact::Instr& i : m.program)
    for (const artifact::InstrWeight& u : i.weights) {
      const artifact::WeightTensor& w = m.weights[size_t(u.tensor)];
      if (!format_of(w)) continue;
      const std::string name = name_in_layer(w.name, i.layer);
      const auto [it, fresh] = at.try_emplace({name, w.n, w.k, w.packing, w.experts}, out.size());
      if (fresh) {
        const bool experts = i.op == Op::kExpertLinear || i.op == Op::kGroupedExperts;
        out.push_back({name, i.op, &w, experts ? i.in[1].type.cols : 0, i.out[0].type.rows == Rows::kLogit, {}});
      }
      out[it->second].layers.push_back(i.layer);
    }
  return out;
}

class Estimate {
 public:
  Estimate() : pool_(hw::advise_threads().threads), measure_(pool_) {}

  // Of one layer's product with this kernel, for a step of so many tokens; a prompt's only wants the last one's logits.
  double seconds(const GemmKernel& kernel, const Product& p, int64_t tokens) {
    double matrices = 1;
    int64_t rows = p.head ? 1 : tokens;
    if (p.k > 0) {
      const double e = double(p.w->experts);
      matrices = e * (1 - std::pow(1 - double(p.k) / e, double(tokens)));  // different experts, all being equally likely
      rows = std::max<int64_t>(1, std::llround(double(tokens * p.k) / matrices));
    }
    const auto [it, fresh] = known_.try_emplace({kernel.name, rows, p.w->n, p.w->k});
    if (fresh) it->second = measure_.seconds(kernel, rows, p.w->n, p.w->k, p.w->group, p.k > 0 ? Each::kEach : Each::kTogether);
    return it->second * matrices;
  }

 private:
  using Each = kernels::GemmMeasure::Threads;
  hw::ThreadPool pool_;
  kernels::GemmMeasure measure_;
  std::map<std::tuple<std::string, int64_t, int64_t, int64_t>, double> known_;
};

}  // namespace

KernelFallbacks find_kernel_fallbacks(const artifact::Manifest& m, const hw::CpuFeatures& cpu) {
  KernelFallbacks r;
  std::optional<Estimate> estimate;
  for (const Product& p : products_of(m)) {
    const GemmFormat format = *format_of(*p.w);
    const auto f = kernels::gemm_fallback(format, cpu);
    if (!f) continue;
    const char* kind = kernels::gemm_format_name(format);
    artifact::Fallback x;
    x.where = p.layers[0] < 0 ? p.name : fmt::format("{}: {}", layers_text(p.layers), p.name);
    if (f->better) {
      if (!estimate) estimate.emplace();
      constexpr int64_t kTokens = KernelFallbacks::kPromptTokens;
      const double layers = double(p.layers.size());
      const double slow = estimate->seconds(*f->chosen, p, kTokens), fast = estimate->seconds(*f->better, p, kTokens);
      const double slow1 = estimate->seconds(*f->chosen, p, 1), fast1 = estimate->seconds(*f->better, p, 1);
      r.prompt_seconds += layers * (slow - fast);
      r.token_seconds += layers * (slow1 - fast1);
      x.what = fmt::format("{} {} product by {} instead of {}: about {:.1f} times as long for {} tokens ({} instead of {}), {:.1f} times for one ({} instead of {}){}",
                           op_name(p.op), kind, f->chosen->name, f->better->name, slow / fast, kTokens, human_seconds(slow), human_seconds(fast),
                           slow1 / fast1, human_seconds(slow1), human_seconds(fast1), p.layers.size() > 1 ? ", in each of these layers" : "");
      x.why = fmt::format("MI_WITHOUT_KERNEL leaves {} out of the register", f->better->name);
      x.fix = "unset MI_WITHOUT_KERNEL";
    } else {
      x.what = fmt::format("{} {} product by {}, the reference", op_name(p.op), kind, f->chosen->name);
      std::string needs;
      for (const GemmKernel& k : kernels::gemm_kernels())
        if (k.format == format && *k.needs) needs += fmt::format("{}{} ({})", needs.empty() ? "" : ", ", k.name, k.needs);
      x.why = fmt::format("this CPU has, or MI_FORCE_ISA leaves it, nothing that another kernel needs: {}", needs);
      x.fix = "run it on a CPU with AVX2 or more";
    }
    r.list.push_back(std::move(x));
  }
  return r;
}

std::string fallbacks_line(size_t floats, const KernelFallbacks& kernels) {
  const size_t slower = kernels.list.size();
  if (floats + slower == 0) return "none";
  std::string s = fmt::format("{} operations outside the fast path: {} in float, {} on a slower kernel of this machine", floats + slower,
                              floats, slower);
  if (kernels.prompt_seconds > 0)
    s += fmt::format("; these take about {} more for {} prompt tokens and {} more for one token", human_seconds(kernels.prompt_seconds),
                     KernelFallbacks::kPromptTokens, human_seconds(std::max(kernels.token_seconds, 0.0)));
  return s;
}

Status check_left_out_kernels() {
  const char* names = std::getenv("MI_WITHOUT_KERNEL");
  return kernels::check_left_out(names ? names : "");
}

}  // namespace mi::compiler
