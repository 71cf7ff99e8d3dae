#pragma once
// A MIR as the architecture that llama.cpp and its relatives have for its family: which keys describe it, what its
// tensors are called there, and how they are laid out. An architecture's graph is fixed in those programs, so every
// property of our graph is compared with what that graph computes; one that differs is an error that names it, never a
// file that answers differently. Checked against ggml-org/llama.cpp, src/models, as of ggml 0.25.3.

#include <string>
#include <vector>

#include "base/result.h"
#include "ir/mir_dir.h"
#include "model/gguf_writer.h"

namespace mi::tools::gguf {

struct FileTensor {
  std::string name;  // in the file: "blk.0.attn_q.weight"
  Shape shape;
  std::string weight;  // in the MIR: "layers.0.attn.q.weight"; "" = the numbers below
  ir::WeightFormat format = ir::WeightFormat::kFloat;  // in the MIR
  int64_t group = 0;                                   // of kW4A8
  std::vector<float> numbers;
  bool keep_f32 = false;  // norms, routers, biases
  // > 0: rotated in halves here and in neighbouring pairs there. Within each of so many equal groups of rows (heads) of
  // 2n, row 2j + t of the file is row t n + j of the MIR.
  int64_t pair_heads = 0;
  bool add_one = false;  // norms that multiply by 1 + w here and by w there
};

struct FilePlan {
  std::string arch;                 // general.architecture
  std::vector<FileTensor> tensors;  // in the order of the file
  model::GgufKeys keys;             // those named "<arch>.*"
  std::vector<std::string> notes;
};

Result<FilePlan> plan_file(const ir::MirDir& m);

// Families that have an architecture there, sorted.
std::vector<std::string> known_families();

// The base of rope frequencies f[i] = base^(-2i / (2 n)) / factor, n = f.size(). False when no base gives them.
bool fit_rope(const std::vector<float>& f, double* base, double* factor);

}  // namespace mi::tools::gguf
