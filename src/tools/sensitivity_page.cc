#include "tools/sensitivity_page.h"

#include <algorithm>
#include <map>

#include "base/html.h"
#include "base/util.h"
#include "tools/plot.h"

namespace mi::tools {
namespace {

using quant::Candidate;

// "layers.3.moe.experts" -> "moe.experts"
std::string kind_of(const Candidate& c) { return c.name.substr(c.name.find('.', 7) + 1); }
std::string format_of(const Candidate& c) { return c.static_scale ? "static" : quant::layer_format_name(c.format); }

std::string heat(const quant::Sensitivity& s, const std::string& label, double (*value)(const Candidate&)) {
  std::map<std::string, std::map<int32_t, double>> rows;
  int32_t layers = 0;
  for (const Candidate& c : s.candidates) {
    rows[kind_of(c) + " " + format_of(c)][c.layer] = value(c);
    layers = std::max(layers, c.layer + 1);
  }
  std::vector<PlotRow> plot;
  for (const auto& [name, by_layer] : rows) {
    PlotRow row{name, std::vector<double>(size_t(layers))};
    for (const auto& [layer, v] : by_layer) row.values[size_t(layer)] = v;
    plot.push_back(std::move(row));
  }
  return heat_plot(plot, label);
}

std::string bars(const quant::Sensitivity& s) {
  std::vector<PlotBar> out;
  for (int32_t layer : s.order()) {
    double kl = 0;
    std::string parts;
    for (const Candidate& c : s.candidates)
      if (c.layer == layer && !c.static_scale && c.format == quant::LayerFormat::kInt8) {
        kl += c.kl;
        parts += fmt::format("{}: {:.5f} ", kind_of(c), c.kl);
      }
    out.push_back({fmt::format("layer {}", layer), fmt::format("{:.5f}", kl), parts, kl});
  }
  return bar_plot(out, "KL of a layer at int8");
}

}  // namespace

std::string sensitivity_page(const std::string& model, const quant::Sensitivity& s,
                             const std::vector<quant::MixedChoice>& front) {
  std::string body = fmt::format(
      "<p>What rounding one part does while all others stay float, on {} tokens: the error of what its layer adds to the "
      "residual stream, and the KL divergence of the predictions. Layers stand in the order in which they deserve "
      "attention: massive activations first, then by what int8 costs.</p>\n", s.tokens);
  body += "<h2>Layers</h2>\n" + bars(s);
  body += "<h2>KL by part and layer</h2>\n" + heat(s, "KL by part and layer", [](const Candidate& c) { return c.kl; });
  body += "<h2>Error by part and layer</h2>\n" +
          heat(s, "error of what a layer adds", [](const Candidate& c) { return c.error; });
  if (!front.empty()) {
    PlotLine line{"choices", {}};
    double longest = 0;
    for (auto it = front.rbegin(); it != front.rend(); ++it) {
      const std::string title =
          fmt::format("{:.1f} us, KL {:.5f}, {}, {:.2f} bits", 1e6 * it->seconds, it->kl, human_bytes(double(it->bytes)), it->bits);
      line.points.push_back({1e6 * it->seconds, it->kl, it->kl, it->kl, title});
      longest = std::max(longest, 1e6 * it->seconds);
    }
    std::stable_sort(line.points.begin(), line.points.end(), [](const auto& a, const auto& b) { return a.x < b.x; });
    body += "<h2>Choices of formats that no other beats</h2>\n<p>Time of one token's products in microseconds against the "
            "predicted KL.</p>\n" + line_plot({line}, longest, "KL over us per token");
    std::vector<std::vector<std::string>> rows{{"KL", "us per token", "weights", "bits", "bits of experts"}};
    for (const quant::MixedChoice& c : front)
      rows.push_back({fmt::format("{:.5f}", c.kl), fmt::format("{:.1f}", 1e6 * c.seconds), human_bytes(double(c.bytes)),
                      fmt::format("{:.2f}", c.bits), fmt::format("{:.2f}", c.expert_bits)});
    body += html::table(rows);
  }
  std::vector<std::vector<std::string>> peaks{{"layer", "value", "largest", "largest / rms", "median", "rows above a tenth of it"}};
  for (const quant::Peak& p : s.peaks)
    if (p.massive())
      peaks.push_back({std::to_string(p.layer), p.value, fmt::format("{:.1f}", p.largest), fmt::format("{:.0f}", p.ratio()),
                       fmt::format("{:.3g}", p.median), fmt::format("{:.1f} %", double(p.token_share_permille) / 10)});
  body += "<h2>Massive activations</h2>\n" + (peaks.size() > 1 ? html::table(peaks) : "<p>None.</p>\n");
  std::vector<std::vector<std::string>> rows{{"part", "format", "error", "cosine", "KL", ""}};
  for (int32_t layer : s.order())
    for (const Candidate& c : s.candidates)
      if (c.layer == layer)
        rows.push_back({c.name, format_of(c), fmt::format("{:.3f} %", 100 * c.error), fmt::format("{:.6f}", c.cosine),
                        fmt::format("{:.6f}", c.kl), c.measured ? "" : "estimated from the error"});
  body += "<h2>Every part</h2>\n" + html::table(rows);
  return html::page(model + ": sensitivity", body);
}

}  // namespace mi::tools
