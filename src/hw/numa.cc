#include "hw/numa.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sched.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <numeric>
#include <set>

namespace mi::hw {
namespace {

namespace fs = std::filesystem;

// "0-3,8": the kernel's lists of CPUs. What is not one ends the list.
std::set<int> parse_list(const std::string& text) {
  std::set<int> out;
  const char *at = text.data(), *end = at + text.size();
  while (at < end) {
    int first = 0;
    auto r = std::from_chars(at, end, first);
    if (r.ec != std::errc()) break;
    int last = first;
    if (r.ptr < end && *r.ptr == '-') r = std::from_chars(r.ptr + 1, end, last);
    if (r.ec != std::errc() || last < first || last - first > 65536) break;
    for (int i = first; i <= last; ++i) out.insert(i);
    at = r.ptr < end && *r.ptr == ',' ? r.ptr + 1 : end;
  }
  return out;
}

std::string whole(const fs::path& p) {
  std::ifstream f(p);
  return {std::istreambuf_iterator<char>(f), {}};
}

// "Node 0 MemFree:        1234 kB"
int64_t free_bytes(const fs::path& meminfo) {
  std::ifstream f(meminfo);
  constexpr std::string_view kKey = "MemFree:";
  for (std::string line; std::getline(f, line);)
    if (const size_t at = line.find(kKey); at != line.npos)
      return std::strtoll(line.c_str() + at + kKey.size(), nullptr, 10) * 1024;
  return 0;
}

}  // namespace

std::vector<int> allowed_cpus() {
  std::vector<int> cpus;
  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (sched_getaffinity(0, sizeof mask, &mask) != 0) return cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &mask)) cpus.push_back(cpu);
  return cpus;
}

std::vector<MemoryNode> memory_nodes(const fs::path& root, const std::vector<int>& allowed) {
  std::vector<MemoryNode> nodes;
  const fs::path dir = root / "sys/devices/system/node";
  for (int id : parse_list(whole(dir / "online"))) {
    const fs::path node = dir / fmt::format("node{}", id);
    MemoryNode n{id, {}, free_bytes(node / "meminfo")};
    const std::set<int> cpus = parse_list(whole(node / "cpulist"));
    std::copy_if(allowed.begin(), allowed.end(), std::back_inserter(n.cpus), [&](int c) { return cpus.count(c) != 0; });
    nodes.push_back(std::move(n));
  }
  return nodes;
}

NumaPlan plan_numa(const std::vector<MemoryNode>& nodes, int threads, int64_t weight_bytes) {
  NumaPlan plan;
  if (nodes.size() < 2) {
    plan.reason = "one memory node";
    return plan;
  }
  const int64_t need = weight_bytes + weight_bytes / 20;
  const MemoryNode* home = nullptr;
  for (const MemoryNode& n : nodes)
    if (int(n.cpus.size()) >= threads && n.free_bytes >= need && (!home || n.free_bytes > home->free_bytes)) home = &n;
  if (home) {
    plan.weight_nodes = {home->id};
    plan.worker_cpus.assign(size_t(threads), home->cpus);
    plan.reason = fmt::format("threads and weights fit into memory node {}", home->id);
    return plan;
  }

  std::vector<const MemoryNode*> used;
  for (const MemoryNode& n : nodes)
    if (!n.cpus.empty()) used.push_back(&n);
  std::stable_sort(used.begin(), used.end(),
                   [](const MemoryNode* a, const MemoryNode* b) { return a->cpus.size() > b->cpus.size(); });
  int64_t cpus = 0, memory = 0;
  size_t count = 0;
  for (; count < used.size() && (cpus < threads || memory < need); ++count) {
    cpus += int64_t(used[count]->cpus.size());
    memory += used[count]->free_bytes;
  }
  used.resize(count);
  if (used.empty()) {
    plan.reason = "no memory node has a CPU of this process";
    return plan;
  }
  // Worker i goes to the node that is furthest behind its share.
  std::vector<size_t> given(used.size(), 0);
  for (int i = 0; i < threads; ++i) {
    size_t best = 0;
    for (size_t n = 1; n < used.size(); ++n)
      if ((given[n] + 1) * used[best]->cpus.size() < (given[best] + 1) * used[n]->cpus.size()) best = n;
    ++given[best];
    plan.worker_cpus.push_back(used[best]->cpus);
  }
  if (memory >= need) {
    for (const MemoryNode* n : used) plan.weight_nodes.push_back(n->id);
  } else {
    for (const MemoryNode& n : nodes)
      if (n.free_bytes > 0) plan.weight_nodes.push_back(n.id);
  }
  std::sort(plan.weight_nodes.begin(), plan.weight_nodes.end());
  plan.reason = fmt::format("{} threads over {} memory nodes, weights dealt out over nodes {}", threads, used.size(),
                            fmt::join(plan.weight_nodes, ", "));
  return plan;
}

std::vector<int> share_parts(const std::vector<double>& loads, const std::vector<int>& nodes) {
  std::vector<size_t> order(loads.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t x, size_t y) { return loads[x] > loads[y]; });
  std::vector<double> has(nodes.size());
  std::vector<size_t> parts(nodes.size());
  const size_t room = (loads.size() + nodes.size() - 1) / nodes.size();
  std::vector<int> node(loads.size());
  for (const size_t part : order) {
    size_t best = nodes.size();
    for (size_t n = 0; n < nodes.size(); ++n)
      if (parts[n] < room && (best == nodes.size() || has[n] < has[best])) best = n;
    node[part] = nodes[best];
    has[best] += loads[part];
    ++parts[best];
  }
  return node;
}

}  // namespace mi::hw
