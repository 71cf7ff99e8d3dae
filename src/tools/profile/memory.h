#pragma once
// What the engine planned to use beside what is resident, by category.

#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "exec/engine.h"

namespace mi::tools {

struct MemoryLine {
  std::string name;
  std::optional<int64_t> planned, resident;  // none: nothing was planned; it cannot be told
};
struct MemoryReport {
  std::vector<MemoryLine> lines;
  std::optional<int64_t> peak;
  std::vector<std::string> notes;  // what could not be had, and why
};
MemoryReport memory_report(const exec::Engine& engine);

std::string memory_text(const MemoryReport& r);
Json memory_json(const MemoryReport& r);

}  // namespace mi::tools
