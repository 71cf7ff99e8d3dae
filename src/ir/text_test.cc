#include <fmt/format.h>

#include "ir/testing.h"

namespace mi::ir {
namespace {

using testing::graph_text;
using testing::legal_graph;
using testing::model_text;

std::string error_of(const std::string& text) {
  const auto g = parse(text);
  return g.ok() ? "no error" : g.error().message();
}

TEST(Text, RoundTripsExactly) {
  const Graph g = legal_graph(graph_text("m3_small.mir"));
  const std::string once = print(g);
  const Graph again = legal_graph(once);
  EXPECT_TRUE(again == g);
  EXPECT_EQ(print(again), once);
}

TEST(Text, RoundTripsWhatIsRare) {
  Graph g = legal_graph(model_text(R"(
    block a.b-c layers = 0..2, 4, 7..8 {
      input weight : f32[T, 8]
      weight output : w4a8_g64 [8, 8] dense
      weight attention : f16 [8]
      input, output = rms_norm weight, weight=attention {eps=1.25e-07 plus_one=true} : f32[T, 8], q8[T, 8]
      layers = linear output, input, weight=output {out_scale=0.1} : f32[T, 8]
      output layers
    }
    block d layers = 3, 5..6 { input x : f32[T, 8]  y = clamp x {lo=-3.4028235e+38 hi=7} : f32[T, 8]  output y })",
                                   9));
  g.info.name = "a \"quoted\" \\ name\n\x01 \xc3\xa4";
  g.info.eos_ids = {1, 2, 3};
  g.info.max_positions = INT64_MAX;
  const auto again = parse(print(g));
  ASSERT_TRUE(again.ok()) << again.error().message();
  EXPECT_TRUE(*again == g) << print(g) << print(*again);
  EXPECT_EQ(again->blocks[0].layers, (std::vector<int32_t>{0, 1, 2, 4, 7, 8}));
}

TEST(Text, PrintsStackedWeightsFormatsAndMarks) {
  const std::string text = print(legal_graph(model_text(R"(block a layers = 0 {
    input x : f32[T, 8]
    weight q : w8a8 [4, 8] attention
    weight k : w8a8 [4, 8] attention
    weight w : w4a8_g128 [8, 8]
    xq = quantize x : q8[T, 8]
    y = linear xq, weight=[q, k] : f32[T, 8]
    yq = quantize y : q8[T, 8]
    z = linear yq, weight=w : f32[T, 8]
    output z })")));
  EXPECT_NE(text.find("  weight w : w4a8_g128 [8, 8]\n"), text.npos) << text;
  EXPECT_NE(text.find("  weight q : w8a8 [4, 8] attention\n"), text.npos) << text;
  EXPECT_NE(text.find("  y  = linear xq, weight=[q, k] : f32[T, 8]\n"), text.npos) << text;
}

TEST(Text, PrintsIllegalBlocksForDebugging) {
  Graph g;
  g.prologue.nodes.push_back(Node{Op::kAdd, {7, -1}, {3}, {{Role::kWeight, {9}}}, AddParams{}});
  EXPECT_NE(print(g).find("?3 = add ?7, ?-1, weight=?9 : ?"), std::string::npos) << print(g);
}

TEST(Text, ErrorsNameThePlaceAndWhatWasExpected) {
  EXPECT_EQ(error_of(""), "line 1, column 1: expected 'mir', found the end");
  EXPECT_EQ(error_of("mir 2"),
            "line 1, column 5: expected format version 1 (a newer metainfer wrote this?), found '2'");
  EXPECT_EQ(error_of("mir 1\nmodel \"x\n\""), "line 2, column 7: the string has no closing quote");
  EXPECT_EQ(error_of("mir 1 # comment\n  model \"x\" { vocal=3 }"),
            "line 2, column 15: unknown key 'vocal' (did you mean 'vocab'?)");
  EXPECT_EQ(error_of("mir 1 model \"x\" { vocab=3 vocab=3 }"), "line 1, column 27: 'vocab' is there twice");
  EXPECT_EQ(error_of("mir 1 model \"x\" { vocab=99999999999999999999 }"),
            "line 1, column 25: expected a number, found '99999999999999999999'");
  EXPECT_EQ(error_of("mir 1 model \"\\q\" { }"),
            "line 1, column 13: unknown escape in a string; known are \\\", \\\\ and \\xHH");
  EXPECT_EQ(error_of("mir 1 model \"\\x4\" { }"),
            "line 1, column 13: unknown escape in a string; known are \\\", \\\\ and \\xHH");
  EXPECT_EQ(error_of("mir 1 \x01"), "line 1, column 7: unexpected character 0x01");
}

// Errors inside a block; the statement stands at column 1 of line 2.
std::string error_in_block(const std::string& statement) {
  return error_of("mir 1 model \"x\" { } prologue { input x : f32[T, 8] weight w : f32 [8] norm\n" + statement +
                  "\n} epilogue { }");
}

TEST(Text, ErrorsInsideBlocks) {
  EXPECT_EQ(error_in_block("y = rms_nrom x : f32[T, 8]"),
            "line 2, column 5: unknown op 'rms_nrom' (did you mean 'rms_norm'?)");
  EXPECT_EQ(error_in_block("y = scale z : f32[T, 8]"), "line 2, column 11: value 'z' is not defined before here");
  EXPECT_EQ(error_in_block("y = rms_norm x, weight=v : f32[T, 8]"),
            "line 2, column 24: weight 'v' is not declared before here");
  EXPECT_EQ(error_in_block("x = scale x : f32[T, 8]"), "line 2, column 1: value 'x' is defined twice");
  EXPECT_EQ(error_in_block("weight w : f32 [8]"), "line 2, column 8: weight 'w' is declared twice");
  EXPECT_EQ(error_in_block("weight v : int4 [8]"),
            "line 2, column 12: unknown weight format 'int4'; known are f32, bf16, f16, w8a8, w4a8_g32, w4a8_g64, w4a8_g128");
  EXPECT_NE(error_in_block("weight v : w4a8_g16 [8, 8]").find("unknown weight format 'w4a8_g16'"), std::string::npos);
  EXPECT_EQ(error_in_block("weight v : f32 [8] wonderful"),
            "line 2, column 20: expected a mark (attention, expert, ...) or a statement, found 'wonderful'");
  EXPECT_EQ(error_in_block("y = scale x {factor=2 facter=2} : f32[T, 8]"),
            "line 2, column 13: scale has no field 'facter' (did you mean 'factor'?)");
  EXPECT_EQ(error_in_block("y = scale x {factor=two} : f32[T, 8]"),
            "line 2, column 13: scale: factor must be a finite number");
  EXPECT_EQ(error_in_block("y = scale x : f33[T, 8]"),
            "line 2, column 15: unknown element type 'f33'; known are f32, q8, i32, route, state");
  EXPECT_EQ(error_in_block("y = scale x : f32[Q, 8]"),
            "line 2, column 19: expected T, P or L, the kind of rows, found 'Q'");
  EXPECT_EQ(error_in_block("y = scale x"), "line 3, column 1: expected ',', found '}'");
  EXPECT_EQ(error_in_block("y = rms_norm weight=w, x : f32[T, 8]"),
            "line 2, column 24: expected a role such as weight=..., values come first, found 'x'");
  EXPECT_EQ(error_in_block("y = rms_norm x, wait=w : f32[T, 8]"), "line 2, column 17: unknown weight role 'wait'");
}

TEST(Text, BoundsWhatAnInputMayAskFor) {
  EXPECT_EQ(error_of("mir 1 model \"x\" { } prologue { } block a layers = 0..99999999999 { } epilogue { }"),
            "line 1, column 51: expected layers such as 3 or 0..2, found '0..99999999999'");
  std::string many = "mir 1 model \"x\" { } prologue { }";
  for (int i = 0; i < 3; ++i) many += fmt::format(" block a{} layers = 0..49999 {{ }}", i);
  EXPECT_NE(error_of(many + " epilogue { }").find("more than 100000 layers"), std::string::npos);
  EXPECT_NE(error_of(std::string((size_t(16) << 20) + 1, ' ')).find("bytes"), std::string::npos);
}

// Whatever is cut off or exchanged, the parser answers.
TEST(Text, SurvivesDamage) {
  const std::string text = graph_text("m3_small.mir");
  for (size_t n = 0; n < text.size(); n += 7) (void)parse(std::string_view(text).substr(0, n)).ok();
  const std::string_view junk = "{}[],:=\"\\#x0 -\n";
  for (size_t n = 0; n < text.size(); n += 3) {
    std::string t = text;
    t[n] = junk[n / 3 % junk.size()];
    const auto g = parse(t);
    if (!g.ok()) continue;
    (void)verify(*g).ok();
    const auto again = parse(print(*g));
    ASSERT_TRUE(again.ok()) << again.error().message();
    EXPECT_TRUE(*again == *g) << t;
  }
}

}  // namespace
}  // namespace mi::ir
