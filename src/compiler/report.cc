// The build's report as text, JSON and a page.

#include <algorithm>
#include <map>

#include "base/html.h"
#include "base/util.h"
#include "compiler/build.h"
#include "compiler/fallbacks.h"
#include "compiler/graph_view.h"
#include "compiler/kv_plan.h"
#include "ir/stats.h"

namespace mi::compiler {
namespace {

using html::escape;
using html::row;

std::string count_text(int64_t n) {
  if (n >= 1'000'000'000) return fmt::format("{:.2f} billion", double(n) / 1e9);
  if (n >= 1'000'000) return fmt::format("{:.1f} million", double(n) / 1e6);
  return fmt::format("{}", n);
}

std::string model_line(const artifact::ModelFacts& f) {
  return fmt::format("{} ({}), {} layers, {} parameters, {} active per token, {}", f.name, f.family, f.layers,
                     count_text(f.total_params), count_text(f.active_params), f.precision);
}

// Places in the arena that several buffers take after each other.
struct Sharing {
  int64_t offset = 0;
  std::vector<std::string> names;
};
std::vector<Sharing> sharing_of(const artifact::Manifest& m) {
  std::map<int64_t, Sharing> places;
  for (const artifact::Buffer& b : m.buffers) {
    Sharing& s = places.try_emplace(b.offset_per_token, Sharing{b.offset_per_token, {}}).first->second;
    s.names.push_back(b.name);
  }
  std::vector<Sharing> all;
  for (auto& [offset, s] : places) all.push_back(std::move(s));
  return all;
}

std::string groups_text(const artifact::Manifest& m) {
  std::map<std::string, std::vector<int32_t>> layers;  // by form
  for (const artifact::Instr& i : m.program) {
    if (i.groups.empty()) continue;
    std::string form = fmt::format("{} groups:", i.groups.size());
    for (size_t g = 0; g < i.groups.size() && g < 4; ++g) form += fmt::format("{} [{}]", g ? "," : "", fmt::join(i.groups[g], " "));
    if (i.groups.size() > 4) form += ", ...";
    layers[form].push_back(i.layer);
  }
  std::string s;
  for (const auto& [form, of] : layers) s += fmt::format("expert groups {}: {}\n", layers_text(of), form);
  return s;
}

std::string pass_note(const BuildReport& r, size_t i) {
  const artifact::PassReport& p = r.manifest.passes[i];
  if (p.skipped) return "skipped";
  if (!p.changed) return "nothing to do";
  if (p.name == "share_buffers")
    return fmt::format("{} -> {} of activations per token", human_bytes(double(r.unshared_activation_bytes)),
                       human_bytes(double(r.manifest.memory.activation_bytes_per_token)));
  return fmt::format("{} -> {} ops, {} -> {} kernel calls, {}", p.nodes_before, p.nodes_after, r.kernel_calls[i],
                     r.kernel_calls[i + 1], human_seconds(p.seconds));
}

// One bar for each class and format of weights, the largest first.
std::string weights_picture(const ir::Graph& g) {
  std::vector<ir::WeightGroup> groups = ir::stats_of(g).groups;
  std::stable_sort(groups.begin(), groups.end(), [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
  double all = 0;
  for (const ir::WeightGroup& w : groups) all += double(w.bytes);
  std::string out;
  for (size_t i = 0; i < groups.size(); ++i) {
    const double share = 100 * double(groups[i].bytes) / std::max(all, 1.0);
    out += fmt::format(
        "<div style=\"margin:.2rem 0;break-inside:avoid\">{} {}: {}, {:.1f} %<div style=\"background:hsl({},55%,65%);height:.6rem;min-width:1px;width:{:.1f}%\"></div></div>\n",
        escape(std::string(ir::mark_name(groups[i].mark))), groups[i].format, human_bytes(double(groups[i].bytes)), share, (i * 47) % 360, share);
  }
  return out;
}

// Bars of the arena: time (instructions) to the right, bytes per token downwards. Buffers of the prologue and the first
// layers only; the others repeat.
std::string arena_picture(const artifact::Manifest& m) {
  constexpr double kWidth = 900, kHeight = 260;
  constexpr int32_t kMostInstrs = 48;
  const int32_t instrs = std::min<int32_t>(kMostInstrs, int32_t(m.program.size()));
  const double arena = double(std::max<int64_t>(1, m.memory.activation_bytes_per_token));
  std::string out = fmt::format(
      "<svg viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\" role=\"img\" aria-label=\"activation arena\">\n",
      kWidth, kHeight);
  out += fmt::format("<rect width=\"{}\" height=\"{}\" fill=\"#f3f3f3\"/>\n", kWidth, kHeight);
  for (size_t i = 0; i < m.buffers.size(); ++i) {
    const auto& b = m.buffers[i];
    if (b.first_instr >= instrs) continue;
    const double bytes = double(b.row_stride * b.rows_per_token);
    const double x = kWidth * b.first_instr / instrs,
                 w = kWidth * (std::min(b.last_instr, instrs - 1) + 1 - b.first_instr) / instrs;
    const double y = kHeight * double(b.offset_per_token) / arena, h = std::max(1.0, kHeight * bytes / arena);
    out += fmt::format(
        "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"hsl({},55%,65%)\" "
        "stroke=\"#fff\"><title>{}: {} bytes per token, instructions {} to {}</title></rect>\n",
        x, y, w, h, (i * 47) % 360, escape(b.name), bytes, b.first_instr, b.last_instr);
  }
  return out + "</svg>\n";
}

}  // namespace

std::string report_text(const BuildReport& r) {
  const artifact::Manifest& m = r.manifest;
  std::string out;
  out += fmt::format("model         {}\n", model_line(m.model));
  out += fmt::format("weights       {} -> {} packed\n", human_bytes(double(r.source_bytes)),
                     human_bytes(double(m.memory.weight_bytes)));
  out += fmt::format("activations   {} per token in one arena ({} without sharing), {} buffers in {} places\n",
                     human_bytes(double(m.memory.activation_bytes_per_token)),
                     human_bytes(double(r.unshared_activation_bytes)), m.buffers.size(), sharing_of(m).size());
  out += groups_text(m);
  if (r.expert_order) out += expert_order_text(*r.expert_order);
  out += fmt::format("program       {} kernel calls per step, {} without passes\n", m.program.size(), r.kernel_calls.front());
  out += fmt::format("KV cache, {} sequences of {} tokens:\n{}", r.plan_batch, r.plan_seq_len,
                     kv_plan_text(m.caches, r.plan_seq_len, r.plan_batch));
  out += "passes:\n";
  for (size_t i = 0; i < m.passes.size(); ++i) out += fmt::format("  {:<24} {}\n", m.passes[i].name, pass_note(r, i));
  if (!r.conversions.empty()) {
    out += fmt::format("conversions   {}\n", conversions_line(r.conversions));
    for (const Conversion& c : r.conversions)
      if (c.own_call)
        out += fmt::format("  {}: a kernel call of its own, reads {} of floats per token; {}\n", c.where, human_bytes(double(c.buffer_bytes)), c.why);
  }
  if (!r.conversions.empty() || !r.kernel_fallbacks.list.empty()) out += fmt::format("fallbacks     {}\n", fallbacks_line(m.fallbacks.size(), r.kernel_fallbacks));
  for (const auto* list : {&m.fallbacks, &r.kernel_fallbacks.list})
    for (const auto& f : *list)
      out += fmt::format("  {}: {}\n    why: {}\n    fix: {}\n", f.where, f.what, f.why, f.fix);
  out += fmt::format("time          {}\n", human_seconds(r.seconds));
  return out;
}

Json report_json(const BuildReport& r) {
  const artifact::Manifest& m = r.manifest;
  Json j;
  j["model"] = {{"name", m.model.name},
                {"family", m.model.family},
                {"layers", m.model.layers},
                {"total_params", m.model.total_params},
                {"active_params", m.model.active_params},
                {"precision", m.model.precision}};
  j["source_bytes"] = r.source_bytes;
  j["weight_bytes"] = m.memory.weight_bytes;
  j["engine_bytes"] = r.engine_bytes;
  j["activation_bytes_per_token"] = m.memory.activation_bytes_per_token;
  j["activation_bytes_per_token_unshared"] = r.unshared_activation_bytes;
  j["activation_bytes_per_token_peak"] = r.peak_activation_bytes;
  j["kv"] = {
      {"seq_len", r.plan_seq_len},
      {"batch", r.plan_batch},
      {"default", m.default_kv},
      {"bf16_bytes", stored_kv_bytes_per_token(m.caches, kernels::KvKind::kBF16) * r.plan_seq_len * r.plan_batch},
      {"int8_bytes", stored_kv_bytes_per_token(m.caches, kernels::KvKind::kI8) * r.plan_seq_len * r.plan_batch}};
  j["instructions"] = m.program.size();
  j["passes"] = Json::array();
  for (size_t i = 0; i < m.passes.size(); ++i) {
    const artifact::PassReport& p = m.passes[i];
    j["passes"].push_back({{"name", p.name},
                           {"skipped", p.skipped},
                           {"changed", p.changed},
                           {"seconds", p.seconds},
                           {"nodes_before", p.nodes_before},
                           {"nodes_after", p.nodes_after},
                           {"kernel_calls_before", r.kernel_calls[i]},
                           {"kernel_calls_after", r.kernel_calls[i + 1]}});
  }
  for (const auto& [key, list] : {std::pair("fallbacks", &m.fallbacks), std::pair("kernel_fallbacks", &r.kernel_fallbacks.list)}) {
    j[key] = Json::array();
    for (const auto& f : *list) j[key].push_back({{"where", f.where}, {"what", f.what}, {"why", f.why}, {"fix", f.fix}});
  }
  j["kernel_fallback_seconds"] = {{"prompt_tokens", KernelFallbacks::kPromptTokens},
                                  {"prompt", r.kernel_fallbacks.prompt_seconds},
                                  {"token", r.kernel_fallbacks.token_seconds}};
  j["conversions"] = Json::array();
  for (const Conversion& c : r.conversions) {
    j["conversions"].push_back({{"where", c.where}, {"to", c.to_int8 ? "int8" : "float"}, {"by", c.by}, {"why", c.why}, {"times", c.times}, {"own_call", c.own_call}});
    if (c.own_call) j["conversions"].back()["buffer_bytes"] = c.buffer_bytes;
  }
  if (r.expert_order) j["expert_order"] = expert_order_json(*r.expert_order);
  j["arena"] = {{"buffers", m.buffers.size()}, {"places", Json::array()}};
  for (const Sharing& s : sharing_of(m)) j["arena"]["places"].push_back({{"offset", s.offset}, {"buffers", s.names}});
  j["seconds"] = r.seconds;
  return j;
}

std::string report_html(const BuildReport& r, const ir::Graph& after_passes, const std::string& appendix) {
  const artifact::Manifest& m = r.manifest;
  std::string out = fmt::format("<p>{}</p>\n", escape(model_line(m.model)));
  out += "<h2>Sizes</h2><table>\n" + row({"what", "size"}, "th");
  out += row({"weights of the model", human_bytes(double(r.source_bytes))});
  out += row({"weights.bin", human_bytes(double(m.memory.weight_bytes))});
  out += row({"activations, per token of a step", human_bytes(double(m.memory.activation_bytes_per_token))});
  out += row({"activations without sharing", human_bytes(double(r.unshared_activation_bytes))});
  out += row({"least that any plan needs", human_bytes(double(r.peak_activation_bytes))});
  out += row({"KV cache per token, bf16", human_bytes(double(m.memory.kv_bytes_per_token_bf16))});
  out += "</table>\n" + weights_picture(after_passes) + "<h2>KV cache</h2>\n<pre>" +
         escape(fmt::format("{} sequences of {} tokens\n{}", r.plan_batch, r.plan_seq_len,
                            kv_plan_text(m.caches, r.plan_seq_len, r.plan_batch))) +
         "</pre>\n";
  out += "<h2>Passes</h2><table>\n" + row({"pass", "ops before", "ops after", "kernel calls before", "kernel calls after", ""}, "th");
  for (size_t i = 0; i < m.passes.size(); ++i) {
    const artifact::PassReport& p = m.passes[i];
    out += row({p.name, fmt::format("{}", p.nodes_before), fmt::format("{}", p.nodes_after),
                fmt::format("{}", r.kernel_calls[i]), fmt::format("{}", r.kernel_calls[i + 1]),
                p.skipped ? "skipped" : !p.changed ? "nothing to do" : p.name == "share_buffers" ? pass_note(r, i) : ""});
  }
  out +=
      "</table>\n<h2>Memory plan</h2>\n<p>Each bar is a buffer: left to right its lifetime in instructions, top to "
      "bottom its place in the arena. The first layers; the others repeat.</p>\n" +
      arena_picture(m);
  out += "<details><summary>Which buffers share a place</summary>\n<table>\n" + row({"offset per token", "buffers, one after the other"}, "th");
  for (const Sharing& s : sharing_of(m)) {
    const size_t shown = std::min<size_t>(s.names.size(), 12);
    out += row({fmt::format("{}", s.offset), fmt::format("{}{}", fmt::join(s.names.begin(), s.names.begin() + ptrdiff_t(shown), ", "),
                                                         s.names.size() > shown ? fmt::format(", and {} more", s.names.size() - shown) : "")});
  }
  out += "</table></details>\n";
  if (!r.conversions.empty()) {
    out += "<h2>Conversions</h2>\n<p>" + escape(conversions_line(r.conversions)) + ".</p>\n<table>\n" + row({"where", "", "by", "why", "times"}, "th");
    for (const Conversion& c : r.conversions)
      out += row({c.where, c.to_int8 ? "float -> int8" : "int8 -> float",
                  c.own_call ? fmt::format("{}: {} of floats per token", c.by, human_bytes(double(c.buffer_bytes))) : c.by, c.why, fmt::format("{}", c.times)});
    out += "</table>\n";
  }
  if (r.expert_order) out += expert_order_html(*r.expert_order);
  out += "<h2>Fallbacks</h2>\n";
  if (m.fallbacks.empty()) {
    out += "<p>None.</p>\n";
  } else {
    out += "<table>\n" + row({"where", "what", "why", "fix"}, "th");
    for (const auto& f : m.fallbacks) out += row({f.where, f.what, f.why, f.fix});
    out += "</table>\n";
  }
  out += "<h2>Graph after the passes</h2>\n" + graph_html(after_passes);
  out += "<h2>Options</h2><table>\n" + row({"option", "value"}, "th");
  for (const auto& [k, v] : m.options) out += row({k, v});
  return html::page(m.model.name + ": engine report", out + "</table>\n" + appendix);
}

}  // namespace mi::compiler
