#pragma once
// For tests of this room and of those that use graphs: reading tests/graphs, small models around one block.

#include <gtest/gtest.h>

#include <string>

#include "base/file.h"
#include "ir/graph.h"
#include "ir/text.h"
#include "ir/verify.h"

namespace mi::ir::testing {

inline std::string graph_text(const std::string& name) {
  auto r = read_file(Path(MI_SOURCE_DIR) / "tests" / "graphs" / name);
  EXPECT_TRUE(r.ok()) << (r.ok() ? "" : r.error().message());
  return r.ok() ? *r : "";
}

// A whole model, or one that has `text` (its blocks) between a prologue and an epilogue of hidden size 8.
inline std::string model_text(const std::string& text, int layers = 1) {
  if (text.find("mir 1\n") != text.npos) return text;
  return "mir 1 model \"t\" { family=\"t\" model_type=\"t\" vocab=32 hidden=8 layers=" + std::to_string(layers) +
         " max_positions=64 eos_ids=[] bos_id=-1 pad_id=-1 }\n"
         "prologue { weight embed.weight : bf16 [32, 8] embedding  x = embed weight=embed.weight : f32[T, 8]  output x "
         "}\n" +
         text +
         "\nepilogue { input x : f32[T, 8]  weight head.weight : bf16 [32, 8] head\n"
         "  xs = select_rows x : f32[L, 8]  logits = linear xs, weight=head.weight : f32[L, 32]  output logits }\n";
}

// Parses and verifies; a failed test and an empty graph otherwise.
inline Graph legal_graph(const std::string& text) {
  auto g = parse(text);
  if (!g.ok()) {
    ADD_FAILURE() << g.error().message() << "\n" << text;
    return {};
  }
  const auto s = verify(*g);
  EXPECT_TRUE(s.ok()) << (s.ok() ? "" : s.error().message());
  return std::move(g).value();
}

}  // namespace mi::ir::testing
