#include "model/view.h"

#include <gmock/gmock.h>

#include "model/testing.h"

namespace mi::model {
namespace {

using namespace testing;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

Config no_config() { return *Config::create(Json::object(), "config.json", {}, {}); }

std::vector<float> all(const StridedView& v) {
  std::vector<float> out(size_t(v.count()));
  gather(v, 0, v.count(), reinterpret_cast<std::byte*>(out.data()));
  return out;
}
Result<StridedView> viewed(const Tensor& t, const Json& ops, bool is_vector = false) {
  Config c = no_config();
  MI_TRY(const auto parsed, parse_view_ops(ops, &c, "test"));
  return apply(parsed, view_of(t.view()), is_vector);
}

const Tensor k2x6 = tensor_f32({2, 6}, std::vector<float>{0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15});

TEST(View, TransposeAndRows) {
  EXPECT_THAT(all(*viewed(k2x6, {"transpose"})), ElementsAre(0, 10, 1, 11, 2, 12, 3, 13, 4, 14, 5, 15));
  EXPECT_THAT(all(*viewed(k2x6, Json::parse(R"(["transpose", {"every": [2, 1]}])"))), ElementsAre(1, 11, 3, 13, 5, 15));
  EXPECT_THAT(all(*viewed(k2x6, Json::parse(R"(["transpose", {"half": 1}])"))), ElementsAre(3, 13, 4, 14, 5, 15));
  EXPECT_THAT(all(*viewed(k2x6, Json::parse(R"([{"rows": [1, 1]}])"))), ElementsAre(10, 11, 12, 13, 14, 15));
  EXPECT_THAT(all(*viewed(k2x6, Json::parse(R"([{"every": [3, 2]}])"), true)), ElementsAre(2, 5, 12, 15));
  EXPECT_THAT(all(*viewed(k2x6, Json::parse(R"([{"reshape": [3, 4]}, {"rows": [2, 1]}])"))),
              ElementsAre(12, 13, 14, 15));
}

TEST(View, OrientDecidesByShape) {
  EXPECT_EQ(all(*viewed(k2x6, Json::parse(R"([{"orient": [2, 6]}])"))), all(view_of(k2x6.view())));
  EXPECT_EQ(all(*viewed(k2x6, Json::parse(R"([{"orient": [6, 2]}])"))), all(*viewed(k2x6, {"transpose"})));
  EXPECT_THAT(refusal(viewed(k2x6, Json::parse(R"([{"orient": [6, 3]}])"))), HasSubstr("[2, 6]"));
  EXPECT_THAT(refusal(viewed(k2x6, Json::parse(R"([{"orient": [6, 6]}])"))), HasSubstr("cannot tell"));
}

TEST(View, PartsOfAGatherAreThoseOfTheWhole) {
  std::vector<float> numbers(3 * 40 * 70);
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = float(i);
  const Tensor t = tensor_f32({3, 40, 70}, numbers);
  for (const char* ops : {R"([])", R"(["transpose"])", R"(["transpose", {"every": [2, 1]}])", R"([{"half": 1}])"}) {
    const StridedView v = *viewed(t, Json::parse(ops));
    const std::vector<float> whole = all(v);
    const int64_t cols = v.dim.back();
    for (const int64_t step : {int64_t(1), int64_t(7), cols, 3 * cols, 50 * cols}) {
      std::vector<float> pieces(whole.size());
      for (int64_t at = 0; at < v.count(); at += step)
        gather(v, at, std::min(step, v.count() - at), reinterpret_cast<std::byte*>(pieces.data() + at));
      EXPECT_EQ(pieces, whole) << ops << " " << step;
    }
    int64_t i = 0;  // against the definition
    for (int64_t a = 0; a < v.dim[0]; ++a)
      for (int64_t b = 0; b < v.dim[1]; ++b)
        for (int64_t d = 0; d < v.dim[2]; ++d, ++i)
          ASSERT_EQ(whole[size_t(i)],
                    reinterpret_cast<const float*>(v.data)[a * v.stride[0] + b * v.stride[1] + d * v.stride[2]]);
  }
}

TEST(View, WhatDoesNotFitIsSaid) {
  EXPECT_THAT(refusal(viewed(k2x6, Json::parse(R"([{"rows": [1, 2]}])"))), HasSubstr("rows 1 to 2"));
  EXPECT_THAT(refusal(viewed(k2x6, Json::parse(R"([{"every": [5, 0]}])"))), HasSubstr("multiple of 5"));
  EXPECT_THAT(refusal(viewed(k2x6, Json::parse(R"(["transpose", {"reshape": [12]}])"))), HasSubstr("cannot become"));
  EXPECT_THAT(refusal(viewed(k2x6, {"flip"})), HasSubstr("flip"));
  EXPECT_THAT(refusal(viewed(tensor_f32({3}, std::vector<float>{1, 2, 3}), {"transpose"})), HasSubstr("[3]"));
}

}  // namespace
}  // namespace mi::model
