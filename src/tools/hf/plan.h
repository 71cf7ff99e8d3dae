#pragma once
// A MIR as the tensors of a Hugging Face checkpoint: which name each weight has there, one tensor per expert where
// released checkpoints have that, and how packed tensors are put together again. Names come from the family's recipe
// and from what export noted about the source (model/origin.h); a weight without a name is an error, never left out.

#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "ir/mir_dir.h"
#include "model/recipe.h"
#include "model/view.h"

namespace mi::tools::hf {

// How quantized weights are stored.
enum class Form : uint8_t {
  kPlain,              // there are none; any is refused
  kCompressedTensors,  // int8: weight, weight_scale; int4: weight_packed, weight_scale, weight_shape
};

// What a tensor of the file holds of a weight.
enum class Content : uint8_t { kNumbers, kScales, kShape };

// A part of a weight of the MIR.
struct Piece {
  std::string weight;  // full name
  const ir::WeightDecl* decl = nullptr;
  int64_t expert = -1;             // index along the first dimension; -1: there is none
  int64_t first_row = 0;           // within the expert
  std::vector<model::ViewOp> ops;  // turn the file's tensor into the piece
  bool is_vector() const { return !decl->name.ends_with(".weight"); }
};

struct FileTensor {
  std::string name;
  DType dtype = DType::kBF16;
  Shape shape;
  Content content = Content::kNumbers;
  std::vector<Piece> pieces;  // one, unless they are packed (ops)
};

// A linear layer of the file: what quantization_config speaks of.
struct Module {
  std::string name;    // "model.layers.0.mlp.experts.3.up_proj"
  std::string family;  // the same with {layer} and {expert}
  int32_t layer = -1;
  ir::WeightFormat format = ir::WeightFormat::kFloat;
  int64_t group = 0;  // of int4
};

struct FilePlan {
  std::optional<model::Recipe> recipe;  // nullopt: exported with a recipe of the user's own
  std::vector<FileTensor> tensors;      // in the order of the files
  std::vector<Module> modules;
  bool tied = false;                 // the head reads the embedding and has no tensor
  bool static_scales = false;        // the MIR has scales of activations from calibration
  bool saturates = false;            // ... or numbers at which scales per token end
  std::vector<std::string> skipped;  // modules that export left out, as "re:" patterns
};

// dtype: of float weights; nullopt: as the MIR has them. Routers and their selection biases stay F32 where they are, as
// in releases: rounded, they would choose other experts. The plan points into m.graph.
Result<FilePlan> plan_files(const ir::MirDir& m, Form form, std::optional<DType> dtype);

// The shape of the file's tensor of which ops make `made`; nullopt: the ops do not tell (squeeze, reshape).
std::optional<Shape> shape_before(const std::vector<model::ViewOp>& ops, Shape made, bool is_vector);

}  // namespace mi::tools::hf
