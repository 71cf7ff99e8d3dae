#include "kernels/elementwise/elementwise.h"

#include "kernels/embed/embed.h"
#include "kernels/testing.h"
#include "tensor/dtype.h"

namespace mi::kernels {
namespace {

MapArgs map_args(const Matrix& x, Matrix& y) { return {x.rows, x.cols, x.v.data(), x.stride(), y.v.data(), y.stride()}; }

TEST(Elementwise, EveryElementOnce) {
  hw::ThreadPool pool(2);
  const Matrix a(40, 1000, 1, 1.0f), b(40, 1000, 2, 1.0f);
  Matrix sum(40, 1000), scaled(40, 1000), clamped(40, 1000), gated(40, 1000);
  add_run(map_args(a, sum), b.v.data(), b.stride(), pool);
  scale_run(map_args(a, scaled), 0.3f, pool);
  clamp_run(map_args(a, clamped), -0.5f, 0.75f, pool);
  sigmoid_mul_run(map_args(a, gated), b.v.data(), b.stride(), pool);
  for (int64_t i = 0; i < 40; ++i) {
    const double g = 1 / (1 + std::exp(-double(b.at(i, 0))));
    for (int64_t j = 0; j < 1000; ++j) {
      ASSERT_EQ(sum.at(i, j), a.at(i, j) + b.at(i, j));
      ASSERT_EQ(scaled.at(i, j), a.at(i, j) * 0.3f);
      ASSERT_EQ(clamped.at(i, j), std::min(std::max(a.at(i, j), -0.5f), 0.75f));
      ASSERT_NEAR(gated.at(i, j), a.at(i, j) * g, std::abs(a.at(i, j) * g) * 8 * kUlp);
    }
    ASSERT_EQ(sum.row(i)[1000], kGap) << "the gap between rows was written";
  }
}

TEST(Elementwise, ClampKeepsNaN) {
  hw::ThreadPool pool(1);
  Matrix x(1, 2, 1, 1.0f), y(1, 2);
  x.at(0, 1) = std::nanf("");
  clamp_run(map_args(x, y), -1, 1, pool);
  EXPECT_TRUE(std::isnan(y.at(0, 1)));
}

TEST(Elementwise, SelectRowsCopiesTheRowsAskedFor) {
  const Matrix x(5, 7, 3, 1.0f);
  Matrix y(3, 7);
  const int32_t index[] = {4, 0, 4};
  select_rows(x.v.data(), x.stride(), index, 3, 7 * 4, y.v.data(), y.stride());
  for (int64_t i = 0; i < 3; ++i)
    for (int64_t j = 0; j < 7; ++j) EXPECT_EQ(y.at(i, j), x.at(index[i], j));
  EXPECT_EQ(y.row(2)[7], kGap);
}

TEST(Embed, WidensRowsOfEveryFloatType) {
  hw::ThreadPool pool(2);
  const int64_t vocab = 9, cols = 21;
  std::vector<float> f32;
  std::vector<BF16> bf16;
  std::vector<F16> f16;
  for (int64_t i = 0; i < vocab * cols; ++i) {
    const float v = random_normal(4, uint64_t(i));
    f32.push_back(v);
    bf16.push_back(to_bf16(v));
    f16.push_back(to_f16(v));
  }
  const std::vector<int32_t> ids = {8, 0, 3, 3};
  const std::pair<const void*, DType> tables[] = {{f32.data(), DType::kF32}, {bf16.data(), DType::kBF16}, {f16.data(), DType::kF16}};
  for (const auto& [data, dtype] : tables) {
    Matrix y(4, cols);
    embed_run({4, cols, ids.data(), data, dtype, 1.5f, y.v.data(), y.stride()}, pool);
    for (int64_t i = 0; i < 4; ++i)
      for (int64_t j = 0; j < cols; ++j) {
        const size_t at = size_t(ids[size_t(i)] * cols + j);
        const float v = dtype == DType::kF32 ? f32[at] : dtype == DType::kBF16 ? to_f32(bf16[at]) : to_f32(f16[at]);
        ASSERT_EQ(y.at(i, j), v * 1.5f);
      }
  }
}

}  // namespace
}  // namespace mi::kernels
