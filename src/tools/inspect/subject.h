#pragma once
// What `inspect` looks at: a checkpoint, a MIR directory or an engine, each read as far as its graph. Weights are not
// read; of a MIR and an engine they are mapped, so that they can be compared.

#include <optional>
#include <string>
#include <vector>

#include "artifact/reader.h"
#include "base/file.h"
#include "base/result.h"
#include "ir/mir_dir.h"

namespace mi::tools {

struct Subject {
  std::string kind;  // "checkpoint", "MIR", "engine"
  Path dir;
  ir::Graph graph;                 // of an engine: after the passes
  std::optional<ir::MirDir> mir;
  std::optional<artifact::LoadedArtifact> engine;
  std::vector<std::string> notes;  // of the import of a checkpoint
};

// dir: a folder with engine.json, model.mir or config.json, or a GGUF file. Errors (kBadInput) say what was looked for.
Result<Subject> open_subject(const Path& dir);

}  // namespace mi::tools
