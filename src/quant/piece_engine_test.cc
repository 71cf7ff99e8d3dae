// Layers that run alone (ir::piece_of, exec::Tap::replace, PieceEngine) against the whole engine, bit for bit.
#include "quant/piece_engine.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "ir/verify.h"
#include "quant/testing.h"

namespace mi::quant {
namespace {

using testing::random_ids;
using testing::write_tiny;

constexpr int64_t kTinyHidden = 24, kVocab = 50, kLayers = 3;

struct Whole {
  std::map<int32_t, std::vector<float>> residual;  // -1: embedding
  std::vector<float> logits;
};

// Every sequence alone through the whole engine.
Whole run_whole(const ir::MirDir& mir, const Path& beside, int level, const Sequences& s, hw::ThreadPool& pool) {
  Whole w;
  const auto files = build_temporary_engine(mir, beside, level, "");
  EXPECT_TRUE(files.ok()) << (files.ok() ? "" : files.error().message());
  exec::LoadOptions o;
  o.max_tokens_per_step = 300;
  o.kv_type = "f32";
  o.kv_pages = 64;
  const auto engine = exec::Engine::load(files->path(), o, pool).value();
  exec::Tap tap;
  tap.want = [](const artifact::Instr& i, bool input) { return !input && i.layer_output; };
  tap.see = [&](const exec::TapEvent& e) {
    if (e.operand == &e.instr->out[0])
      w.residual[e.instr->layer].insert(w.residual[e.instr->layer].end(), e.values, e.values + e.rows * e.cols);
  };
  engine->set_tap(&tap);
  std::vector<int32_t> pages(64);
  std::iota(pages.begin(), pages.end(), 0);
  for (const std::vector<int32_t>& ids : s)
    for (size_t at = 0; at < ids.size(); at += 300) {
      const std::span<const float> l = engine->run({{{std::span(ids).subspan(at, std::min<size_t>(300, ids.size() - at)), int64_t(at), pages, 0}}});
      w.logits.insert(w.logits.end(), l.begin(), l.end());
    }
  return w;
}

void expect_same_bits(const std::vector<float>& a, const std::vector<float>& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  ASSERT_FALSE(a.empty()) << what;
  for (size_t i = 0; i < a.size(); ++i)
    ASSERT_EQ(std::memcmp(&a[i], &b[i], 4), 0) << what << ", number " << i << ": " << a[i] << " and " << b[i];
}

std::string long_positions(std::string text) {
  const std::string from = "max_positions = 128";
  return text.replace(text.find(from), from.size(), "max_positions = 4096");
}

class PieceEngineTest : public ::testing::TestWithParam<std::tuple<const char*, int>> {};

TEST_P(PieceEngineTest, LayersAloneGiveTheBitsOfTheWhole) {
  const auto [matrices, level] = GetParam();
  const TempDir dir;
  const ir::MirDir mir = ir::MirDir::open(write_tiny(dir.path(), matrices, {}, long_positions)).value();
  hw::ThreadPool pool(2);
  // Longer than a step; many that share one, and more than may; again a long one, then a short one behind it.
  std::vector<int64_t> lengths = {5, 1100, 1, 64, 65, 1024, 2500, 3};
  for (int64_t i = 0; i < 150; ++i) lengths.push_back(1 + i % 9);
  lengths.push_back(1025);
  lengths.push_back(2);
  const Sequences s = random_ids(lengths, kVocab);
  const Whole whole = run_whole(mir, dir / "whole", level, s, pool);

  const int64_t tokens = token_count(s);
  EXPECT_EQ(tokens, std::accumulate(lengths.begin(), lengths.end(), int64_t(0)));
  EXPECT_EQ(longest_of(s), 2500);
  std::vector<float> rows(size_t(tokens * kTinyHidden)), out(rows.size());
  auto ends = PieceEngine::build(ir::piece_of(mir, -1), dir / "piece", level, 2500, pool).value();
  EXPECT_EQ(ends.hidden(), kTinyHidden);
  EXPECT_EQ(ends.vocab(), kVocab);
  ends.run_embedding(s, rows);
  expect_same_bits(rows, whole.residual.at(-1), "embedding");
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    auto piece = PieceEngine::build(ir::piece_of(mir, layer), dir / "piece", level, 2500, pool).value();
    int64_t seen = 0, next = 0;
    Watch watch;
    watch.want = [](const artifact::Instr& i) { return i.layer >= 0 && i.layer_output; };
    watch.see = [&](const exec::TapEvent& e, int64_t first) {
      EXPECT_EQ(first, next);
      next += e.rows;
      seen += std::memcmp(e.values, whole.residual.at(layer).data() + first * kTinyHidden, size_t(e.rows * kTinyHidden) * 4) == 0 ? e.rows : 0;
    };
    piece.run_layer(s, rows, out, &watch);
    EXPECT_EQ(seen, tokens) << "layer " << layer;
    expect_same_bits(out, whole.residual.at(layer), "layer " + std::to_string(layer));
    piece.run_layer(s, rows, {});      // nothing is asked for: nothing is written
    piece.run_layer(s, rows, rows);    // in place
    expect_same_bits(rows, out, "layer in place");
  }
  std::vector<float> logits(size_t(tokens * kVocab));
  int64_t next = 0;
  ends.run_head(s, rows, [&](int64_t first, std::span<const float> l) {
    EXPECT_EQ(first, next);
    next += int64_t(l.size()) / kVocab;
    std::copy(l.begin(), l.end(), logits.begin() + first * kVocab);
  });
  EXPECT_EQ(next, tokens);
  expect_same_bits(logits, whole.logits, "logits");
  EXPECT_FALSE(std::filesystem::exists(dir / "piece"));  // engines of pieces leave nothing behind under their name
}

INSTANTIATE_TEST_SUITE_P(All, PieceEngineTest,
                         ::testing::Values(std::tuple{"bf16", 0}, std::tuple{"bf16", 2}, std::tuple{"f32", 2}, std::tuple{"w8a8", 0},
                                           std::tuple{"w8a8", 2}, std::tuple{"w4a8_g32", 2}));

TEST(PieceOfTest, PiecesAreLegalAndShareTheFiles) {
  const TempDir dir;
  const ir::MirDir mir = ir::MirDir::open(write_tiny(dir.path())).value();
  for (int32_t layer = -1; layer < kLayers; ++layer) {
    const ir::MirDir piece = ir::piece_of(mir, layer);
    const Status s = ir::verify(piece.graph);
    EXPECT_TRUE(s.ok()) << layer << ": " << (s.ok() ? "" : s.error().message());
    EXPECT_EQ(piece.graph.info.layers, 1);
    EXPECT_EQ(piece.graph.info.vocab, layer < 0 ? kVocab : 1);
    for (const auto& d : ir::declared_tensors(piece.graph)) {
      ASSERT_TRUE(piece.has(d.name)) << d.name;
      if (layer < 0 || !d.name.starts_with("layers.0.")) continue;
      const std::string original = "layers." + std::to_string(layer) + d.name.substr(8);
      EXPECT_EQ(piece.weight(d.name).data, mir.weight(original).data) << d.name;
    }
  }
}

// What stands in memory goes before what stands in the files, in pieces too.
TEST(PieceOfTest, TensorsInMemoryComeAlong) {
  const TempDir dir;
  ir::MirDir mir = ir::MirDir::open(write_tiny(dir.path())).value();
  const std::string name = "layers.2.moe.experts.up.weight";
  const TensorView v = mir.weight(name);
  Tensor t = make_tensor(v.dtype, v.shape);
  mir.made[name] = std::make_shared<const Tensor>(std::move(t));
  EXPECT_EQ(ir::piece_of(mir, 2).weight("layers.0.moe.experts.up.weight").data, mir.made[name]->view().data);
  EXPECT_NE(ir::piece_of(mir, 1).weight("layers.0.moe.experts.up.weight").data, mir.made[name]->view().data);
}

}  // namespace
}  // namespace mi::quant
