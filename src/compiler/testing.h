#pragma once
// For tests: small models as MIR text, and MIR directories with seeded noise for weights.

#include <fmt/format.h>

#include <fstream>
#include <functional>

#include "base/file.h"
#include "base/util.h"
#include "ir/mir_dir.h"
#include "ir/text.h"
#include "tensor/int4.h"

namespace mi::compiler::testing {

// A dense layer and two MoE layers. matrices: "bf16", "f32", "w8a8" or "w4a8_g32" for everything but router and head; quantized
// graphs have their quantize nodes, so that they are legal as they stand.
inline std::string tiny_mir(const std::string& matrices) {
  const bool q = matrices.starts_with("w");
  const std::string f = q ? "bf16" : matrices;
  auto quantized = [&](const std::string& from, const std::string& to, const std::string& type) {
    return q ? fmt::format("  {} = quantize {} : q8[{}]\n", to, from, type) : std::string();
  };
  auto in = [&](const std::string& plain, const std::string& quant) { return q ? quant : plain; };
  std::string s = fmt::format(R"(mir 1
model "tiny" {{
  family = "test"  model_type = "test"  vocab = 50  hidden = 24  layers = 3  max_positions = 128  eos_ids = [2]  bos_id = 1  pad_id = -1
}}
prologue {{
  weight embed.weight : {f}[50, 24] embedding
  x = embed weight=embed.weight : f32[T, 24]
  output x
}}
)",
                              fmt::arg("f", f));
  auto attention = [&] {
    return fmt::format(R"(  input x : f32[T, 24]
  weight attn.norm.weight : {f}[24] norm
  weight attn.q.weight : {m}[32, 24] attention
  weight attn.k.weight : {m}[16, 24] attention
  weight attn.v.weight : {m}[16, 24] attention
  weight attn.o.weight : {m}[24, 32] attention
  weight attn.inv_freq : f32[4] constant
)",
                       fmt::arg("f", f), fmt::arg("m", matrices));
  };
  auto attention_nodes = [&] {
    return "  n = rms_norm x, weight=attn.norm.weight {eps=1e-05} : f32[T, 24]\n" + quantized("n", "nq", "T, 24") +
           fmt::format(R"(  q = linear {n}, weight=attn.q.weight : f32[T, 32]
  k = linear {n}, weight=attn.k.weight : f32[T, 16]
  v = linear {n}, weight=attn.v.weight : f32[T, 16]
  qr = rope q, inv_freq=attn.inv_freq {{heads=4 head_dim=8 rotary_dim=8}} : f32[T, 32]
  kr = rope k, inv_freq=attn.inv_freq {{heads=2 head_dim=8 rotary_dim=8}} : f32[T, 16]
  kv = kv_append kr, v {{kv_heads=2 k_dim=8 v_dim=8}} : state
  o = attention qr, kv {{heads=4 kv_heads=2 k_dim=8 v_dim=8 scale=0.35}} : f32[T, 32]
)",
                       fmt::arg("n", in("n", "nq"))) +
           quantized("o", "oq", "T, 32") +
           fmt::format("  y = linear {}, weight=attn.o.weight : f32[T, 24]\n  x2 = add x, y : f32[T, 24]\n",
                       in("o", "oq"));
  };
  s += "block dense layers=0 {\n" + attention() +
       fmt::format(R"(  weight mlp.norm.weight : {f}[24] norm
  weight mlp.gate_up.weight : {m}[80, 24] dense
  weight mlp.down.weight : {m}[24, 40] dense
)",
                   fmt::arg("f", f), fmt::arg("m", matrices)) +
       attention_nodes() + "  m = rms_norm x2, weight=mlp.norm.weight {eps=1e-05} : f32[T, 24]\n" +
       quantized("m", "mq", "T, 24") +
       fmt::format(
           "  gu = linear {}, weight=mlp.gate_up.weight : f32[T, 80]\n  g = slice gu {{start=0 len=40}} : f32[T, 40]\n "
           " u = slice gu {{start=40 len=40}} : f32[T, 40]\n"
           "  h = activation g, u : f32[T, 40]\n",
           in("m", "mq")) +
       quantized("h", "hq", "T, 40") +
       fmt::format(
           "  d = linear {}, weight=mlp.down.weight : f32[T, 24]\n  x3 = add x2, d : f32[T, 24]\n  output x3\n}}\n",
           in("h", "hq"));
  s += "block moe layers=1..2 {\n" + attention() +
       fmt::format(R"(  weight moe.norm.weight : {f}[24] norm
  weight moe.router.weight : {f}[6, 24] router
  weight moe.experts.gate.weight : {m}[6, 20, 24] expert
  weight moe.experts.up.weight : {m}[6, 20, 24] expert
  weight moe.experts.down.weight : {m}[6, 24, 20] expert
)",
                   fmt::arg("f", f), fmt::arg("m", matrices)) +
       attention_nodes() + "  m = rms_norm x2, weight=moe.norm.weight {eps=1e-05} : f32[T, 24]\n" +
       "  logits = linear m, weight=moe.router.weight : f32[T, 6]\n  route = route logits {experts=6 k=2} : route[T, "
       "2]\n" +
       quantized("m", "mq", "T, 24") +
       fmt::format(
           "  g = expert_linear {0}, route, weight=moe.experts.gate.weight : f32[P, 20]\n  u = expert_linear {0}, "
           "route, weight=moe.experts.up.weight : f32[P, 20]\n"
           "  h = activation g, u : f32[P, 20]\n",
           in("m", "mq")) +
       quantized("h", "hq", "P, 20") +
       fmt::format(
           "  e = expert_linear {}, route, weight=moe.experts.down.weight : f32[P, 24]\n  c = expert_combine e, route "
           ": f32[T, 24]\n  x3 = add x2, c : f32[T, 24]\n  output x3\n}}\n",
           in("h", "hq"));
  s += fmt::format(R"(epilogue {{
  input x : f32[T, 24]
  weight norm.weight : {f}[24] norm
  weight lm_head.weight : {f}[50, 24] head
  n = rms_norm x, weight=norm.weight {{eps=1e-05}} : f32[T, 24]
  r = select_rows n : f32[L, 24]
  out = linear r, weight=lm_head.weight : f32[L, 50]
  output out
}}
)",
                   fmt::arg("f", f));
  return s;
}

// Element i of a tensor, before it is rounded to its dtype: noise; scales and norm weights are positive.
inline float tiny_value(const std::string& name, int64_t i) {
  const float u = random_unit(seed_of(11, name), uint64_t(i));
  if (name.ends_with("_scale")) return 0.001f + 0.01f * u;
  if (name.find("norm") != std::string::npos) return 0.5f + u;
  return u - 0.5f;
}
inline int8_t tiny_int8(const std::string& name, int64_t i) {
  return int8_t(int64_t(random_u64(seed_of(11, name), uint64_t(i)) % 255) - 127);
}

// Element i of a row of int4 of k columns, as write_tiny_mir writes it.
inline int8_t tiny_int4(const std::string& name, int64_t row, int64_t k, int64_t i) {
  const uint8_t byte = uint8_t(tiny_int8(name, row * int4_row_bytes(k) + i / 2));
  return int4_at(&byte, i % 2);
}

// Writes the graph's directory; change(name, floats) may edit a tensor's floats before they are written.
inline Status write_tiny_mir(const Path& dir, const std::string& text,
                             const std::function<void(const std::string&, std::vector<float>&)>& change = {}) {
  std::filesystem::create_directories(dir / "tokenizer");
  std::ofstream(dir / "tokenizer" / "tokenizer.json") << "{}";
  MI_TRY(const ir::Graph g, ir::parse(text));
  MI_TRY(auto w, ir::MirWriter::create(dir, g));
  for (const auto& d : w.order()) {
    const int64_t n = *shape_count(d.shape);
    if (d.dtype == DType::kI8 || d.dtype == DType::kU8) {  // any bytes are two numbers of int4
      std::vector<int8_t> v(static_cast<size_t>(n));
      for (int64_t i = 0; i < n; ++i) v[size_t(i)] = tiny_int8(d.name, i);
      MI_TRY_VOID(w.write(std::as_bytes(std::span(v))));
      continue;
    }
    std::vector<float> v(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) v[size_t(i)] = tiny_value(d.name, i);
    if (change) change(d.name, v);
    if (d.dtype == DType::kF32) {
      MI_TRY_VOID(w.write(std::as_bytes(std::span(v))));
    } else {
      std::vector<uint16_t> h(v.size());
      for (size_t i = 0; i < v.size(); ++i) h[i] = d.dtype == DType::kBF16 ? to_bf16(v[i]).bits : to_f16(v[i]).bits;
      MI_TRY_VOID(w.write(std::as_bytes(std::span(h))));
    }
  }
  return w.finish(g, Json::object());
}

}  // namespace mi::compiler::testing
