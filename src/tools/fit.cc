#include "tools/fit.h"

#include <algorithm>

#include "base/util.h"
#include "tensor/op.h"

namespace mi::tools {
namespace {

constexpr int64_t kTokens = artifact::kKvPageTokens;

int64_t pages(int64_t tokens) { return (tokens + kTokens - 1) / kTokens; }

// What keys and values may take; weights: instead of the engine's own, -1: those.
int64_t kv_room(const FitQuestion& q, int64_t weights = -1) {
  exec::LoadOptions o = q.load;
  o.kv_pages = pages_wanted(q);
  const exec::MemoryPlan p = exec::plan_memory(*q.manifest, o, q.threads);
  const int64_t fixed = (weights >= 0 ? weights : p.weights + p.expert_cache) + p.activations + p.workspace;
  return int64_t(double(std::max<int64_t>(0, q.room - fixed)) * q.kv_fraction);
}

double bits(const std::string& precision) {
  return precision == "fp32" ? 32 : precision == "w8a8" ? 8.1 : precision == "w4a8" ? 4.3 : 16;
}

}  // namespace

int64_t pages_wanted(const FitQuestion& q) { return pages(q.seq) * q.batch; }

int64_t pages_that_fit(const FitQuestion& q) {
  const int64_t page = exec::kv_page_bytes(*q.manifest, q.load.kv_type);
  return page > 0 ? std::min(pages_wanted(q), kv_room(q) / page) : pages_wanted(q);
}

std::string what_would_fit(const FitQuestion& q) {
  const artifact::Manifest& m = *q.manifest;
  const int64_t page = exec::kv_page_bytes(m, q.load.kv_type), wanted = pages_wanted(q), fits = page > 0 ? kv_room(q) / page : wanted;
  std::vector<std::string> ways;
  if (const int64_t batch = fits / pages(q.seq); batch >= 1 && batch < q.batch) ways.push_back(fmt::format("--max-batch-size {}", batch));
  if (const int64_t seq = fits / q.batch * kTokens; seq >= kTokens && seq < q.seq) ways.push_back(fmt::format("--max-seq-len {}", seq));
  const std::string type = q.load.kv_type.empty() ? m.default_kv : q.load.kv_type;
  for (const char* smaller : {"bf16", "int8"}) {
    const int64_t bytes = exec::kv_page_bytes(m, smaller);
    if (bytes >= page || bytes * wanted > kv_room(q) || (type == "bf16" && std::string(smaller) == "bf16")) continue;
    ways.push_back(fmt::format("--kv-type {}", smaller));
    break;
  }
  const exec::MemoryPlan now = exec::plan_memory(m, q.load, q.threads);
  for (const auto& [precision, words] : {std::pair("w8a8", "8 bits (quantize to W8A8"), std::pair("w4a8", "4 bits (quantize to W4A8")}) {
    const double ratio = bits(precision) / bits(m.model.precision);
    const auto bytes = int64_t(double(now.weights) * ratio);
    if (ratio >= 0.95 || now.expert_cache > 0 || page * wanted > kv_room(q, bytes)) continue;
    ways.push_back(fmt::format("weights of {}: about {} instead of {})", words, human_bytes(double(bytes)), human_bytes(double(now.weights))));
    break;
  }
  // Half of what the rest leaves beside the sequences: the page cache and the kernel want some too.
  if (exec::LoadOptions o = q.load; now.expert_cache == 0) {
    o.kv_pages = wanted;
    o.expert_cache_bytes = 1;
    const exec::MemoryPlan p = exec::plan_memory(m, o, q.threads);
    const int64_t mib = (q.room - p.total()) / 2 >> 20;
    if (p.weights < now.weights && mib >= 64 && double(p.kv) <= q.kv_fraction * double(q.room - p.total() + p.kv - (mib << 20)))
      ways.push_back(fmt::format("--expert-cache {}mib (experts from disk)", mib));
  }
  std::string all;
  for (const std::string& w : ways) all += (all.empty() ? "" : ", or ") + w;
  return all;
}

}  // namespace mi::tools
