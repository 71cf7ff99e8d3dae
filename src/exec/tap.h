#pragma once
// Shows operands to a Tap: rows widened to float, contiguous. Costs nothing when no tap is set.

#include <vector>

#include "exec/context.h"

namespace mi::exec {

class TapRunner {
 public:
  // Asks want() for every instruction and side, once.
  void set(const Tap* tap, const artifact::Manifest& m);
  void before(const Context& c, const artifact::Instr& i, size_t index) {
    if (tap_ && wants_[index].inputs) show(c, i, index, true);
  }
  void after(const Context& c, const artifact::Instr& i, size_t index) {
    if (!tap_) return;
    if (wants_[index].replaced) replace(c, i);
    if (wants_[index].outputs) show(c, i, index, false);
  }

 private:
  struct Want { bool inputs = false, outputs = false, replaced = false; };
  void replace(const Context& c, const artifact::Instr& i);
  void show(const Context& c, const artifact::Instr& i, size_t index, bool input);
  void show_operand(const Context& c, const artifact::Operand& o, TapEvent e);

  const Tap* tap_ = nullptr;
  std::vector<Want> wants_;
  std::vector<float> values_;
  std::vector<int32_t> ids_;
};

}  // namespace mi::exec
