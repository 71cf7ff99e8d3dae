#pragma once
// A graph to look at: Graphviz text, and a page on its own with one foldable part per block. Colours say in which
// precision an op's weights are; an op that a pass fused from several is marked.

#include <string>

#include "ir/graph.h"

namespace mi::compiler {

std::string graph_dot(const ir::Graph& g);
// HTML below a page's heading: parts of <details>, legend, sizes.
std::string graph_html(const ir::Graph& g);

}  // namespace mi::compiler
