#pragma once
// Everything that must hold before a manifest is believed. The executor runs a validated manifest without checks, so a
// rule that it relies on belongs here:
//   versions; sizes positive, bounded and free of overflow; segments partition weights.bin; tensors aligned, inside one
//   segment, with the padded sizes that layout.h gives; the arena plan free of overlap between buffers alive at the
//   same time; every operand inside its buffer, defined before use and alive; per op the number, element kinds and
//   sizes of operands and weights and sane parameters; one cache per layer, equal to what its appends write; layers in
//   order; logits last.

#include "artifact/types.h"
#include "base/result.h"

namespace mi::artifact {

constexpr int64_t kMaxDim = int64_t(1) << 31;  // rows or columns of a matrix, columns of a value
constexpr int64_t kMaxExperts = 1 << 20;

// weights_bin_bytes: the size of the file beside the manifest. Errors are one sentence that names the entry, without
// the file's path.
Status validate(const Manifest& m, int64_t weights_bin_bytes);

// Parts of it, and what they share.
template <typename... Args>
Status refuse(fmt::format_string<Args...> f, Args&&... args) {
  return bad_input(f, std::forward<Args>(args)...);
}
Status validate_weights(const Manifest& m, int64_t weights_bin_bytes);
Status validate_buffers(const Manifest& m);
Status validate_program(const Manifest& m);

}  // namespace mi::artifact
