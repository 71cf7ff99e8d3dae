// What texts are made of, and what is said about a calibration set.
#include "quant/mix.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace mi::quant {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

std::shared_ptr<const text::Tokenizer> tokenizer() {
  static const auto t = text::Tokenizer::load(Path(MI_SOURCE_DIR) / "models/mini-m3/tokenizer.json").value();
  return t;
}
Sequences sequences(const std::vector<std::string>& texts) {
  Sequences s;
  for (const std::string& t : texts) s.push_back(tokenizer()->encode(t, false).value());
  return s;
}
Mix mix(const std::vector<std::string>& texts) { return mix_of(sequences(texts), *tokenizer()); }
double share(const Mix& m, TextKind k) { return m.kinds[size_t(k)]; }

const std::string kProse = "The captain looked at the sea and said that the weather would be better tomorrow.\n";
const std::string kCjk = "今天的天气很好，我们去公园散步吧。\n";
const std::string kRussian = "Сегодня хорошая погода, пойдём гулять в парк.\n";
const std::string kCode = "for (int i = 0; i < n; ++i) { sum += values[i] * weights[i]; }\n";
const std::string kJson = "{\"name\": \"Anna\", \"city\": \"Oslo\", \"tags\": [\"a\", \"b\"]}\n";
const std::string kNumbers = "12.5 17 2048 99 1031 7\n";

TEST(KindOfLineTest, EachKind) {
  EXPECT_EQ(kind_of_line(kProse), TextKind::kLatin);
  EXPECT_EQ(kind_of_line("Größe, naïve, façade"), TextKind::kLatin);
  EXPECT_EQ(kind_of_line(kCjk), TextKind::kCjk);
  EXPECT_EQ(kind_of_line("한국어 문장"), TextKind::kCjk);
  EXPECT_EQ(kind_of_line(kRussian), TextKind::kOtherScript);
  EXPECT_EQ(kind_of_line(kCode), TextKind::kCode);
  EXPECT_EQ(kind_of_line(kJson), TextKind::kStructure);
  EXPECT_EQ(kind_of_line("| a | b | c |"), TextKind::kStructure);
  EXPECT_EQ(kind_of_line(kNumbers), TextKind::kNumbers);
  EXPECT_EQ(kind_of_line(""), TextKind::kLatin);
  EXPECT_EQ(kind_of_line("  \t"), TextKind::kLatin);
  EXPECT_NO_FATAL_FAILURE(kind_of_line("\xff\xfe\xe4\xbb"));  // broken and cut characters
}

TEST(MixTest, SharesOfCharactersAndLengths) {
  // 84 and 84 characters: two lines of the same length, of two kinds.
  const std::string code(80, '='), prose(80, 'a');
  const Mix m = mix({prose + "\n" + code + "\n", prose, code});
  EXPECT_DOUBLE_EQ(share(m, TextKind::kLatin), 0.5);
  EXPECT_DOUBLE_EQ(share(m, TextKind::kCode), 0.5);
  EXPECT_EQ(m.sequences, 3);
  EXPECT_GT(m.tokens, 3);
  double sum = 0;
  for (double l : m.lengths) sum += l;
  EXPECT_DOUBLE_EQ(sum, 1);

  // A sequence of n tokens counts in the first class that holds n.
  const Mix lengths = mix_of({std::vector<int32_t>(16, 40), std::vector<int32_t>(17, 40), std::vector<int32_t>(64, 40), std::vector<int32_t>(5000, 40)}, *tokenizer());
  EXPECT_THAT(lengths.lengths, ElementsAre(0.25, 0.5, 0, 0, 0, 0.25));
  EXPECT_EQ(lengths.tokens, 16 + 17 + 64 + 5000);

  const Mix none = mix_of({}, *tokenizer());
  EXPECT_THAT(none.kinds, ::testing::Each(0));
  EXPECT_THAT(none.lengths, ::testing::Each(0));
}

TEST(MixTest, Distance) {
  EXPECT_DOUBLE_EQ(mix_distance(mix({kProse}), mix({kProse + kProse})), 0);
  EXPECT_DOUBLE_EQ(mix_distance(mix({kProse}), mix({kCjk})), 1);
  EXPECT_DOUBLE_EQ(mix_distance(mix({kProse}), mix({kCjk})), mix_distance(mix({kCjk}), mix({kProse})));
  const std::string code(80, '='), prose(80, 'a');
  EXPECT_DOUBLE_EQ(mix_distance(mix({prose}), mix({prose, code})), 0.5);
}

TEST(JudgeMixTest, ASetOfOneKindIsNamed) {
  for (const auto& [text, name] : {std::pair(kProse, "latin text"), {kCjk, "CJK text"}, {kRussian, "other scripts"}, {kCode, "code"}, {kJson, "structure"}, {kNumbers, "numbers"}}) {
    const auto warnings = judge_mix(mix({text, text}), nullptr);
    ASSERT_EQ(warnings.size(), 1u) << name;
    EXPECT_THAT(warnings[0], HasSubstr("one-sided"));
    EXPECT_THAT(warnings[0], HasSubstr(std::string("100 % of it is ") + name));
    EXPECT_THAT(warnings[0], HasSubstr("--traffic"));
  }
  EXPECT_THAT(judge_mix(mix({kProse, kCjk, kCode, kJson}), nullptr), IsEmpty());
  // Nine tenths of one kind is one-sided, a little less is not.
  const std::string ten(10, 'a'), code(10, '=');
  const auto tenths = [&](int prose) {
    std::string text;
    for (int i = 0; i < 100; ++i) text += (i < prose ? ten : code) + "\n";
    return judge_mix(mix({text}), nullptr);
  };
  EXPECT_EQ(tenths(91).size(), 1u);
  EXPECT_EQ(tenths(89).size(), 0u);
}

TEST(JudgeMixTest, AgainstTraffic) {
  const Mix same = mix({kProse, kCode});
  EXPECT_THAT(judge_mix(same, &same), IsEmpty());
  // One-sided, and so is the traffic: nothing to say.
  const Mix prose = mix({kProse});
  EXPECT_THAT(judge_mix(prose, &prose), IsEmpty());

  const Mix chinese = mix({kCjk});
  auto warnings = judge_mix(prose, &chinese);
  ASSERT_EQ(warnings.size(), 2u);
  EXPECT_THAT(warnings[0], HasSubstr("differs from the traffic: 100 % of it"));
  EXPECT_THAT(warnings[1], HasSubstr("the traffic is 100 % CJK text, the calibration set only 0.0 %"));

  // A tenth of the traffic is code that calibration never saw: too little to differ, and named all the same.
  const std::string ten(10, 'a'), code(10, '=');
  std::string text, only_prose;
  for (int i = 0; i < 100; ++i) text += (i < 90 ? ten : code) + "\n", only_prose += ten + "\n";
  const Mix some_code = mix({text});
  warnings = judge_mix(mix({only_prose}), &some_code);
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_THAT(warnings[0], HasSubstr("the traffic is 10 % code"));
  EXPECT_THAT(judge_mix(mix({kProse + kProse, kProse + kCode}), &prose), IsEmpty());  // more than the traffic has is no fault
}

TEST(JudgeMixTest, LongerTraffic) {
  const Mix shorter = mix_of({std::vector<int32_t>(60, 40)}, *tokenizer()), longer = mix_of({std::vector<int32_t>(900, 40)}, *tokenizer());
  const auto warnings = judge_mix(shorter, &longer);
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_THAT(warnings[0], HasSubstr("longer prompts"));
  EXPECT_THAT(warnings[0], HasSubstr("calibration_length"));
  EXPECT_THAT(judge_mix(longer, &shorter), IsEmpty());
  // One long prompt in a hundred does not count.
  Sequences many(100, std::vector<int32_t>(60, 40));
  many[0].resize(900, 40);
  const Mix rarely = mix_of(many, *tokenizer());
  EXPECT_THAT(judge_mix(shorter, &rarely), IsEmpty());
}

TEST(MixTest, InWordsAndJson) {
  const std::string code(75, '='), prose(25, 'a');
  const Mix m = mix({prose + "\n" + code});
  EXPECT_EQ(mix_text(m), "25 % latin text, 75 % code");
  const Json j = mix_json(m);
  EXPECT_EQ(j["kinds"]["code"], 0.75);
  EXPECT_EQ(j["kinds"]["numbers"], 0);
  EXPECT_EQ(j["sequences"], 1);
  EXPECT_THAT(mix_text(m), Not(HasSubstr("numbers")));
}

}  // namespace
}  // namespace mi::quant
