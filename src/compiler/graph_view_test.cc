#include "compiler/graph_view.h"

#include <gtest/gtest.h>

#include "compiler/testing.h"
#include "ir/pipeline.h"

namespace mi::compiler {
namespace {

TEST(GraphView, NamesEveryOpOnce) {
  auto g = ir::parse(testing::tiny_mir("w8a8"));
  ASSERT_TRUE(g.ok()) << g.error().message();
  ASSERT_TRUE(ir::run_pipeline(*g, {}).ok());
  const std::string dot = graph_dot(*g), page = graph_html(*g);
  size_t ops = g->prologue.nodes.size() + g->epilogue.nodes.size(), boxes = 0, rows = 0;
  for (const ir::Block& b : g->blocks) ops += b.nodes.size();
  for (size_t at = 0; (at = dot.find("_n", at)) != std::string::npos; ++at)
    if (dot.compare(dot.find_first_not_of("0123456789", at + 2), 8, " [label=") == 0) ++boxes;
  for (size_t at = 0; (at = page.find("<tr style", at)) != std::string::npos; ++at) ++rows;
  EXPECT_EQ(boxes, ops);
  EXPECT_EQ(rows, ops);
  EXPECT_EQ(std::count(dot.begin(), dot.end(), '{'), std::count(dot.begin(), dot.end(), '}'));
  EXPECT_NE(page.find("experts in one kernel"), std::string::npos);
  EXPECT_NE(page.find("<summary>moe: layers 1-2"), std::string::npos);
}

TEST(GraphView, NamesFromOutsideAreEscaped) {
  ir::Graph g;
  g.info.name = "a\"b\\";
  g.prologue.name = "<script>";
  EXPECT_NE(graph_dot(g).find("digraph \"a\\\"b\\\\\" {"), std::string::npos) << graph_dot(g);
  EXPECT_EQ(graph_html(g).find("<script>"), std::string::npos);
}

}  // namespace
}  // namespace mi::compiler
