#pragma once
// Plots as inline SVG for the pages that tools write (base/html.h). Values in tooltips (<title>), so that no script is
// needed.

#include <string>
#include <vector>

namespace mi::tools {

// A colour per name: the same name has the same colour in every plot.
std::string plot_color(const std::string& name);

struct PlotLine {
  std::string name;
  struct Point {
    double x = 0, y = 0, low = 0, high = 0;  // the band from low to high is drawn behind the line
    std::string title;
  };
  std::vector<Point> points;  // ascending x
};
// x from 0 to x_max in equal steps; y from zero to above the largest value.
std::string line_plot(const std::vector<PlotLine>& lines, double x_max, const std::string& label);

struct PlotBar {
  std::string name, text, title;  // left of, right of the bar; tooltip
  double value = 0;
};
std::string bar_plot(const std::vector<PlotBar>& bars, const std::string& label);

// Bars of parts behind each other, all in one scale, with a key of the parts below.
struct PlotStack {
  struct Part {
    std::string name, title;
    double value = 0;
  };
  std::string name;
  std::vector<Part> parts;
};
std::string stack_plot(const std::vector<PlotStack>& bars, const std::string& label);

// A block on a time axis.
struct PlotSpan {
  std::string name, title;
  double begin = 0, end = 0;
};
std::string span_plot(const std::vector<PlotSpan>& spans, double total, const std::string& label);

// Rows of values from white (0) to dark (the largest of all).
struct PlotRow {
  std::string name;
  std::vector<double> values;
};
std::string heat_plot(const std::vector<PlotRow>& rows, const std::string& label);

// Operations per byte against operations per second on logarithmic axes, under the roof min(peak, bandwidth * x).
struct RooflinePoint {
  std::string name, title;
  double ops_per_byte = 0, gops = 0, weight = 0;  // weight 0 to 1: size of the mark
};
std::string roofline_plot(const std::vector<RooflinePoint>& points, double peak_gops, double gbs,
                          const std::string& label);

}  // namespace mi::tools
