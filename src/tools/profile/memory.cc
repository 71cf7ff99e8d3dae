#include "tools/profile/memory.h"

#include "base/util.h"
#include "hw/process_memory.h"
#include "tools/plot.h"

namespace mi::tools {
namespace {

double off(const MemoryLine& l) { return double(*l.resident - l.planned) / double(l.planned); }

}  // namespace

MemoryReport memory_report(const exec::Engine& engine, const exec::MemoryPlan& plan, int64_t runtime_bytes) {
  MemoryReport r;
  hw::ResidentPart engine_part;
  bool known = true;
  for (const exec::MemoryPart& p : engine.memory()) {
    r.lines.push_back({p.name, p.bytes, {}});
    const auto part = hw::resident_part(p.data, p.bytes);
    if (!part.ok()) {
      if (known) r.notes.push_back("resident parts: " + part.error().message());
      known = false;
      continue;
    }
    r.lines.back().resident = part->total();
    engine_part.anonymous += part->anonymous;
    engine_part.file += part->file;
  }
  r.lines.push_back({"workspace: tables, scratch", plan.workspace, {}});
  r.lines.push_back({"runtime: program, tokenizer", runtime_bytes, {}});
  int64_t planned = 0;
  for (const MemoryLine& l : r.lines) planned += l.planned;
  r.lines.push_back({"all", planned, {}});
  const auto process = hw::process_memory();
  if (!process.ok()) {
    r.notes.push_back("process: " + process.error().message());
    return r;
  }
  r.peak = process->peak;
  r.lines.back().resident = process->resident;
  if (known) {
    // The heap cannot be told apart: what it grew by since the engine's load began is workspace.
    const int64_t rest = std::max<int64_t>(0, process->resident - engine_part.anonymous - engine_part.file);
    r.lines[r.lines.size() - 3].resident = std::max<int64_t>(0, rest - runtime_bytes);
    r.lines[r.lines.size() - 2].resident = std::min(rest, runtime_bytes);
  }
  return r;
}

std::string memory_text(const MemoryReport& r) {
  const auto bytes = [](const std::optional<int64_t>& n) { return n ? human_bytes(double(*n)) : std::string("-"); };
  std::string s = fmt::format("\n{:<30} {:>12} {:>12}\n", "memory", "planned", "resident");
  for (const MemoryLine& l : r.lines) {
    const bool sum = &l == &r.lines.back() && l.resident && l.planned > 0;
    s += fmt::format("{:<30} {:>12} {:>12}{}\n", l.name, bytes(l.planned), bytes(l.resident),
                     sum ? fmt::format("  {:+.1f} % of the plan", off(l) * 100) : "");
  }
  if (r.peak) s += fmt::format("{:<30} {:>12} {:>12}\n", "most so far", "", bytes(r.peak));
  for (const std::string& n : r.notes) s += "not known: " + n + "\n";
  return s;
}

Json memory_json(const MemoryReport& r) {
  const auto number = [](const std::optional<int64_t>& n) { return n ? Json(*n) : Json(nullptr); };
  Json j{{"parts", Json::array()}, {"peak_bytes", number(r.peak)}, {"notes", r.notes}};
  for (const MemoryLine& l : r.lines)
    j["parts"].push_back({{"name", l.name}, {"planned_bytes", l.planned}, {"resident_bytes", number(l.resident)}});
  return j;
}

std::string memory_plot(const MemoryReport& r) {
  std::vector<PlotStack> bars{{"planned", {}}, {"resident", {}}};
  for (size_t i = 0; i + 1 < r.lines.size(); ++i) {
    const MemoryLine& l = r.lines[i];
    const auto add = [&](PlotStack& bar, int64_t bytes) {
      bar.parts.push_back({l.name, fmt::format("{}, {}: {}", l.name, bar.name, human_bytes(double(bytes))), double(bytes)});
    };
    add(bars[0], l.planned);
    if (l.resident) add(bars[1], *l.resident);
  }
  return stack_plot(bars, "memory, planned and resident");
}

}  // namespace mi::tools
