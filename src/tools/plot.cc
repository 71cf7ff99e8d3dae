#include "tools/plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/html.h"
#include "base/util.h"

namespace mi::tools {
namespace {

using html::escape;

constexpr double kWidth = 900;

std::string begin(double height, const std::string& label) {
  return fmt::format("<svg viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\" role=\"img\" aria-label=\"{2}\">\n",
                     kWidth, height, escape(label));
}

std::string text(double x, double y, const std::string& s, const char* anchor = "start") {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n", x, y, anchor, escape(s));
}

std::string rect(double x, double y, double w, double h, const std::string& fill, const std::string& title) {
  return fmt::format(
      "<rect x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" height=\"{:.2f}\" fill=\"{}\"><title>{}</title></rect>\n", x, y,
      std::max(w, 0.0), std::max(h, 0.0), fill, escape(title));
}

// The next of 1, 2, 5, 10, 20, ... that is at least v.
double round_up(double v) {
  if (!(v > 0)) return 1;
  const double power = std::pow(10, std::floor(std::log10(v)));
  for (double m : {1.0, 2.0, 5.0})
    if (m * power >= v) return m * power;
  return 10 * power;
}

}  // namespace

std::string plot_color(const std::string& name) {
  const uint64_t h = seed_of(5, name);
  return fmt::format("hsl({},{}%,{}%)", h % 360, 45 + h / 360 % 3 * 15, 40 + h / 1080 % 3 * 12);
}

std::string line_plot(const std::vector<PlotLine>& lines, double x_max, const std::string& label) {
  constexpr double kHeight = 260, kLeft = 70, kTop = 12, kBottom = 20;
  double top = 0;
  for (const PlotLine& l : lines)
    for (const PlotLine::Point& p : l.points) top = std::max({top, p.y, p.high});
  top = round_up(top);
  const double steps = std::max(x_max, 1.0);
  const auto x = [&](double v) { return kLeft + (kWidth - kLeft - 20) * v / steps; };
  const auto y = [&](double v) { return kTop + (kHeight - kTop - kBottom) * (1 - v / top); };
  std::string out = begin(kHeight, label);
  for (int i = 0; i <= 4; ++i) {
    const double v = top * i / 4;
    out += fmt::format("<line x1=\"{}\" y1=\"{:.1f}\" x2=\"{}\" y2=\"{:.1f}\" stroke=\"#ddd\"/>\n", kLeft, y(v), kWidth,
                       y(v));
    out += text(kLeft - 6, y(v) + 4, fmt::format("{:.4g}", v), "end");
  }
  for (const PlotLine& l : lines) {
    const std::string color = plot_color(l.name);
    std::string line, band;
    for (const PlotLine::Point& p : l.points) {
      line += fmt::format("{:.1f},{:.1f} ", x(p.x), y(p.y));
      band += fmt::format("{:.1f},{:.1f} ", x(p.x), y(p.high));
    }
    for (size_t i = l.points.size(); i-- > 0;)
      band += fmt::format("{:.1f},{:.1f} ", x(l.points[i].x), y(l.points[i].low));
    out += fmt::format("<polygon points=\"{}\" fill=\"{}\" opacity=\".2\"/>\n", band, color);
    out += fmt::format("<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\"/>\n", line, color);
    for (const PlotLine::Point& p : l.points)
      out += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3.5\" fill=\"{}\"><title>{}</title></circle>\n",
                         x(p.x), y(p.y), color, escape(p.title));
  }
  return out + "</svg>\n";
}

std::string bar_plot(const std::vector<PlotBar>& bars, const std::string& label) {
  constexpr double kRow = 22, kLeft = 200, kBars = 420;
  double top = 0;
  for (const PlotBar& b : bars) top = std::max(top, b.value);
  std::string out = begin(kRow * double(bars.size()) + 6, label);
  for (size_t i = 0; i < bars.size(); ++i) {
    const double y = kRow * double(i) + 2, w = top > 0 ? kBars * bars[i].value / top : 0;
    out += text(kLeft - 8, y + 14, bars[i].name, "end");
    out += rect(kLeft, y, std::max(w, 1.0), kRow - 5, plot_color(bars[i].name), bars[i].title);
    out += text(kLeft + w + 8, y + 14, bars[i].text);
  }
  return out + "</svg>\n";
}

std::string stack_plot(const std::vector<PlotStack>& bars, const std::string& label) {
  constexpr double kRow = 26, kLeft = 90, kKey = 18;
  std::vector<std::string> names;
  double top = 0;
  for (const PlotStack& b : bars) {
    double sum = 0;
    for (const PlotStack::Part& p : b.parts) {
      sum += p.value;
      if (std::find(names.begin(), names.end(), p.name) == names.end()) names.push_back(p.name);
    }
    top = std::max(top, sum);
  }
  std::string out = begin(kRow * double(bars.size()) + kKey * double(names.size()) + 10, label);
  for (size_t i = 0; i < bars.size(); ++i) {
    const double y = kRow * double(i) + 2;
    out += text(kLeft - 8, y + 15, bars[i].name, "end");
    double x = kLeft;
    for (const PlotStack::Part& p : bars[i].parts) {
      const double w = top > 0 ? (kWidth - kLeft) * p.value / top : 0;
      out += rect(x, y, w, kRow - 5, plot_color(p.name), p.title);
      x += w;
    }
  }
  for (size_t i = 0; i < names.size(); ++i) {
    const double y = kRow * double(bars.size()) + kKey * double(i) + 6;
    out += rect(kLeft, y, 12, 12, plot_color(names[i]), names[i]) + text(kLeft + 18, y + 11, names[i]);
  }
  return out + "</svg>\n";
}

std::string span_plot(const std::vector<PlotSpan>& spans, double total, const std::string& label) {
  constexpr double kHeight = 60;
  std::string out = begin(kHeight, label);
  out += rect(0, 0, kWidth, kHeight, "#f3f3f3", label);
  for (const PlotSpan& s : spans)
    out +=
        rect(kWidth * s.begin / total, 4, kWidth * (s.end - s.begin) / total, kHeight - 8, plot_color(s.name), s.title);
  return out + "</svg>\n";
}

std::string heat_plot(const std::vector<PlotRow>& rows, const std::string& label) {
  constexpr double kRow = 14, kLeft = 90;
  double top = 0;
  size_t cols = 1;
  for (const PlotRow& r : rows) {
    cols = std::max(cols, r.values.size());
    for (double v : r.values) top = std::max(top, v);
  }
  const double cell = (kWidth - kLeft) / double(cols);
  std::string out = begin(kRow * double(rows.size()) + 2, label);
  for (size_t i = 0; i < rows.size(); ++i) {
    out += text(kLeft - 8, kRow * double(i) + 11, rows[i].name, "end");
    for (size_t c = 0; c < rows[i].values.size(); ++c) {
      const double v = rows[i].values[c];
      out += rect(kLeft + cell * double(c), kRow * double(i), cell, kRow - 1,
                  fmt::format("hsl(215,60%,{:.0f}%)", 97 - 67 * (top > 0 ? v / top : 0)),
                  fmt::format("{}, expert {}: {:.0f} tokens", rows[i].name, c, v));
    }
  }
  return out + "</svg>\n";
}

std::string roofline_plot(const std::vector<RooflinePoint>& points, double peak_gops, double gbs,
                          const std::string& label) {
  constexpr double kHeight = 320, kLeft = 60, kTop = 10, kBottom = 34;
  // From a hundredth of the ridge to a hundred times beyond it, and as far as the points go.
  const double ridge = peak_gops / gbs;
  double x_low = ridge / 100, x_high = ridge * 100, y_low = peak_gops / 1e4;
  double y_high = peak_gops * 2;
  for (const RooflinePoint& p : points) {
    if (!(p.ops_per_byte > 0) || !(p.gops > 0)) continue;
    x_low = std::min(x_low, p.ops_per_byte / 2);
    x_high = std::max(x_high, p.ops_per_byte * 2);
    y_low = std::min(y_low, p.gops / 2);
    y_high = std::max(y_high, p.gops * 2);
  }
  const auto x = [&](double v) {
    return kLeft + (kWidth - kLeft - 10) * std::log(v / x_low) / std::log(x_high / x_low);
  };
  const auto y = [&](double v) {
    return kTop + (kHeight - kTop - kBottom) * (1 - std::log(v / y_low) / std::log(y_high / y_low));
  };
  std::string out = begin(kHeight, label);
  for (double d = std::pow(10, std::ceil(std::log10(x_low))); d <= x_high; d *= 10) {
    out += fmt::format("<line x1=\"{0:.1f}\" y1=\"{1}\" x2=\"{0:.1f}\" y2=\"{2}\" stroke=\"#eee\"/>\n", x(d), kTop,
                       kHeight - kBottom);
    out += text(x(d), kHeight - kBottom + 14, fmt::format("{:.6g}", d), "middle");
  }
  for (double d = std::pow(10, std::ceil(std::log10(y_low))); d <= y_high; d *= 10) {
    out += fmt::format("<line x1=\"{0}\" y1=\"{1:.1f}\" x2=\"{2}\" y2=\"{1:.1f}\" stroke=\"#eee\"/>\n", kLeft, y(d),
                       kWidth);
    out += text(kLeft - 6, y(d) + 4, fmt::format("{:.6g}", d), "end");
  }
  const double slope_from = std::max(x_low, y_low / gbs);
  out += fmt::format(
      "<polyline points=\"{:.1f},{:.1f} {:.1f},{:.1f} {:.1f},{:.1f}\" fill=\"none\" stroke=\"#444\" "
      "stroke-width=\"2\"/>\n",
      x(slope_from), y(gbs * slope_from), x(ridge), y(peak_gops), x(x_high), y(peak_gops));
  out += text(kWidth - 12, kHeight - 4, "operations per byte of weights and KV; up: 1e9 operations per second", "end");
  for (const RooflinePoint& p : points) {
    if (!(p.ops_per_byte > 0) || !(p.gops > 0)) continue;
    out += fmt::format(
        "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{:.1f}\" fill=\"{}\" opacity=\".8\"><title>{}</title></circle>\n",
        x(p.ops_per_byte), y(p.gops), 3 + 11 * std::sqrt(p.weight), plot_color(p.name), escape(p.title));
    out += text(x(p.ops_per_byte) + 10, y(p.gops) - 6, p.name);
  }
  return out + "</svg>\n";
}

}  // namespace mi::tools
