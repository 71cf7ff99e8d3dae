#pragma once
// A file with options of `build`:
//
//   build:
//     opt_level: O2
//     precision: bf16
//     disable_passes: [fuse_qkv]
//     strict: true
//     allow_fallback: ["mlp.*"]
//     fusion:
//       ignore: ["layers.0.attn.q.weight", "re:layers\\.[12]\\.mlp\\."]   # weights and results that no pass touches
//       same_precision_only: true
//       debug_shapes: false
//     expert_groups:                                  # which experts the grouped kernel computes together
//       - {layers: [1, 2], size: 8}
//       - {layers: [3], members: [[0, 2], [1, 3]]}
//
// Every key may be absent; one that is not known is refused by name.

#include <string_view>

#include "base/file.h"
#include "compiler/build.h"
#include "ir/graph.h"

namespace mi::tools {

// Sets what the file has, leaves the rest. g: the model's graph, whose names `fusion.ignore` is about; an entry that
// matches none is refused. A name matches as it is, or up to a '.'; a re: pattern from the name's start.
Status apply_build_config(std::string_view yaml, const std::string& what, const ir::Graph& g, compiler::BuildOptions* o);
Status load_build_config(const Path& file, const ir::Graph& g, compiler::BuildOptions* o);

}  // namespace mi::tools
