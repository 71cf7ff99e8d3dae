#include "model/dummy_weights.h"

#include <gmock/gmock.h>

#include <cmath>

#include "model/testing.h"

namespace mi::model {
namespace {

using namespace testing;

std::pair<double, double> mean_and_deviation(const std::vector<float>& v) {
  double sum = 0, square = 0;
  for (float f : v) {
    sum += f;
    square += double(f) * f;
  }
  const double mean = sum / double(v.size());
  return {mean, std::sqrt(square / double(v.size()) - mean * mean)};
}

TEST(DummyWeights, NeedOnlyTheConfig) {
  TempDir tmp;
  fs::create_directory(tmp / "shape");
  fs::copy(data("goldens") / "minimax_m3" / "config.released.json", tmp / "shape" / "config.json");
  const auto dummy = [](uint64_t seed) {
    return [seed](ExportOptions& o) {
      o.dummy_weights = true;
      o.seed = seed;
      o.name = "d";
    };
  };
  const auto r = export_to(tmp / "shape", tmp / "a", dummy(1));
  ASSERT_TRUE(r.ok()) << r.error().message();
  EXPECT_GT(r->parameters, 300'000);
  ASSERT_TRUE(export_to(tmp / "shape" / "config.json", tmp / "b", dummy(1)).ok());
  ASSERT_TRUE(export_to(tmp / "shape", tmp / "c", dummy(2)).ok());
  const auto weights = [&](const char* d) { return read_text(tmp / d / "weights" / "00001.safetensors"); };
  EXPECT_EQ(weights("a"), weights("b"));
  EXPECT_NE(weights("a"), weights("c"));

  const ir::MirDir m = open_mir(tmp / "a");
  const auto [qm, qs] = mean_and_deviation(to_f32_vector(m.weight("layers.0.attn.q.weight")));
  EXPECT_NEAR(qm, 0, 0.01);
  EXPECT_NEAR(qs, 1 / std::sqrt(64.0), 0.01);
  EXPECT_NEAR(mean_and_deviation(to_f32_vector(m.weight("layers.0.attn_norm.weight"))).first, 0, 0.05);  // a 1 + w norm
  EXPECT_EQ(m.weight("layers.2.moe.select_bias").dtype, DType::kF32);
  EXPECT_NE(to_f32_vector(m.weight("layers.2.moe.experts.gate.weight")),
            to_f32_vector(m.weight("layers.3.moe.experts.gate.weight")));
  EXPECT_EQ(to_f32_vector(m.weight("layers.2.rope.inv_freq"))[0], 1.0f);
}

TEST(DummyWeights, OfEveryFamily) {
  TempDir tmp;
  for (const auto& e : fs::directory_iterator(data("goldens"))) {
    const auto r = export_to(e.path() / "config.json", tmp / e.path().filename(),
                             [](ExportOptions& o) { o.dummy_weights = true; });
    EXPECT_TRUE(r.ok()) << e.path() << (r.ok() ? "" : r.error().message());
  }
}

}  // namespace
}  // namespace mi::model
