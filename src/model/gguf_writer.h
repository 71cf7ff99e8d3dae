#pragma once
// Writing GGUF version 3: keys, tensor infos, then the tensors' bytes, streamed in the declared order. Little-endian,
// alignment 32. What a model's keys and tensor names have to be is not known here (tools/gguf).

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "base/result.h"
#include "tensor/tensor_view.h"

namespace mi::model {

// The values are ggml's. kQ8_0: blocks of 32 along a row, each an fp16 scale d and 32 int8 q: value = d * q. kQ4_0: blocks
// of 32, each an fp16 scale d and 16 bytes; byte j has number j in its low half, j + 16 in its high half: value =
// d * (half - 8).
enum class GgufType : uint32_t { kF32 = 0, kF16 = 1, kQ4_0 = 2, kQ8_0 = 8, kBF16 = 30 };
std::string_view gguf_type_name(GgufType t);  // "F32", "Q8_0", ...

constexpr int64_t kGgufBlock = 32;
constexpr size_t kQ8BlockBytes = 34, kQ4BlockBytes = 18;
constexpr bool in_blocks(GgufType t) { return t == GgufType::kQ8_0 || t == GgufType::kQ4_0; }
// Bytes of a row. Precondition where the type is in blocks: cols is a multiple of kGgufBlock.
size_t gguf_row_bytes(GgufType t, int64_t cols);

// The key-value part of the header, in the order of the calls. A key is given once (MI_CHECK).
class GgufKeys {
 public:
  void put(std::string_view key, uint32_t v);
  void put(std::string_view key, float v);
  void put(std::string_view key, bool v);
  void put(std::string_view key, std::string_view v);
  void put(std::string_view key, const char* v) { put(key, std::string_view(v)); }
  void put(std::string_view key, const std::vector<std::string>& v);
  void put(std::string_view key, const std::vector<int32_t>& v);
  void append(const GgufKeys& others);
  uint64_t count() const { return names_.size(); }
  const std::string& bytes() const { return bytes_; }

 private:
  void begin(std::string_view key, uint32_t type);
  std::string bytes_;
  std::vector<std::string> names_;
};

struct GgufTensor {
  std::string name;
  GgufType type = GgufType::kF32;
  Shape shape;  // outermost first, as everywhere here; the file has them innermost first. At most 4 dimensions
  uint64_t bytes() const;
};

// Bytes of the whole file.
uint64_t gguf_file_bytes(const GgufKeys& keys, const std::vector<GgufTensor>& tensors);

class GgufWriter {
 public:
  // Writes the header. `out` outlives the writer and is finished by its owner. Preconditions: out is empty; names
  // differ.
  static Result<GgufWriter> begin(FileWriter* out, const GgufKeys& keys, std::vector<GgufTensor> tensors);
  const std::vector<GgufTensor>& tensors() const { return tensors_; }
  // The next bytes of the tensor that is being written; it may not cross into the next tensor (MI_CHECK).
  Status write(std::span<const std::byte> bytes);
  void finish() const;  // MI_CHECK: everything was written

 private:
  GgufWriter(FileWriter* out, std::vector<GgufTensor> tensors) : out_(out), tensors_(std::move(tensors)) {}
  FileWriter* out_;
  std::vector<GgufTensor> tensors_;
  size_t current_ = 0;
  uint64_t written_ = 0;  // of the current tensor
};

// Rounds n floats (n a multiple of kGgufBlock) to Q8_0 as ggml's reference does: d = max|x| / 127, q = x * (1 / d)
// rounded to nearest, halves away from zero; d itself is then stored as fp16. False when a scale is too large for fp16
// or not finite.
[[nodiscard]] bool round_q8_0(const float* x, int64_t n, std::byte* out);
// Values that are scale * q already: q stays, only the scale is rounded to fp16. False as above.
[[nodiscard]] bool pack_q8_0(const int8_t* q, float scale, int64_t n, std::byte* out);
// The same for Q4_0. d = (the first x with max|x|) / -8, halves = x * (1 / d) + 8.5 cut off, at most 15, product and sum
// rounded each, as the gguf package does it; of ggml's reference a compiler may make one fused operation. q are within [-8, 7].
[[nodiscard]] bool round_q4_0(const float* x, int64_t n, std::byte* out);
[[nodiscard]] bool pack_q4_0(const int8_t* q, float scale, int64_t n, std::byte* out);

}  // namespace mi::model
