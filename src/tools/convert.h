#pragma once
// A MIR as a GGUF file, so that llama.cpp and ik_llama.cpp run the very same weights. Matrices get the chosen type;
// norms, routers, biases and everything of one dimension stay F32; the experts of a layer are one tensor of three
// dimensions. Int8 weights (W8A8) are widened (q * scale) first, except to Q8_0, where their integers stay and the
// row's scale, as fp16, is that of its blocks. Int4 weights (W4A8) keep their integers in Q4_0 and Q8_0. Memory stays bounded: weights are mapped and streamed. The file appears
// whole or not at all.

#include <string>
#include <vector>

#include "base/file.h"
#include "base/json.h"
#include "base/result.h"
#include "hw/thread_pool.h"
#include "model/gguf_writer.h"
#include "tools/gguf/vocab.h"

namespace mi::tools {

struct ConvertOptions {
  Path model;   // MIR directory
  Path output;  // new file
  model::GgufType type = model::GgufType::kQ8_0;
  bool force = false;
  gguf::VocabOptions vocab;
};

struct ConvertReport {
  std::string format = "gguf";  // as --to has it
  std::string name, arch;       // arch: of GGUF general.architecture, else model_type
  int64_t tensors = 0;
  uint64_t bytes = 0;  // of the file; of a folder, of its tensors
  std::vector<std::pair<std::string, int64_t>> types;  // "Q8_0" -> tensors
  std::vector<std::string> notes;
  double seconds = 0;
};

Result<ConvertReport> convert_to_gguf(const ConvertOptions& o, hw::ThreadPool& pool);
std::string report_text(const ConvertReport& r);
Json report_json(const ConvertReport& r);

}  // namespace mi::tools
