#pragma once
// For this room's tests: temporary folders, fixtures of tests/data, tiny checkpoints made in memory.

#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <map>
#include <string>

#include "base/file.h"
#include "base/json.h"
#include "base/temp_dir.h"
#include "base/util.h"
#include "ir/mir_dir.h"
#include "ir/text.h"
#include "model/export.h"
#include "tensor/safetensors.h"

namespace mi::model::testing {

namespace fs = std::filesystem;

inline Path data(const std::string& name) { return Path(MI_SOURCE_DIR) / "tests" / "data" / name; }

inline void write_text(const Path& p, const std::string& text) { std::ofstream(p, std::ios::binary) << text; }
inline std::string read_text(const Path& p) {
  auto r = read_file(p);
  return r.ok() ? *r : "";
}
inline Json load_json(const Path& p) {
  auto r = read_json(p);
  EXPECT_TRUE(r.ok()) << p;
  return r.ok() ? *r : Json::object();
}

using TensorMap = std::map<std::string, Tensor>;

inline void write_tensors(const Path& p, const TensorMap& tensors) {
  std::vector<SafetensorsWriter::Decl> decls;
  for (const auto& [name, t] : tensors) decls.push_back({name, t.dtype, t.shape});
  auto w = SafetensorsWriter::create(p, decls);
  ASSERT_TRUE(w.ok());
  for (const auto& [name, t] : tensors) ASSERT_TRUE(w->write(t.data).ok());
  ASSERT_TRUE(w->finish().ok());
}
inline TensorMap read_tensors(const Path& p) {
  auto s = Safetensors::open(p);
  EXPECT_TRUE(s.ok()) << p;
  TensorMap out;
  if (s.ok())
    for (const auto& e : s->entries()) {
      const TensorView v = s->view(e);
      out[e.name] = Tensor{v.dtype, v.shape, {v.data, v.data + v.bytes}};
    }
  return out;
}

// Seeded BF16 numbers that are small and never zero.
inline Tensor random_bf16(Shape shape, uint64_t seed) {
  Tensor t = make_tensor(DType::kBF16, std::move(shape));
  auto* p = reinterpret_cast<BF16*>(t.data.data());
  for (int64_t i = 0; i < t.view().count(); ++i) p[i] = to_bf16(random_normal(seed, uint64_t(i)) * 0.1f + 0.001f);
  return t;
}

// A qwen3_moe of one layer: hidden 32, 2 heads of 16, 1 kv head, vocabulary 32.
struct Tiny {
  int64_t hidden = 32, width = 16, experts = 4, layers = 1;
  Json config() const {
    return Json{{"model_type", "qwen3_moe"},
                {"vocab_size", 32},
                {"hidden_size", hidden},
                {"num_hidden_layers", layers},
                {"num_attention_heads", 2},
                {"num_key_value_heads", 1},
                {"head_dim", 16},
                {"num_experts", experts},
                {"num_experts_per_tok", 2},
                {"moe_intermediate_size", width},
                {"intermediate_size", 48},
                {"norm_topk_prob", true},
                {"rms_norm_eps", 1e-6},
                {"rope_theta", 10000.0},
                {"max_position_embeddings", 64},
                {"tie_word_embeddings", false},
                {"eos_token_id", 2}};
  }
  TensorMap tensors() const {
    TensorMap t;
    const auto put = [&](const std::string& name, Shape s) { t[name] = random_bf16(std::move(s), seed_of(1, name)); };
    put("model.embed_tokens.weight", {32, hidden});
    put("model.norm.weight", {hidden});
    put("lm_head.weight", {32, hidden});
    for (int64_t l = 0; l < layers; ++l) {
      const std::string p = fmt::format("model.layers.{}.", l);
      put(p + "input_layernorm.weight", {hidden});
      put(p + "post_attention_layernorm.weight", {hidden});
      put(p + "self_attn.q_proj.weight", {32, hidden});
      put(p + "self_attn.k_proj.weight", {16, hidden});
      put(p + "self_attn.v_proj.weight", {16, hidden});
      put(p + "self_attn.o_proj.weight", {hidden, 32});
      put(p + "self_attn.q_norm.weight", {16});
      put(p + "self_attn.k_norm.weight", {16});
      put(p + "mlp.gate.weight", {experts, hidden});
      for (int64_t e = 0; e < experts; ++e) {
        put(fmt::format("{}mlp.experts.{}.gate_proj.weight", p, e), {width, hidden});
        put(fmt::format("{}mlp.experts.{}.up_proj.weight", p, e), {width, hidden});
        put(fmt::format("{}mlp.experts.{}.down_proj.weight", p, e), {hidden, width});
      }
    }
    return t;
  }
};

inline void write_checkpoint(const Path& dir, const Json& config, const TensorMap& tensors) {
  fs::create_directories(dir);
  write_text(dir / "config.json", dump_json(config, 1));
  write_tensors(dir / "model.safetensors", tensors);
}

// Checks and builds the graph, writes nothing; `edit` may change the options.
inline Result<ExportReport> check(const Path& model_dir, const std::function<void(ExportOptions&)>& edit = {}) {
  ExportOptions o;
  o.model_dir = model_dir;
  o.explain = true;
  if (edit) edit(o);
  return export_model(o);
}
inline Result<ExportReport> export_to(const Path& model_dir, const Path& out,
                                      const std::function<void(ExportOptions&)>& edit = {}) {
  Progress::set_quiet(true);
  return check(model_dir, [&](ExportOptions& o) {
    o.output = out;
    if (edit) edit(o);
  });
}
inline ir::MirDir open_mir(const Path& p) {
  auto m = ir::MirDir::open(p);
  EXPECT_TRUE(m.ok()) << (m.ok() ? "" : m.error().message());
  return m.ok() ? std::move(m).value() : ir::MirDir{};
}

// The message of a refusal, "" (and a failure) when it was none.
template <typename T>
std::string refusal(const Result<T>& r) {
  EXPECT_FALSE(r.ok());
  return r.ok() ? "" : r.error().message();
}

}  // namespace mi::model::testing
