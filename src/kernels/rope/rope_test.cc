#include "kernels/rope/rope.h"

#include "kernels/testing.h"

namespace mi::kernels {
namespace {

std::vector<float> frequencies(int64_t rotary) {
  std::vector<float> f;
  for (int64_t i = 0; i < rotary / 2; ++i) f.push_back(float(std::pow(10000.0, -2.0 * double(i) / double(rotary))));
  return f;
}

TEST(Rope, RotatesPairsByPositionTimesFrequency) {
  for (bool interleaved : {false, true}) {
    const RopeParams p{3, 20, 12, interleaved, 1.25f};
    const auto f = frequencies(12);
    const RopeTable table = make_rope_table(f.data(), 12, 1.25f, 4000);
    const Matrix x(4, 60, 1, 1.0f);
    const std::vector<int32_t> positions = {0, 1, 77, 3999};
    Matrix y(4, 60), in_place = x;
    rope_rows(p, {4, x.v.data(), x.stride(), positions.data(), &table, y.v.data(), y.stride()}, 0, 4);
    rope_rows(p, {4, in_place.v.data(), x.stride(), positions.data(), &table, in_place.v.data(), x.stride()}, 0, 4);
    expect_same_bits(y, in_place, "in place");
    for (int64_t r = 0; r < 4; ++r)
      for (int64_t h = 0; h < 3; ++h) {
        for (int64_t i = 0; i < 6; ++i) {
          const int64_t a = h * 20 + (interleaved ? 2 * i : i), b = h * 20 + (interleaved ? 2 * i + 1 : i + 6);
          const double angle = double(float(positions[size_t(r)]) * f[size_t(i)]);    // the angle itself is a float
          const double c = std::cos(angle) * 1.25, s = std::sin(angle) * 1.25;
          const double size = std::abs(x.at(r, a)) + std::abs(x.at(r, b));
          ASSERT_NEAR(y.at(r, a), x.at(r, a) * c - x.at(r, b) * s, 1.25 * size * 4 * kUlp);
          ASSERT_NEAR(y.at(r, b), x.at(r, b) * c + x.at(r, a) * s, 1.25 * size * 4 * kUlp);
        }
        for (int64_t i = 12; i < 20; ++i) ASSERT_EQ(y.at(r, h * 20 + i), x.at(r, h * 20 + i)) << "not rotated, only copied";
      }
  }
}

TEST(Rope, PositionZeroChangesNothing) {
  const RopeParams p{2, 16, 16, false, 1};
  const auto f = frequencies(16);
  const RopeTable table = make_rope_table(f.data(), 16, 1, 1);
  const Matrix x(1, 32, 2, 1.0f);
  Matrix y(1, 32);
  const int32_t zero = 0;
  rope_rows(p, {1, x.v.data(), x.stride(), &zero, &table, y.v.data(), y.stride()}, 0, 1);
  expect_same_bits(x, y, "position 0");
}

}  // namespace
}  // namespace mi::kernels
