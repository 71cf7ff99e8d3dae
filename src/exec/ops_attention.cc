// Instructions on the layer's cache.

#include "exec/context.h"

namespace mi::exec {

using artifact::Instr;
using artifact::Operand;

void run_kv_append(Context& c, const Instr& i, const kernels::RopeTable* table) {
  const Operand &k = i.in[0], &v = i.in[1];
  kernels::KvAppendArgs a{&c.caches[size_t(i.layer)], &c.kv_step, c.floats(k), c.stride(k), c.floats(v), c.stride(v)};
  a.rope_table = table;
  a.rope = std::get<KvAppendParams>(i.params).rope();
  a.positions = c.positions.data();
  kernels::kv_append_run(a, *c.pool, c.cpu);
}

void run_attention(Context& c, const Instr& i) {
  const AttentionParams& p = std::get<AttentionParams>(i.params);
  const Operand &q = i.in[0], &o = i.out[0];
  kernels::AttentionArgs a;
  a.cache = &c.caches[size_t(i.layer)];
  a.step = &c.kv_step;
  a.order = c.attention_order;
  a.q = c.floats(q);
  a.q_stride = c.stride(q);
  a.sinks = c.vector(i, Role::kSinks);
  if (i.in.size() > 2) {
    const Operand& s = i.in[2];
    a.selection = reinterpret_cast<const int32_t*>(c.at(s));
    a.selection_stride = c.stride(s);
    a.topk = s.type.cols / p.kv_heads;
  }
  a.o = c.floats(o);
  a.o_stride = c.stride(o);
  kernels::attention_run(p, a, c.attention, *c.pool, c.cpu);
}

void run_index_append(Context& c, const Instr& i) {
  const Operand& x = i.in[0];
  kernels::index_append_run(c.caches[size_t(i.layer)], c.kv_step, c.floats(x), c.stride(x), *c.pool);
}

void run_index_select(Context& c, const Instr& i) {
  const Operand &q = i.in[0], &s = i.out[0];
  kernels::index_select_run(std::get<IndexSelectParams>(i.params),
                            {&c.caches[size_t(i.layer)], &c.kv_step, c.floats(q), c.stride(q), reinterpret_cast<int32_t*>(c.at(s)), c.stride(s)},
                            c.attention, *c.pool, c.cpu);
}

}  // namespace mi::exec
