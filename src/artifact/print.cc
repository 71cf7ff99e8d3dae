#include "artifact/print.h"

#include "tensor/op_fields.h"

namespace mi::artifact {
namespace {

std::string operand_text(const Manifest& m, const Operand& o) {
  if (o.type.elem == Elem::kState) return "state";
  if (o.buffer < 0 || size_t(o.buffer) >= m.buffers.size()) return fmt::format("?{}", o.buffer);
  const Buffer& b = m.buffers[size_t(o.buffer)];
  const bool whole = o.col == 0 && o.type.cols == b.type.cols;
  return whole ? b.name : fmt::format("{}[{}:{}]", b.name, o.col, o.col + o.type.cols);
}

std::string instr_text(const Manifest& m, const Instr& i) {
  std::string s = i.layer < 0 ? "" : fmt::format("layer {}: ", i.layer);
  s += op_name(i.op);
  std::string sep = " ";
  for (const Operand& o : i.in) s += std::exchange(sep, ", ") + operand_text(m, o);
  sep = " -> ";
  for (const Operand& o : i.out) s += std::exchange(sep, ", ") + operand_text(m, o);
  for (const InstrWeight& w : i.weights) {
    const bool known = w.tensor >= 0 && size_t(w.tensor) < m.weights.size();
    s += fmt::format("  {}={}", role_name(w.role),
                     known ? m.weights[size_t(w.tensor)].name : fmt::format("?{}", w.tensor));
  }
  if (const std::string p = params_text(i.params); !p.empty()) s += "  {" + p + "}";
  std::string notes;
  if (i.residual >= 0) notes += fmt::format("residual {}", i.residual);
  if (i.scratch >= 0) notes += std::string(notes.empty() ? "" : ", ") + "scratch";
  if (i.layer_output) notes += std::string(notes.empty() ? "" : ", ") + "layer output";
  return notes.empty() ? s : s + "  (" + notes + ")";
}

}  // namespace

std::string program_text(const Manifest& m) {
  std::string out;
  for (const Instr& i : m.program) out += instr_text(m, i) + "\n";
  return out;
}

}  // namespace mi::artifact
