#include <fmt/format.h>

#include "base/html.h"
#include "base/json.h"
#include "cli/command.h"
#include "compiler/graph_view.h"
#include "hw/memory.h"
#include "ir/text.h"
#include "tools/inspect/card.h"
#include "tools/inspect/model_diff.h"

namespace mi::cli {
namespace {

struct Flags {
  std::vector<std::string> dirs;
  std::string html;
  bool graph = false, dot = false, json = false, diff = false, force = false;
};

Result<int> run(const Flags& f) {
  if (f.dirs.size() != (f.diff ? 2u : 1u))
    return fail(ErrorCode::kUsage, "{}", f.diff ? "--diff takes two directories, A and B" : "give one directory; two are compared with --diff");
  MI_TRY(const tools::Subject s, tools::open_subject(f.dirs[0]));
  const int64_t available = hw::available_memory("/");
  if (f.diff) {
    MI_TRY(const tools::Subject other, tools::open_subject(f.dirs[1]));
    const tools::ModelDiff c = tools::diff_models(s, other, available);
    fmt::print("{}", f.json ? dump_json(tools::model_diff_json(c), 1) + "\n" : tools::model_diff_text(c));
    return c.same() ? 0 : 1;
  }
  if (f.dot) {
    fmt::print("{}", compiler::graph_dot(s.graph));
    return 0;
  }
  const tools::Card card = tools::make_card(s, available);
  if (!f.html.empty())
    MI_TRY_VOID(write_output(f.html, f.force,
                             html::page(s.graph.info.name + ": " + s.kind, tools::card_html(card) + "<h2>Graph</h2>\n" +
                                                                               compiler::graph_html(s.graph))));
  fmt::print("{}", f.json ? dump_json(tools::card_json(card), 1) + "\n" : tools::card_text(card));
  if (f.graph) fmt::print("\n{}", ir::print(s.graph));
  return 0;
}

}  // namespace

Command add_inspect(CLI::App& parent) {
  auto f = std::make_shared<Flags>();
  CLI::App* app = parent.add_subcommand("inspect", "show what a checkpoint, a MIR or an engine holds, or how two differ");
  app->add_option("dir", f->dirs, "checkpoint, MIR or engine directory, or a GGUF file; two with --diff")->required()->expected(1, 2);
  app->add_flag("--diff", f->diff, "compare two: facts, ops, weights; exit code 1 where they differ");
  app->add_flag("--graph", f->graph, "print the graph too");
  app->add_flag("--dot", f->dot, "print the graph for Graphviz instead");
  app->add_option("--html", f->html, "write a page: facts, weights, the graph with foldable layers and colours by precision");
  app->add_flag("--force", f->force, "replace an existing page");
  app->add_flag("--json", f->json, "print as JSON");
  app->footer(
      "Examples:\n  metainfer inspect models/mini-m3\n  metainfer inspect mini-m3-engine --html mini-m3.html\n"
      "  metainfer inspect --diff mini-m3-mir mini-m3-w8a8\n  metainfer inspect mini-m3-engine --dot | dot -Tsvg -o mini-m3.svg");
  return {app, [f]() { return run(*f); }};
}

}  // namespace mi::cli
