#pragma once
// A weight that a checkpoint stores quantized: its tensors found and their shapes checked (find_stored), its scales
// read and checked (open_stored), and then its numbers in float, any rows at a time. Only the scales are held in
// memory.

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "model/checkpoint.h"
#include "model/formats/awq.h"
#include "model/formats/format.h"
#include "model/formats/fp4.h"
#include "model/formats/gguf_blocks.h"
#include "model/formats/gptq.h"
#include "model/formats/packed_int.h"
#include "model/formats/scaled_codes.h"

namespace mi::model::formats {

// The name that the weight has in a float checkpoint: "X.weight" for X.weight_packed and X.qweight, "X" for X_blocks,
// else the tensor's own.
std::string weight_name(const std::string& tensor);
// "X" of that name; the module that quantization_config speaks of.
std::string module_name(const std::string& tensor);
// The tensor holds codes or packed numbers, not plain floats.
bool is_quantized(const Checkpoint::Tensor& t);

struct Stored {
  Format format;
  Shape shape;  // [out, in], or [experts, out, in]; of the weight, however it is packed
  const Checkpoint::Tensor* main = nullptr;
  const Checkpoint::Tensor* scale = nullptr;
  const Checkpoint::Tensor* zero = nullptr;         // nullptr: symmetric
  const Checkpoint::Tensor* group_index = nullptr;  // nullptr: consecutive inputs
  const Checkpoint::Tensor* global = nullptr;       // the matrix's own factor
  std::vector<const Checkpoint::Tensor*> tensors;   // all of the above, and scales of activations
  int64_t rows() const;                             // of all experts
  int64_t cols() const { return shape.back(); }
};

// t: the main tensor, with a gguf_type the only one. Errors name the tensor that is missing or does not fit.
Result<Stored> find_stored(const Checkpoint& k, const Checkpoint::Tensor& t, const Format& f);

class Opened {
 public:
  // Rows [first, first + n) of all rows, in float: what the format's header says, exactly.
  void rows(int64_t first, int64_t n, float* out) const;
  // Every scale is a power of two far from the ends of float's range: with codes of 8 bits at most, every number is a
  // BF16 then.
  bool has_plain_scales() const;

 private:
  friend Result<std::unique_ptr<Opened>> open_stored(const Stored&);
  std::vector<float> scale_, zero_;
  std::vector<int32_t> group_of_;
  std::variant<ScaledCodes, PackedInt, Fp4, Gptq, Awq, GgufRows> matrix_;
};
// Errors name the scale or index that cannot be one. The checkpoint outlives the result.
Result<std::unique_ptr<Opened>> open_stored(const Stored& s);

// The scales of a tensor in float; E8M0 where it holds bytes. NaN and infinity are errors.
Result<std::vector<float>> read_scales(const Checkpoint::Tensor& t);

// The narrowest of BF16, F16 and F32 that holds every number of the matrix, and every number of type `also`.
DType exact_dtype(const Opened& m, int64_t rows, int64_t cols, std::optional<DType> also = std::nullopt);

}  // namespace mi::model::formats
