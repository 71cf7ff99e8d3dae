#pragma once
// Memory nodes (NUMA): what the machine has, and where an engine's threads and weights go on it.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace mi::hw {

struct MemoryNode {
  int id = 0;
  std::vector<int> cpus;  // that this process may use; may be empty (memory without CPUs)
  int64_t free_bytes = 0;
};

// The nodes that the kernel names under `root` ("/"; tests give a made-up tree), by id; empty where it names none.
std::vector<MemoryNode> memory_nodes(const std::filesystem::path& root, const std::vector<int>& allowed_cpus);
std::vector<int> allowed_cpus();  // the calling thread's affinity mask

struct NumaPlan {
  std::vector<int> weight_nodes;              // the pages of the weights go to these in turn; empty: as the kernel likes
  std::vector<std::vector<int>> worker_cpus;  // by worker: where it may run; empty: as the kernel likes
  std::string reason;                         // one clause
};

// One node: nothing to decide. Threads and weights that fit into one of several nodes stay in it: no access leaves it.
// Otherwise workers are spread over the fewest nodes that have CPUs for all of them, in proportion, and the weights'
// pages are dealt out over these nodes (over all, where their memory is too small), so that the nodes' bandwidths add
// up and no thread is slower than another: tasks are handed out dynamically, so which rows a thread will read is not
// known before.
NumaPlan plan_numa(const std::vector<MemoryNode>& nodes, int threads, int64_t weight_bytes);

// A node for each part of the weights, so that nodes have equally many parts (or one more), and of what is read of them about
// equally much: by falling load, always to the node that has least of it and room. Precondition: a node.
std::vector<int> share_parts(const std::vector<double>& loads, const std::vector<int>& nodes);

}  // namespace mi::hw
