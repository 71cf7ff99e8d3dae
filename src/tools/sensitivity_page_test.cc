#include "tools/sensitivity_page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace mi::tools {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

quant::Candidate candidate(int32_t layer, quant::LayerFormat f, double kl) {
  quant::Candidate c;
  c.name = "layers." + std::to_string(layer) + ".moe.experts";
  c.layer = layer;
  c.format = f;
  c.error = 0.5 * kl;
  c.kl = kl;
  c.measured = f == quant::LayerFormat::kInt8;
  return c;
}

quant::Sensitivity two_layers() {
  quant::Sensitivity s;
  s.tokens = 77;
  for (const int32_t layer : {0, 1}) {
    s.candidates.push_back(candidate(layer, quant::LayerFormat::kInt8, layer == 0 ? 0.25 : 0.0625));
    s.candidates.push_back(candidate(layer, quant::LayerFormat::kInt4G64, 1));
  }
  quant::Candidate fixed = candidate(1, quant::LayerFormat::kInt8, 0.125);
  fixed.name = "layers.1.h";
  fixed.static_scale = true;
  s.candidates.push_back(fixed);
  return s;
}

TEST(SensitivityPageTest, HoldsEveryPart) {
  const std::string page = sensitivity_page("<b>m</b> & co", two_layers(), {});
  EXPECT_THAT(page, HasSubstr("&lt;b&gt;m&lt;/b&gt; &amp; co"));
  EXPECT_THAT(page, Not(HasSubstr("<b>m</b>")));
  EXPECT_THAT(page, HasSubstr("77 tokens"));
  for (const char* part : {"layers.0.moe.experts", "layers.1.moe.experts", "layers.1.h", "int4_g64", "static", "0.250000", "0.062500", "estimated from the error"})
    EXPECT_THAT(page, HasSubstr(part));
  EXPECT_THAT(page, HasSubstr("<p>None.</p>"));             // no massive activations
  EXPECT_THAT(page, Not(HasSubstr("Choices of formats")));  // no search, no front
  EXPECT_LT(page.find("<td>layers.0.moe.experts"), page.find("<td>layers.1.moe.experts"));
}

TEST(SensitivityPageTest, MassiveActivationsComeFirst) {
  quant::Sensitivity s = two_layers();
  s.peaks = {{1, "m<1>", 5000, 10, 0.5, 3}, {0, "n", 5000, 10, 0.5, 500}};  // the second is a channel that half of the rows have
  const std::string page = sensitivity_page("m", s, {});
  EXPECT_THAT(page, HasSubstr("m&lt;1&gt;"));
  EXPECT_THAT(page, HasSubstr("0.3 %"));
  EXPECT_THAT(page, Not(HasSubstr("50.0 %")));
  EXPECT_LT(page.find("<td>layers.1.moe.experts"), page.find("<td>layers.0.moe.experts"));
}

TEST(SensitivityPageTest, TheFrontInATable) {
  quant::MixedChoice a, b;
  a.seconds = 3e-6, a.bytes = 2'000'000, a.bits = 16, a.expert_bits = 16;
  b.kl = 0.5, b.seconds = 1e-6, b.bytes = 500'000, b.bits = 4.25, b.expert_bits = 4.5;
  const std::string page = sensitivity_page("m", two_layers(), {a, b});
  EXPECT_THAT(page, HasSubstr("Choices of formats"));
  EXPECT_THAT(page, HasSubstr("500.00 kB"));
  EXPECT_THAT(page, HasSubstr("4.25"));
}

}  // namespace
}  // namespace mi::tools
