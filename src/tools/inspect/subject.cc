#include "tools/inspect/subject.h"

#include "ir/text.h"
#include "ir/verify.h"
#include "model/export.h"

namespace mi::tools {

Result<Subject> open_subject(const Path& dir) {
  Subject s;
  s.dir = dir;
  if (std::filesystem::exists(dir / "engine.json")) {
    s.kind = "engine";
    MI_TRY(s.engine, artifact::open_artifact(dir));
    const Path file = dir / "graph.mir";
    MI_TRY(const std::string text, read_file(file));
    auto graph = ir::parse(text);
    if (!graph.ok()) return graph.error().with_context(file.string());
    s.graph = std::move(*graph);
    if (auto legal = ir::verify(s.graph); !legal.ok()) return legal.error().with_context(file.string());
    return s;
  }
  if (std::filesystem::exists(dir / "model.mir")) {
    s.kind = "MIR";
    MI_TRY(s.mir, ir::MirDir::open(dir));
    s.graph = s.mir->graph;
    return s;
  }
  if (std::filesystem::exists(dir / "config.json") || dir.extension() == ".gguf") {
    s.kind = "checkpoint";
    model::ExportOptions o;
    o.model_dir = dir;
    MI_TRY(model::ExportReport r, model::export_model(o));
    s.graph = std::move(r.graph);
    s.notes = std::move(r.notes);
    for (const auto& [why, n] : r.skipped) s.notes.push_back(fmt::format("{} tensors are not used: {}", n, why));
    for (const auto& d : r.dequantized)
      s.notes.push_back(fmt::format("{} {} tensor{} stored as {}, read as {}", d.tensors, d.kind,
                                    d.tensors == 1 ? " is" : "s are", d.format, dtype_name(d.dtype)));
    return s;
  }
  return bad_input(
      "{}: holds neither engine.json (of metainfer build), model.mir (export, quantize) nor config.json (a checkpoint), "
      "and is no .gguf file",
      dir.string());
}

}  // namespace mi::tools
