#include "artifact/layout.h"
#include "compiler/memory_plan.h"

namespace mi::compiler {

Status verify_memory_plan(const std::vector<artifact::Buffer>& buffers, int64_t arena_bytes_per_token) {
  for (size_t i = 0; i < buffers.size(); ++i) {
    const artifact::Buffer& a = buffers[i];
    const int64_t a_end = a.offset_per_token + a.row_stride * a.rows_per_token;
    if (a.offset_per_token < 0 || a.offset_per_token % artifact::kAlign != 0 || a.row_stride % artifact::kAlign != 0)
      return bad_input("memory plan: buffer '{}' is not aligned to {} bytes", a.name, artifact::kAlign);
    if (a_end > arena_bytes_per_token)
      return bad_input("memory plan: buffer '{}' ends at {}, the arena at {}", a.name, a_end, arena_bytes_per_token);
    for (size_t j = 0; j < i; ++j) {
      const artifact::Buffer& b = buffers[j];
      const bool alive_together = !(a.last_instr < b.first_instr || b.last_instr < a.first_instr);
      const bool disjoint =
          a_end <= b.offset_per_token || b.offset_per_token + b.row_stride * b.rows_per_token <= a.offset_per_token;
      if (alive_together && !disjoint)
        return bad_input("memory plan: buffers '{}' and '{}' are alive together and share bytes", b.name, a.name);
    }
  }
  return {};
}

}  // namespace mi::compiler
