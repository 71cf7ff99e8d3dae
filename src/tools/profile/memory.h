#pragma once
// What the engine planned to use beside what is resident, by category.

#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "exec/engine.h"
#include "exec/memory_plan.h"

namespace mi::tools {

struct MemoryLine {
  std::string name;
  int64_t planned = 0;
  std::optional<int64_t> resident;  // none: it cannot be told
};
struct MemoryReport {
  std::vector<MemoryLine> lines;  // the last one is their sum
  std::optional<int64_t> peak;
  std::vector<std::string> notes;  // what could not be had, and why
};
// runtime_bytes: what the process took before the engine was loaded.
MemoryReport memory_report(const exec::Engine& engine, const exec::MemoryPlan& plan, int64_t runtime_bytes);

std::string memory_text(const MemoryReport& r);
Json memory_json(const MemoryReport& r);
// Two bars of parts side by side, planned and resident, in one scale.
std::string memory_plot(const MemoryReport& r);

}  // namespace mi::tools
