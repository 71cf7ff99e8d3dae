#include "tools/profile/memory.h"

#include "base/util.h"
#include "hw/process_memory.h"

namespace mi::tools {

MemoryReport memory_report(const exec::Engine& engine) {
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
  r.lines.push_back({"rest: heap, stacks, tables, tokenizer", {}, {}});
  r.lines.push_back({"rest: program and libraries", {}, {}});
  const auto process = hw::process_memory();
  if (!process.ok()) {
    r.notes.push_back("process: " + process.error().message());
    return r;
  }
  r.peak = process->peak;
  if (known) {
    r.lines[r.lines.size() - 2].resident = std::max<int64_t>(0, process->anonymous - engine_part.anonymous);
    r.lines.back().resident = std::max<int64_t>(0, process->resident - process->anonymous - engine_part.file);
  }
  r.lines.push_back({"all", {}, process->resident});
  return r;
}

std::string memory_text(const MemoryReport& r) {
  const auto bytes = [](const std::optional<int64_t>& n) { return n ? human_bytes(double(*n)) : std::string("-"); };
  std::string s = fmt::format("\n{:<40} {:>12} {:>12}\n", "memory", "planned", "resident");
  for (const MemoryLine& l : r.lines)
    s += fmt::format("{:<40} {:>12} {:>12}\n", l.name, bytes(l.planned), bytes(l.resident));
  if (r.peak) s += fmt::format("{:<40} {:>12} {:>12}\n", "most so far", "", bytes(r.peak));
  for (const std::string& n : r.notes) s += "not known: " + n + "\n";
  return s;
}

Json memory_json(const MemoryReport& r) {
  const auto number = [](const std::optional<int64_t>& n) { return n ? Json(*n) : Json(nullptr); };
  Json j{{"parts", Json::array()}, {"peak_bytes", number(r.peak)}, {"notes", r.notes}};
  for (const MemoryLine& l : r.lines)
    j["parts"].push_back(
        {{"name", l.name}, {"planned_bytes", number(l.planned)}, {"resident_bytes", number(l.resident)}});
  return j;
}

}  // namespace mi::tools
