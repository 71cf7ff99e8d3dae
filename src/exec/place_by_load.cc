// Where weights go on a machine of several memory nodes when it is known which experts are chosen how often.

#include <algorithm>
#include <map>

#include "artifact/expert_reads.h"
#include "exec/context.h"
#include "hw/numa.h"

namespace mi::exec {
namespace {

using artifact::Instr;
using artifact::Manifest;
using artifact::WeightTensor;

// Blocks are whole huge pages: a smaller one could not be huge beside a neighbour on another node.
constexpr int64_t kHugePage = 2 << 20;
constexpr int64_t kMostBlocks = 16384;  // the kernel keeps an entry for each; it has 65530

// What a token reads of each block, and the layer that it reads most of it in.
struct Load {
  std::vector<double> bytes;
  std::vector<std::map<int32_t, double>> by_layer;

  void add(int64_t begin, int64_t size, double chance, int32_t layer, int64_t block_bytes) {
    for (int64_t at = begin; at < begin + size;) {
      const int64_t block = at / block_bytes, end = std::min(begin + size, (block + 1) * block_bytes);
      bytes[size_t(block)] += chance * double(end - at);
      by_layer[size_t(block)][layer] += double(end - at);
      at = end;
    }
  }
};

}  // namespace

std::vector<int> plan_blocks(const Manifest& m, const std::map<int32_t, std::vector<float>>& chances, const std::vector<int>& nodes, int64_t block_bytes) {
  const size_t blocks = size_t((m.memory.weight_bytes + block_bytes - 1) / block_bytes);
  Load load{std::vector<double>(blocks), std::vector<std::map<int32_t, double>>(blocks)};
  for (const Instr& i : m.program) {
    const auto known = chances.find(i.layer);
    const std::span<const Role> roles = artifact::expert_roles(i);
    for (const artifact::InstrWeight& x : i.weights) {
      const WeightTensor& w = m.weights[size_t(x.tensor)];
      if (std::find(roles.begin(), roles.end(), x.role) == roles.end()) {
        load.add(w.offset, w.bytes, i.op == Op::kEmbed ? 0 : 1, i.layer, block_bytes);  // of the embedding a row
        continue;
      }
      for (int64_t e = 0; e < w.experts; ++e) {
        const double even = double(i.in[1].type.cols) / double(w.experts);
        load.add(w.offset + artifact::expert_slot(w, e) * w.expert_stride, w.expert_stride, known == chances.end() ? even : double(known->second[size_t(e)]), i.layer,
                 block_bytes);
      }
    }
  }
  // Layers run one after the other, so each is shared out by itself.
  std::map<int32_t, std::vector<size_t>> of_layer;
  for (size_t b = 0; b < blocks; ++b) {
    const auto& l = load.by_layer[b];
    const auto most = std::max_element(l.begin(), l.end(), [](const auto& x, const auto& y) { return x.second < y.second; });
    of_layer[most == l.end() ? -1 : most->first].push_back(b);
  }
  std::vector<int> plan(blocks), turned = nodes;
  for (const auto& [layer, members] : of_layer) {
    std::vector<double> loads;
    for (const size_t b : members) loads.push_back(load.bytes[b]);
    const std::vector<int> shared = hw::share_parts(loads, turned);
    for (size_t i = 0; i < members.size(); ++i) plan[members[i]] = shared[i];
    std::rotate(turned.begin(), turned.begin() + 1, turned.end());  // whoever got one more
  }
  return plan;
}

bool place_by_load(Context& c) {
  const int64_t bytes = c.memory.bytes();
  const int64_t block = kHugePage * std::max<int64_t>(1, (bytes + kMostBlocks * kHugePage - 1) / (kMostBlocks * kHugePage));
  const std::vector<int> plan = plan_blocks(c.manifest(), c.options.expert_chances, c.options.weight_nodes, block);
  for (size_t b = 0, end; b < plan.size(); b = end) {
    for (end = b + 1; end < plan.size() && plan[end] == plan[b];) ++end;
    const int64_t from = int64_t(b) * block;
    if (!c.memory.place_on({plan[b]}, from, std::min(bytes, int64_t(end) * block) - from)) return false;
  }
  return true;
}

}  // namespace mi::exec
