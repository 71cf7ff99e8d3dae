#pragma once
// Import of a checkpoint: a Hugging Face model directory (config.json, safetensors, tokenizer) becomes a MIR directory.
// A model family is a recipe in a data file (families/*.yaml, schema in recipe.h): which config keys mean what, which
// blocks a layer has, which tensors of the checkpoint they read. The graph is plain and unfused; passes of `build` fuse
// it. Quantized checkpoints (quant_scheme.h, formats/) are dequantized, but for int8 with int8 activations.
//
// Everything is accounted for: a tensor that is missing, left over, of another shape, or holds NaN or infinity is an
// error that names it; what is skipped on purpose (vision, multi-token prediction) is counted. Memory stays bounded:
// weights are mapped and streamed. The output appears whole or not at all (OutputDir).

#include <string>
#include <utility>
#include <vector>

#include "base/file.h"
#include "base/result.h"
#include "ir/graph.h"

namespace mi::model {

struct ExportOptions {
  Path model_dir;  // checkpoint folder, or a GGUF file (or a folder with one and no config.json); with dummy_weights
                   // only its config.json is read (or the path of that file)
  Path output;     // new MIR directory; empty: everything is checked and explained, nothing is written
  std::string model_type;      // "" = config.json's; hyphens and underscores are equal
  std::string name;            // served name; "" = the folder's name
  Path family_file;            // a recipe to use instead of the built-in ones
  bool force = false;          // replace an existing output
  bool explain = false;        // fill ExportReport::explain
  bool tie = false;            // allow a missing lm_head.weight although the config says untied: use the embedding
  bool dummy_weights = false;  // seeded random weights instead of a checkpoint's
  uint64_t seed = 0;           // of dummy_weights
};

// Tensors of one kind ("expert", "attention") that were stored quantized and are float now.
struct Dequantized {
  std::string kind, format;
  DType dtype = DType::kF32;  // the narrowest that holds every number exactly
  int64_t tensors = 0;        // of the checkpoint
};

struct ExportReport {
  ir::Graph graph;
  ir::ModelInfo info;  // the graph's
  std::string family;
  int64_t source_tensors = 0;  // in the checkpoint
  int64_t used_tensors = 0;
  std::vector<std::pair<std::string, int64_t>> skipped;  // reason -> tensors
  std::vector<Dequantized> dequantized;
  int64_t parameters = 0;  // numbers written (scales and constants apart)
  uint64_t bytes = 0;      // of weights written
  double seconds = 0;
  bool has_tokenizer = false, has_chat_template = false;
  std::vector<std::string> notes;  // for the user; warnings begin with "warning: "
  std::string explain;             // config values with their sources, every tensor mapping
};

Result<ExportReport> export_model(const ExportOptions& o);

// The report as lines for a terminal.
std::string report_text(const ExportReport& r);

// Names of the built-in families, sorted, and every model_type that they accept.
std::vector<std::string> known_families();
std::vector<std::string> known_model_types();

}  // namespace mi::model
