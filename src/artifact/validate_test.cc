#include "artifact/validate.h"

#include <gtest/gtest.h>

#include <functional>

#include "artifact/json.h"
#include "artifact/layout.h"
#include "artifact/reader.h"
#include "artifact/testing.h"

namespace mi::artifact {
namespace {

class Validate : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = std::filesystem::path(::testing::TempDir()) / fmt::format("mi-validate-{}", getpid());
    std::filesystem::create_directories(dir_);
    testing::TinyEngine e;
    auto m = e.write(dir_, 4096);
    ASSERT_TRUE(m.ok()) << m.error().message();
    good_ = *m;
    ASSERT_GT(good_.segments.size(), size_t(2));
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  Instr& instr(Manifest& m, Op op, int32_t layer) {
    for (Instr& i : m.program)
      if (i.op == op && i.layer == layer) return i;
    MI_CHECK(false, "no such instruction");
  }
  template <class P>
  P& params(Manifest& m, Op op, int32_t layer) {
    return std::get<P>(instr(m, op, layer).params);
  }
  WeightTensor& weight(Manifest& m, const std::string& name) {
    for (WeightTensor& w : m.weights)
      if (w.name == name) return w;
    MI_CHECK(false, "no such weight");
  }
  Buffer& buffer(Manifest& m, const std::string& name) {
    for (Buffer& b : m.buffers)
      if (b.name == name) return b;
    MI_CHECK(false, "no such buffer");
  }
  // After `edit` the manifest must be refused, with `words` in the sentence.
  void refused(const std::string& words, const std::function<void(Manifest&)>& edit) {
    Manifest m = good_;
    edit(m);
    const Status s = validate(m, good_.memory.weight_bytes);
    ASSERT_FALSE(s.ok()) << "accepted, although: " << words;
    EXPECT_NE(s.error().message().find(words), std::string::npos) << s.error().message();
    EXPECT_EQ(s.error().code(), ErrorCode::kBadInput);
  }

  Path dir_;
  Manifest good_;
};

TEST_F(Validate, AcceptsTheTinyEngine) {
  const Status s = validate(good_, good_.memory.weight_bytes);
  EXPECT_TRUE(s.ok()) << s.error().message();
}

TEST_F(Validate, Facts) {
  refused("newer", [](Manifest& m) { m.format_version = kFormatVersion + 1; });
  refused("does not exist", [](Manifest& m) { m.format_version = 0; });
  refused("target", [](Manifest& m) { m.target = "gpu"; });
  refused("model.vocab", [](Manifest& m) { m.model.vocab = 0; });
  refused("model.hidden", [](Manifest& m) { m.model.hidden = -1; });
  refused("model.layers", [](Manifest& m) { m.model.layers = int64_t(1) << 40; });
  refused("max_positions", [](Manifest& m) { m.model.max_positions = 0; });
  refused("max_k", [](Manifest& m) { m.model.max_k = 0; });
  refused("model.max_k is 3", [](Manifest& m) { m.model.max_k = 3; });
  refused("eos_ids", [](Manifest& m) { m.model.eos_ids = {-4}; });
  refused("bos_id", [](Manifest& m) { m.model.bos_id = -2; });
  refused("active_params", [](Manifest& m) { m.model.active_params = 2000; });
  refused("precision", [](Manifest& m) { m.model.precision = "int3"; });
  refused("default_kv", [](Manifest& m) { m.default_kv = "fp8"; });
  refused("caches for", [](Manifest& m) { m.caches.pop_back(); });
  refused("out of range", [](Manifest& m) { m.caches[0].k_dim = -8; });
  refused("kv_bytes_per_token", [](Manifest& m) { m.memory.kv_bytes_per_token_bf16 += 2; });
}

TEST_F(Validate, Segments) {
  refused("cut off", [](Manifest& m) { m.memory.weight_bytes -= 64; });
  refused("expected", [](Manifest& m) { m.segments[1].offset += kSegmentAlign; });
  refused("does not fit", [](Manifest& m) { m.segments[0].bytes = int64_t(1) << 60; });
  refused("does not fit", [](Manifest& m) { m.segments[0].bytes = -64; });
  refused("2 MiB", [](Manifest& m) {
    m.segments[0].bytes -= 64;
    m.segments[1].offset -= 64;
  });
  refused("cover", [](Manifest& m) { m.segments.pop_back(); });
  refused("hex digits", [](Manifest& m) { m.segments[0].xxh3 = "XYZ"; });
}

TEST_F(Validate, Weights) {
  const std::string qkv = "layers.0.qkv.weight", embed = "embed.weight";
  refused("no name", [&](Manifest& m) { weight(m, qkv).name = ""; });
  refused("out of range", [&](Manifest& m) { weight(m, qkv).experts = 0; });
  refused("out of range", [&](Manifest& m) { weight(m, qkv).n = int64_t(1) << 50; });
  refused("dtype", [&](Manifest& m) { weight(m, qkv).dtype = DType::kF32; });
  refused("dtype", [&](Manifest& m) { weight(m, "norm.weight").dtype = DType::kI8; });
  refused("padded sizes", [&](Manifest& m) { weight(m, qkv).n_pad += 16; });
  refused("padded sizes", [&](Manifest& m) { weight(m, qkv).k_pad = weight(m, qkv).k; });
  refused("expert_stride", [&](Manifest& m) { weight(m, "layers.0.gate.weight").expert_stride -= 64; });
  refused("bytes", [&](Manifest& m) { weight(m, qkv).bytes *= 2; });
  refused("outside weights.bin", [&](Manifest& m) { weight(m, qkv).offset = m.memory.weight_bytes; });
  refused("outside weights.bin", [&](Manifest& m) { weight(m, qkv).offset = -64; });
  refused("multiple of 64", [&](Manifest& m) { weight(m, qkv).offset += 4; });
  refused("multiple of 64", [&](Manifest& m) { weight(m, qkv).scale_offset += 4; });
  refused("leave their segment", [&](Manifest& m) { weight(m, qkv).colsum_offset = m.memory.weight_bytes - 64; });
  refused("leave their segment", [&](Manifest& m) { weight(m, "lm_head.weight").offset = m.memory.weight_bytes - 64; });
  refused("only packed_i8 and packed_i4", [&](Manifest& m) { weight(m, embed).scale_offset = 64; });
  refused("column sums, which only packed_i8", [&](Manifest& m) { weight(m, embed).colsum_offset = 64; });
  refused("share bytes", [&](Manifest& m) { weight(m, qkv).scale_offset = weight(m, qkv).colsum_offset; });
  refused("has to be packed", [&](Manifest& m) { weight(m, embed).experts = 2; });
}

TEST_F(Validate, Int4Weights) {
  const std::string o = "layers.0.o.weight", down = "layers.0.down.weight";
  refused("dtype I8", [&](Manifest& m) { weight(m, o).dtype = DType::kI8; });
  for (int64_t group : {0, 16, 48, 256, -32})
    refused("it is 32, 64 or 128", [&](Manifest& m) { weight(m, o).group = group; });
  refused("it is 32, 64 or 128", [&](Manifest& m) { weight(m, "layers.0.qkv.weight").group = 32; });
  refused("scale_dtype F16", [&](Manifest& m) { weight(m, o).scale_dtype = DType::kF16; });
  refused("scale_dtype BF16", [&](Manifest& m) { weight(m, "layers.0.qkv.weight").scale_dtype = DType::kBF16; });
  refused("expert_stride", [&](Manifest& m) { weight(m, down).expert_stride *= 2; });
  refused("bytes", [&](Manifest& m) { weight(m, o).bytes *= 2; });
  refused("multiple of 64", [&](Manifest& m) { weight(m, o).scale_offset += 4; });
  refused("scales leave their segment", [&](Manifest& m) { weight(m, down).scale_offset = m.memory.weight_bytes - 64; });
  refused("only packed_i8 has", [&](Manifest& m) { weight(m, o).colsum_offset = weight(m, o).scale_offset; });
  refused("share bytes", [&](Manifest& m) { weight(m, o).scale_offset = weight(m, o).offset; });
  refused("both quantized or both float", [&](Manifest& m) {
    instr(m, Op::kLinear, -1).weights[0].tensor = int32_t(&weight(m, "layers.0.o.weight") - m.weights.data());
  });
  refused("format 1 has no int4", [&](Manifest& m) { m.format_version = 1; });
  refused("format 1 has no int4", [&](Manifest& m) {
    m.format_version = 1;
    m.model.precision = "w4a8";
  });
}

TEST_F(Validate, FusedInstructions) {
  Manifest m = good_;
  Instr& append = instr(m, Op::kKvAppend, 0);
  append.weights = instr(m, Op::kRope, 0).weights;
  KvAppendParams& p = std::get<KvAppendParams>(append.params);
  p.rotary_dim = p.k_dim;
  EXPECT_EQ(needed_format_version(m), 4);
  good_ = m;
  refused("has no such fused instructions, which came with format 4", [](Manifest&) {});
  good_.format_version = 4;
  const Status s = validate(good_, good_.memory.weight_bytes);
  EXPECT_TRUE(s.ok()) << s.error().message();
  refused("odd", [&](Manifest& x) { params<KvAppendParams>(x, Op::kKvAppend, 0).rotary_dim = 3; });
  refused("rotary_dim", [&](Manifest& x) { params<KvAppendParams>(x, Op::kKvAppend, 0).rotary_dim = 1000; });
  refused("rotary_dim", [&](Manifest& x) { params<KvAppendParams>(x, Op::kKvAppend, 0).rotary_dim = -2; });
  refused("attention_factor", [&](Manifest& x) { params<KvAppendParams>(x, Op::kKvAppend, 0).attention_factor = 0; });
  refused("'inv_freq' is missing", [&](Manifest& x) { instr(x, Op::kKvAppend, 0).weights.clear(); });
  refused("a weight that this op does not read", [&](Manifest& x) { params<KvAppendParams>(x, Op::kKvAppend, 0).rotary_dim = 0; });
}

TEST_F(Validate, GroupsOfExperts) {
  good_.format_version = 4;
  const auto refused_groups = [&](const std::string& words, std::vector<std::vector<int32_t>> groups) {
    refused(words, [&](Manifest& m) { instr(m, Op::kGroupedExperts, 0).groups = groups; });
  };
  int64_t experts = 0;
  for (const InstrWeight& w : instr(good_, Op::kGroupedExperts, 0).weights) experts = std::max(experts, good_.weights[size_t(w.tensor)].experts);
  std::vector<int32_t> all(static_cast<size_t>(experts));
  for (size_t e = 0; e < all.size(); ++e) all[e] = int32_t(e);
  Manifest m = good_;
  instr(m, Op::kGroupedExperts, 0).groups = {{all.back()}, {all.begin(), all.end() - 1}};
  EXPECT_EQ(needed_format_version(m), 4);
  const Status s = validate(m, m.memory.weight_bytes);
  EXPECT_TRUE(s.ok()) << s.error().message();
  refused_groups("in two groups", {all, {0}});
  refused_groups("a group has expert -1", {all, {-1}});
  refused_groups("a group has expert", {all, {int32_t(experts)}});
  refused_groups("a group without experts", {all, {}});
  refused_groups("the groups have 1 of", {{0}});
  refused("groups go with grouped_experts", [&](Manifest& x) { instr(x, Op::kRope, 0).groups = {all}; });
}

TEST_F(Validate, ExpertsInAnotherOrder) {
  const std::string gate = "layers.0.gate.weight", up = "layers.0.up.weight", down = "layers.0.down.weight";
  const auto order = [&](Manifest& m, std::vector<int32_t> slots) {
    for (const std::string& name : {gate, up, down}) weight(m, name).expert_slots = slots;
  };
  order(good_, {5, 0, 1, 2, 4, 3});
  EXPECT_EQ(needed_format_version(good_), 5);
  refused("has no experts in another order, which came with format 5", [](Manifest& m) { m.format_version = 4; });
  good_.format_version = 5;
  const Status s = validate(good_, good_.memory.weight_bytes);
  EXPECT_TRUE(s.ok()) << s.error().message();
  const auto back = parse_manifest(manifest_text(good_), "text");
  ASSERT_TRUE(back.ok()) << back.error().message();
  EXPECT_EQ(manifest_text(*back), manifest_text(good_));
  EXPECT_EQ(expert_slot(weight(good_, gate), 0), 5);
  EXPECT_EQ(expert_slot(weight(good_, "layers.1.gate.weight"), 2), 2);
  refused("5 expert_slots for 6 experts", [&](Manifest& m) { order(m, {4, 0, 1, 2, 3}); });
  refused("two experts at place 2", [&](Manifest& m) { order(m, {5, 0, 1, 2, 2, 3}); });
  refused("an expert at place 6 of 6", [&](Manifest& m) { order(m, {5, 0, 1, 2, 6, 3}); });
  refused("an expert at place -1 of 6", [&](Manifest& m) { order(m, {5, 0, 1, 2, -1, 3}); });
  refused("in different orders", [&](Manifest& m) { weight(m, down).expert_slots = {}; });
  refused("which only packed matrices have", [&](Manifest& m) { weight(m, "layers.0.down.bias").expert_slots = {5, 0, 1, 2, 4, 3}; });
}

TEST_F(Validate, StoredScales) {
  good_.format_version = 3;
  refused("'in_scale' is missing", [&](Manifest& m) { params<QuantizeParams>(m, Op::kQuantize, 0).saturate = true; });
  refused("'in_scale' is missing", [&](Manifest& m) { params<GroupedExpertsParams>(m, Op::kGroupedExperts, 0).saturate = true; });
  const auto stored = testing::TinyEngine(true, true).write(dir_);
  ASSERT_TRUE(stored.ok()) << stored.error().message();
  good_ = *stored;
  EXPECT_EQ(good_.format_version, 3);
  const Status s = validate(good_, good_.memory.weight_bytes);
  EXPECT_TRUE(s.ok()) << s.error().message();
  refused("engine format 2 has no such scales of activations, which came with format 3", [&](Manifest& m) { m.format_version = 2; });
  refused("is not 1 x 1 plain floats", [&](Manifest& m) {
    instr(m, Op::kGroupedExperts, 0).weights.back().tensor = int32_t(&weight(m, "layers.0.norm2.weight") - m.weights.data());
  });
  // A static scale in a quantize of its own is as old as the first version; with grouped experts it is not.
  Manifest m = good_;
  params<QuantizeParams>(m, Op::kQuantize, 0).saturate = params<QuantizeParams>(m, Op::kQuantize, 1).saturate = false;
  EXPECT_EQ(needed_format_version(m), 3);
  for (Instr& i : m.program)
    if (i.op == Op::kGroupedExperts) i.weights.pop_back(), std::get<GroupedExpertsParams>(i.params).saturate = false;
  EXPECT_EQ(needed_format_version(m), 2);
  params<QuantizeParams>(m, Op::kQuantize, 1).saturate = true;
  EXPECT_EQ(needed_format_version(m), 3);
}

TEST_F(Validate, Buffers) {
  refused("state", [&](Manifest& m) { buffer(m, "final").type.elem = Elem::kState; });
  refused("columns", [&](Manifest& m) { buffer(m, "final").type.cols = 0; });
  refused("row_stride", [&](Manifest& m) { buffer(m, "final").row_stride -= 64; });
  refused("row_stride", [&](Manifest& m) { buffer(m, "layers.0.norm").row_stride -= 64; });
  refused("rows per token", [&](Manifest& m) { buffer(m, "final").rows_per_token = 2; });
  refused("multiple of 64", [&](Manifest& m) { buffer(m, "final").offset_per_token += 32; });
  refused("outside the arena", [&](Manifest& m) { m.memory.activation_bytes_per_token -= 64; });
  refused("outside the arena", [&](Manifest& m) { buffer(m, "final").offset_per_token = int64_t(1) << 62; });
  refused("share bytes",
          [&](Manifest& m) { buffer(m, "layers.0.k").offset_per_token = buffer(m, "layers.0.q").offset_per_token; });
  refused("share bytes", [&](Manifest& m) {
    buffer(m, "layers.0.k").offset_per_token = buffer(m, "layers.0.qkv").offset_per_token + 64;
  });
  refused("lives from", [&](Manifest& m) { buffer(m, "final").last_instr = int32_t(m.program.size()); });
  refused("lives from", [&](Manifest& m) { buffer(m, "final").first_instr = -1; });
  refused("lifetime starts", [&](Manifest& m) { buffer(m, "final").first_instr -= 1; });
  refused("after the end of its lifetime", [&](Manifest& m) { buffer(m, "layers.0.q").last_instr -= 1; });
}

TEST_F(Validate, OrderOfTheProgram) {
  refused("the program is empty", [](Manifest& m) {
    m.program.clear();
    m.buffers.clear();
  });
  refused("the model has 2 layers", [&](Manifest& m) { instr(m, Op::kRoute, 1).layer = 7; });
  refused("expected layer 0", [&](Manifest& m) { m.program[1].layer = 1; });
  refused("layer 0 ended", [&](Manifest& m) { instr(m, Op::kGroupedExperts, 0).layer_output = false; });
  refused("no layer_output", [&](Manifest& m) { m.program[0].layer_output = false; });
  refused("second layer_output", [&](Manifest& m) {
    for (Instr& i : m.program)
      if (i.op == Op::kLinear && i.layer == 0 && i.residual == 1) i.layer_output = true;
  });
  refused("before it is written", [&](Manifest& m) { m.program[1].in[0].buffer = m.program.back().out[0].buffer - 2; });
  refused("second time", [&](Manifest& m) { m.program.back().out[0] = m.program[m.program.size() - 2].out[0]; });
  refused("never written", [](Manifest& m) {
    Buffer b = m.buffers[0];
    b.offset_per_token = m.memory.activation_bytes_per_token;
    m.memory.activation_bytes_per_token += b.row_stride;
    m.buffers.push_back(b);
  });
  refused("logits", [](Manifest& m) {
    m.program.pop_back();
    m.buffers.pop_back();
    for (auto& b : m.buffers) b.last_instr = std::min<int32_t>(b.last_instr, int32_t(m.program.size()) - 1);
  });
}

TEST_F(Validate, Operands) {
  refused("does not exist", [&](Manifest& m) { m.program[1].in[0].buffer = 1000; });
  refused("does not exist", [&](Manifest& m) { m.program[1].in[0].buffer = -1; });
  refused("another kind", [&](Manifest& m) { m.program[1].in[0].type.elem = Elem::kI32; });
  refused("takes columns", [&](Manifest& m) { instr(m, Op::kRope, 0).in[0].col = 1000; });
  refused("takes columns", [&](Manifest& m) { instr(m, Op::kRope, 0).in[0].col = -4; });
  refused("takes columns", [&](Manifest& m) { instr(m, Op::kRope, 0).in[0].type.cols = INT64_MAX; });
  refused("part of", [&](Manifest& m) { instr(m, Op::kQuantize, 0).out[0].type.cols -= 8; });
  refused("state with a buffer", [&](Manifest& m) { instr(m, Op::kKvAppend, 0).out[0].buffer = 0; });
  refused("0 inputs", [&](Manifest& m) { instr(m, Op::kQuantize, 0).in.clear(); });
  refused("residual", [&](Manifest& m) { instr(m, Op::kGroupedExperts, 0).residual = 1; });
  refused("residual", [&](Manifest& m) { instr(m, Op::kGroupedExperts, 0).residual = -1; });
  refused("scratch", [&](Manifest& m) { instr(m, Op::kGroupedExperts, 0).scratch = -1; });
  refused("scratch", [&](Manifest& m) { instr(m, Op::kGroupedExperts, 0).scratch = 0; });
  refused("scratch", [&](Manifest& m) { instr(m, Op::kRoute, 0).scratch = instr(m, Op::kGroupedExperts, 0).scratch; });
  refused("weight", [&](Manifest& m) { instr(m, Op::kRope, 0).weights[0].tensor = 999; });
  refused("order of their roles", [&](Manifest& m) {
    std::swap(instr(m, Op::kGroupedExperts, 0).weights[0], instr(m, Op::kGroupedExperts, 0).weights[1]);
  });
  refused("is missing", [&](Manifest& m) {
    instr(m, Op::kGroupedExperts, 0).weights.erase(instr(m, Op::kGroupedExperts, 0).weights.begin() + 2);
  });
  refused("packed differently", [&](Manifest& m) {
    instr(m, Op::kGroupedExperts, 0).weights[1].tensor =
        int32_t(&weight(m, "layers.0.router.weight") - m.weights.data());
  });
  refused("does not read", [&](Manifest& m) { instr(m, Op::kQuantize, 0).weights = {{Role::kBias, 0}}; });
  refused("both quantized", [&](Manifest& m) {
    instr(m, Op::kLinear, 0).weights[0].tensor = int32_t(&weight(m, "lm_head.weight") - m.weights.data());
  });
  refused("another op", [&](Manifest& m) { instr(m, Op::kQuantize, 0).params = AddParams{}; });
  refused("slice", [&](Manifest& m) {
    instr(m, Op::kQuantize, 0).op = Op::kSlice;
    instr(m, Op::kSlice, 0).params = SliceParams{};
  });
}

TEST_F(Validate, Parameters) {
  refused("eps", [&](Manifest& m) { params<NormParams>(m, Op::kRmsNorm, 0).eps = 0; });
  refused("eps", [&](Manifest& m) { params<NormParams>(m, Op::kRmsNorm, 0).eps = NAN; });
  refused("groups", [&](Manifest& m) { params<NormParams>(m, Op::kRmsNorm, 0).groups = 0; });
  refused("divide", [&](Manifest& m) { params<NormParams>(m, Op::kRmsNorm, 0).groups = 5; });
  refused("heads", [&](Manifest& m) { params<RopeParams>(m, Op::kRope, 0).heads = 0; });
  refused("heads", [&](Manifest& m) { params<RopeParams>(m, Op::kRope, 0).head_dim = 7; });
  refused("rotary_dim", [&](Manifest& m) { params<RopeParams>(m, Op::kRope, 0).rotary_dim = 10; });
  refused("odd", [&](Manifest& m) { params<RopeParams>(m, Op::kRope, 0).rotary_dim = 3; });
  refused("attention_factor", [&](Manifest& m) { params<RopeParams>(m, Op::kRope, 0).attention_factor = INFINITY; });
  refused("its cache holds", [&](Manifest& m) { params<KvAppendParams>(m, Op::kKvAppend, 0).kv_heads = 4; });
  refused("does not fit the layer's cache",
          [&](Manifest& m) { params<AttentionParams>(m, Op::kAttention, 0).window = 9; });
  refused("divide into", [&](Manifest& m) { params<AttentionParams>(m, Op::kAttention, 0).heads = 3; });
  refused("heads wide", [&](Manifest& m) { params<AttentionParams>(m, Op::kAttention, 0).heads = 2; });
  refused("scale", [&](Manifest& m) { params<AttentionParams>(m, Op::kAttention, 0).scale = INFINITY; });
  refused("softcap", [&](Manifest& m) { params<AttentionParams>(m, Op::kAttention, 0).softcap = -1; });
  refused("without a selection", [&](Manifest& m) { params<AttentionParams>(m, Op::kAttention, 0).select_block = 4; });
  refused("selection is for", [&](Manifest& m) { params<AttentionParams>(m, Op::kAttention, 1).select_block = 8; });
  refused("index keys", [&](Manifest& m) { params<IndexAppendParams>(m, Op::kIndexAppend, 1).dim = 4; });
  refused("local", [&](Manifest& m) { params<IndexSelectParams>(m, Op::kIndexSelect, 1).local = 4; });
  refused("topk", [&](Manifest& m) { params<IndexSelectParams>(m, Op::kIndexSelect, 1).topk = 0; });
  refused("k is 7", [&](Manifest& m) { params<RouteParams>(m, Op::kRoute, 0).k = 7; });
  refused("groups_keep", [&](Manifest& m) { params<RouteParams>(m, Op::kRoute, 0).groups_keep = 2; });
  refused("divide into 4 groups", [&](Manifest& m) { params<RouteParams>(m, Op::kRoute, 0).groups = 4; });
  refused("two best", [&](Manifest& m) { params<RouteParams>(m, Op::kRoute, 0).groups = 6; });
  refused("fewer than k", [&](Manifest& m) {
    auto& r = params<RouteParams>(m, Op::kRoute, 0);
    r.groups = 6;
    r.group_by = GroupBy::kMax;
  });
  refused("unknown score", [&](Manifest& m) { params<RouteParams>(m, Op::kRoute, 0).score = RouteScore(9); });
  refused("renorm_eps", [&](Manifest& m) { params<RouteParams>(m, Op::kRoute, 0).renorm_eps = NAN; });
  refused("unknown activation",
          [&](Manifest& m) { params<GroupedExpertsParams>(m, Op::kGroupedExperts, 0).kind = ActKind(77); });
  refused("out_scale", [&](Manifest& m) { params<LinearParams>(m, Op::kLinear, 0).out_scale = NAN; });
  refused("scale", [&](Manifest& m) { params<EmbedParams>(m, Op::kEmbed, -1).scale = NAN; });
}

TEST_F(Validate, Caches) {
  refused("its cache holds", [](Manifest& m) {
    m.caches[0].kv_heads = 1;
    m.memory.kv_bytes_per_token_bf16 -= 2 * 2 * 8;
  });
  refused("never writes", [](Manifest& m) {
    m.caches[0].index_dim = 8;
    m.memory.kv_bytes_per_token_bf16 += 16;
  });
  refused("second time", [&](Manifest& m) {
    instr(m, Op::kIndexAppend, 1) = Instr(instr(m, Op::kKvAppend, 1));
    buffer(m, "layers.1.qkv").last_instr += 1;
  });
  refused("has not written", [&](Manifest& m) {
    std::swap(instr(m, Op::kIndexAppend, 1), instr(m, Op::kIndexSelect, 1));
    buffer(m, "layers.1.selection").first_instr -= 1;
    buffer(m, "layers.1.k").last_instr += 1;
  });
}

// Any number of the manifest replaced by an extreme one: refused or accepted, never a crash (the sanitizer builds see
// reads out of range and overflow).
TEST_F(Validate, ExtremeNumbersNeverCrash) {
  const Json original = to_json(good_);
  std::vector<Json::json_pointer> numbers;
  const Json flat = original.flatten();
  for (const auto& [path, value] : flat.items())
    if (value.is_number_integer()) numbers.emplace_back(path);
  const int64_t extremes[] = {0, -1, 1, 63, 64, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, int64_t(1) << 40};
  int refused = 0, tried = 0;
  for (size_t i = 0; i < numbers.size(); ++i) {
    Json j = original;
    j[numbers[i]] = extremes[random_u64(5, i) % std::size(extremes)];
    const auto m = from_json(j, "edited");
    refused += !m.ok() || !validate(*m, good_.memory.weight_bytes).ok();
    ++tried;
  }
  EXPECT_GT(tried, 500);
  EXPECT_GT(refused, tried * 8 / 10);
}

}  // namespace
}  // namespace mi::artifact
