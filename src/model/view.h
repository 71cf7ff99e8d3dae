#pragma once
// A tensor of a checkpoint seen through strides: how recipes turn one layout into another without copying. Operations
// of a recipe's `ops` list, applied in order ("rows" are the second last dimension of a matrix, the last of a bias):
//   transpose                 the last two dimensions change places
//   {orient: [N, K]}          as transpose where the matrix is [K, N], nothing where it is [N, K]; refused when N = K:
//                             the shape cannot tell which it is
//   {half: 0|1}               the first or second half of the rows
//   {every: [step, start]}    rows start, start + step, ...
//   {rows: [start, count]}    a range of rows
//   {reshape: [...]}          of a contiguous tensor
//   squeeze                   dimensions of 1 go
// Numbers are integers or expressions of config values.

#include <array>
#include <string>
#include <vector>

#include "model/config.h"
#include "tensor/tensor_view.h"

namespace mi::model {

struct StridedView {
  const std::byte* data = nullptr;
  DType dtype = DType::kF32;
  std::vector<int64_t> dim, stride;  // stride in elements
  int64_t count() const;
  bool contiguous() const;
};
StridedView view_of(const TensorView& t);

struct ViewOp {
  enum class Kind : uint8_t { kTranspose, kOrient, kHalf, kEvery, kRows, kReshape, kSqueeze } kind;
  std::vector<int64_t> args;
};
// c evaluates expressions; nullptr: the numbers are resolved already.
Result<std::vector<ViewOp>> parse_view_ops(const Json& ops, Config* c, const std::string& what);
Json ops_json(const std::vector<ViewOp>& ops);  // as parse_view_ops reads it, numbers resolved
// "transpose, half 0"; "" for none.
std::string ops_text(const std::vector<ViewOp>& ops);

// is_vector: the rows are the last dimension (biases). A view without data gives the shape alone. The error says what
// does not fit, without the tensor's name.
Result<StridedView> apply(const std::vector<ViewOp>& ops, StridedView v, bool is_vector);

// Elements [begin, begin + n) of the view in row-major order, to out.
void gather(const StridedView& v, int64_t begin, int64_t n, std::byte* out);

}  // namespace mi::model
