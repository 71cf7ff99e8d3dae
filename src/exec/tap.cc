#include "exec/tap.h"

#include <algorithm>

#include "base/check.h"
#include "kernels/quantize/quantize.h"
#include "kernels/rows.h"

namespace mi::exec {

using artifact::Instr;
using artifact::Operand;

void TapRunner::set(const Tap* tap, const artifact::Manifest& m) {
  tap_ = tap;
  wants_.clear();
  if (!tap) return;
  for (const Instr& i : m.program) wants_.push_back({tap->want(i, true), tap->want(i, false), tap->replaces && tap->replaces(i)});
}

void TapRunner::replace(const Context& c, const Instr& i) {
  const Operand& o = i.out[0];
  MI_CHECK(o.type.elem == Elem::kF32, "only float results can be replaced");
  for (int64_t r = 0; r < c.rows(o); ++r)
    tap_->replace(i, r, {reinterpret_cast<float*>(c.at(o) + r * c.stride(o)), size_t(o.type.cols)});
}

void TapRunner::show(const Context& c, const Instr& i, size_t index, bool input) {
  TapEvent e;
  e.instr = &i;
  e.instr_index = int32_t(index);
  e.is_input = input;
  for (const Operand& o : input ? i.in : i.out)
    if (o.type.elem != Elem::kState) show_operand(c, o, e);
}

void TapRunner::show_operand(const Context& c, const Operand& o, TapEvent e) {
  e.operand = &o;
  e.rows = c.rows(o);
  e.cols = o.type.cols;
  values_.resize(size_t(e.rows * e.cols));
  for (int64_t r = 0; r < e.rows; ++r) {
    const std::byte* row = c.at(o) + r * c.stride(o);
    float* to = values_.data() + r * e.cols;
    const float* f = reinterpret_cast<const float*>(row);
    const int32_t* n = reinterpret_cast<const int32_t*>(row);
    switch (o.type.elem) {
      case Elem::kF32: std::copy_n(f, e.cols, to); break;
      case Elem::kI32: std::transform(n, n + e.cols, to, [](int32_t v) { return float(v); }); break;
      case Elem::kQ8: kernels::dequantize_row(row, e.cols, to); break;
      case Elem::kRoute:
        ids_.resize(size_t(e.rows * e.cols));
        std::copy_n(n, e.cols, ids_.data() + r * e.cols);
        std::copy_n(f + e.cols, e.cols, to);
        e.ids = ids_.data();
        break;
      case Elem::kState: break;
    }
  }
  e.values = values_.data();
  tap_->see(e);
}

}  // namespace mi::exec
