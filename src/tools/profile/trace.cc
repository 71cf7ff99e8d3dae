#include "tools/profile/report.h"

namespace mi::tools {
namespace {

constexpr double kMicro = 1e6;  // the format's unit of time

Json complete(const std::string& name, const std::string& category, int process, double begin, double seconds) {
  return {{"name", name},         {"cat", category},        {"ph", "X"}, {"pid", process}, {"tid", 1},
          {"ts", begin * kMicro}, {"dur", seconds * kMicro}};
}

Json meta(const char* what, int process, const std::string& name) {
  return {{"name", what}, {"ph", "M"}, {"pid", process}, {"tid", 1}, {"args", {{"name", name}}}};
}

}  // namespace

Json profile_trace(const Profile& p) {
  Json events = Json::array();
  int process = 0;
  for (const Scenario& s : p.scenarios) {
    ++process;
    events.push_back(
        meta("process_name", process, fmt::format("{}: step {} of {}", s.name, s.trace.number + 1, s.steps)));
    events.push_back(meta("thread_name", process, "instructions"));
    events.push_back(complete("step", "step", process, 0, s.trace.seconds));
    const auto& spans = s.trace.spans;
    for (size_t i = 0, end; i < spans.size(); i = end) {
      const int32_t layer = p.program[spans[i].instr].layer;
      for (end = i; end < spans.size() && p.program[spans[end].instr].layer == layer;) ++end;
      const double begin = spans[i].begin;
      if (layer >= 0)
        events.push_back(complete(fmt::format("layer {}", layer), "layer", process, begin,
                                  spans[end - 1].begin + spans[end - 1].seconds - begin));
      for (size_t k = i; k < end; ++k) {
        const InstrInfo& info = p.program[spans[k].instr];
        Json e = complete(info.op + " " + info.name, info.op, process, spans[k].begin, spans[k].seconds);
        e["args"] = {{"layer", info.layer},
                     {"kernel", info.kernel},
                     {"weight_bytes", spans[k].cost.weight_bytes},
                     {"kv_bytes", spans[k].cost.kv_bytes},
                     {"int8_ops", spans[k].cost.int8_ops},
                     {"float_ops", spans[k].cost.float_ops},
                     {"bf16_ops", spans[k].cost.bf16_ops}};
        events.push_back(std::move(e));
      }
    }
  }
  return {{"displayTimeUnit", "ms"},
          {"traceEvents", std::move(events)},
          {"otherData", {{"version", p.version}, {"engine", p.engine}, {"cpu", p.machine.cpu}}}};
}

}  // namespace mi::tools
