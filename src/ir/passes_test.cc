// Graph in, pass, graph out: the cases of tests/graphs (its README.md tells their form).

#include <filesystem>

#include "ir/pipeline.h"
#include "ir/testing.h"

namespace mi::ir {
namespace {

using testing::graph_text;
using testing::legal_graph;
using testing::model_text;

const Pass* find_pass(const std::string& name) {
  for (const Pass& p : passes())
    if (p.name == name) return &p;
  return nullptr;
}

std::vector<std::string> cases() {
  std::vector<std::string> r;
  for (const auto& e : std::filesystem::directory_iterator(Path(MI_SOURCE_DIR) / "tests" / "graphs"))
    if (e.path().extension() == ".mir" && graph_text(e.path().filename()).find("\n=== ") != std::string::npos)
      r.push_back(e.path().stem());
  std::sort(r.begin(), r.end());
  return r;
}

class PassCase : public ::testing::TestWithParam<std::string> {};

TEST_P(PassCase, GivesTheExpectedGraph) {
  const std::string text = graph_text(GetParam() + ".mir");
  const size_t bar = text.find("\n=== ");
  const size_t line_end = text.find('\n', bar + 1);
  std::string pass_name = text.substr(bar + 5, line_end - bar - 5);
  const std::string unchanged = "unchanged by ";
  const bool changes = !pass_name.starts_with(unchanged);
  if (!changes) pass_name = pass_name.substr(unchanged.size());
  const Pass* pass = find_pass(pass_name);
  ASSERT_NE(pass, nullptr) << pass_name;

  Graph g = legal_graph(model_text(text.substr(0, bar)));
  const Graph expected = changes ? legal_graph(model_text(text.substr(line_end))) : g;
  EXPECT_EQ(pass->run(g.blocks.at(0), {}), changes);
  const auto s = verify(g);
  EXPECT_TRUE(s.ok()) << s.error().message();
  EXPECT_EQ(print(g), print(expected));
  EXPECT_TRUE(g == expected);
  EXPECT_FALSE(pass->run(g.blocks.at(0), {})) << "a second run finds more to do";
}

INSTANTIATE_TEST_SUITE_P(Graphs, PassCase, ::testing::ValuesIn(cases()), [](const auto& info) { return info.param; });

TEST(Passes, EachHasACaseAndACounterexample) {
  for (const Pass& p : passes()) {
    if (!p.run) continue;
    bool changed = false, unchanged = false;
    for (const std::string& c : cases()) {
      const std::string text = graph_text(c + ".mir");
      changed = changed || text.find("\n=== " + std::string(p.name) + "\n") != text.npos;
      unchanged = unchanged || text.find("\n=== unchanged by " + std::string(p.name) + "\n") != text.npos;
    }
    EXPECT_TRUE(changed) << p.name;
    EXPECT_TRUE(unchanged) << p.name;
  }
}

}  // namespace
}  // namespace mi::ir
