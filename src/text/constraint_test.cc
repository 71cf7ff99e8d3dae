#include "text/constraint.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>
#include <thread>

#include "base/json.h"
#include "base/util.h"

namespace mi::text {
namespace {

using testing::HasSubstr;

constexpr int64_t kVocab = 2056;  // the tokenizer's 2048, padded as embedding tables are

class ConstraintTest : public testing::Test {
 protected:
  void SetUp() override {
    auto t = Tokenizer::load(std::filesystem::path(MI_SOURCE_DIR) / "models/mini-m3/tokenizer.json");
    ASSERT_TRUE(t.ok()) << t.error().message();
    tokenizer_ = *t;
    ends_ = {tokenizer_->id_of("<|end|>"), tokenizer_->id_of("<|pad|>")};
    auto f = ConstraintFactory::make(tokenizer_, ends_, kVocab);
    ASSERT_TRUE(f.ok()) << f.error().message();
    factory_ = *f;
  }

  static std::unique_ptr<Constraint> take(Result<std::unique_ptr<Constraint>> r) { return std::move(r).value(); }
  static bool allowed(std::span<const uint32_t> mask, int64_t id) { return mask[size_t(id) / 32] >> (id % 32) & 1; }
  std::vector<uint32_t> mask_of(Constraint& c) {
    std::vector<uint32_t> mask((kVocab + 31) / 32);
    c.fill_mask(mask);
    return mask;
  }
  bool accepts(Constraint& c, std::string_view text) {
    const std::vector<int32_t> ids = *tokenizer_->encode(text, false);
    for (int32_t id : ids) {
      if (!allowed(mask_of(c), id)) return false;
      EXPECT_TRUE(c.accept(id).ok());
    }
    return true;
  }
  bool may_end(Constraint& c) { return allowed(mask_of(c), ends_[0]); }
  bool accepts_whole(Result<std::unique_ptr<Constraint>> c, std::string_view text) {
    MI_CHECK(c.ok(), "{}", c.error().message());
    return accepts(**c, text) && may_end(**c);
  }

  // Text of tokens drawn at random from the allowed ones, up to an end token or `most` tokens; "" if it didn't end.
  std::string draw(Constraint& c, uint64_t seed, int most = 400) {
    std::string text;
    for (int step = 0; step < most; ++step) {
      std::vector<uint32_t> mask((kVocab + 31) / 32);
      const bool go_on = c.fill_mask(mask);
      if (!go_on) {
        EXPECT_TRUE(c.finished());
        return text;
      }
      std::vector<int32_t> choice;
      for (int32_t id = 0; id < kVocab; ++id)
        if (allowed(mask, id)) choice.push_back(id);
      EXPECT_FALSE(choice.empty());
      if (choice.empty()) return "";
      // An end wherever it is allowed keeps the texts short.
      if (allowed(mask, ends_[0])) {
        EXPECT_TRUE(c.accept(int32_t(ends_[step % 2])).ok());
        EXPECT_TRUE(c.finished());
        return text;
      }
      const int32_t id = choice[random_u64(seed, uint64_t(step)) % choice.size()];
      EXPECT_TRUE(c.accept(id).ok());
      text += tokenizer_->token_bytes(id);
    }
    return "";
  }

  void draw_some(Constraint& c, int most) {
    std::vector<uint32_t> mask((kVocab + 31) / 32);
    for (int step = 0; step < most && c.fill_mask(mask); ++step)
      for (int32_t id = 0; id < kVocab; ++id)
        if (allowed(mask, id)) {
          EXPECT_TRUE(c.accept(id).ok());
          break;
        }
  }

  std::shared_ptr<const Tokenizer> tokenizer_;
  std::vector<int64_t> ends_;
  std::shared_ptr<const ConstraintFactory> factory_;
};

TEST_F(ConstraintTest, JsonSchema) {
  const char* schema =
      R"({"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["a", "b"]}},
                           "required": ["name", "n", "kind"], "additionalProperties": false})";
  EXPECT_TRUE(accepts_whole(factory_->json_schema(schema), R"({"name": "x", "n": 7, "kind": "b"})"));
  EXPECT_TRUE(accepts_whole(factory_->json_schema(schema), "{\n  \"name\": \"\u00e9\", \"n\": 7, \"kind\": \"b\"}"));
  for (const char* wrong : {R"({"name": "x", "n": 100)", R"({"name": "x", "n": "7")", R"({"n")", R"([)",
                            R"({"name": "x", "n": 7, "kind": "c")", R"({"name": "123456789)"})
    EXPECT_FALSE(accepts(**factory_->json_schema(schema), wrong)) << wrong;

  int ended = 0;
  for (uint64_t seed = 0; seed < 30; ++seed) {
    auto c = factory_->json_schema(schema);
    const std::string text = draw(**c, seed);
    if (text.empty()) continue;
    ++ended;
    auto j = parse_json(text, "drawn");
    ASSERT_TRUE(j.ok()) << text;
    EXPECT_EQ(j->size(), 3u) << text;
    EXPECT_TRUE((*j)["n"].is_number_integer() && (*j)["n"] >= 0 && (*j)["n"] <= 99) << text;
    EXPECT_TRUE((*j)["kind"] == "a" || (*j)["kind"] == "b") << text;
  }
  EXPECT_GT(ended, 25);
}

TEST_F(ConstraintTest, JsonObject) {
  auto c = factory_->json_object();
  EXPECT_TRUE(accepts_whole(factory_->json_object(), R"({"a": [1, {"b": null}], "c": true})"));
  EXPECT_FALSE(accepts(**c, "[1]"));
  EXPECT_FALSE(accepts(**factory_->json_object(), "text"));
}

TEST_F(ConstraintTest, BlanksComeToAnEnd) {
  auto c = take(factory_->json_object());
  ASSERT_TRUE(accepts(*c, "{"));
  int blanks = 0;
  while (blanks < 1000 && accepts(*c, "\n")) ++blanks;
  EXPECT_LT(blanks, 100);
  EXPECT_GT(blanks, 10);
  EXPECT_TRUE(accepts(*c, "}"));
}

TEST_F(ConstraintTest, Regex) {
  EXPECT_TRUE(accepts_whole(factory_->regex("[0-9]{3}-[a-z]+"), "123-abc"));
  EXPECT_FALSE(accepts(**factory_->regex("[0-9]{3}-[a-z]+"), "12-"));
  const std::regex rx("(yes|no)( [0-9]{1,3}){2}\\.");
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const std::string text = draw(**factory_->regex("(yes|no)( [0-9]{1,3}){2}\\."), seed);
    EXPECT_TRUE(std::regex_match(text, rx)) << text;
  }
  // Characters of several bytes, spelled by several tokens.
  EXPECT_TRUE(accepts_whole(factory_->regex("[\u4f60\U0001f600]+"), "\U0001f600\u4f60"));
}

TEST_F(ConstraintTest, Lark) {
  const char* grammar = "start: \"<call>\" NAME \"(\" [NUM (\",\" NUM)*] \")\"\nNAME: /[a-z]+/\nNUM: /[0-9]+/";
  EXPECT_TRUE(accepts_whole(factory_->lark(grammar), "<call>f(1,22)"));
  EXPECT_FALSE(accepts(**factory_->lark(grammar), "<call>f(1,)"));
}

TEST_F(ConstraintTest, ControlTokensOnlyWhereTheGrammarNamesThem) {
  const int32_t call = tokenizer_->id_of("<|call|>"), end_call = tokenizer_->id_of("<|endcall|>");
  auto c = take(factory_->lark("start: <|call|> /[a-z]+/ <|endcall|>"));
  auto mask = mask_of(*c);
  EXPECT_TRUE(allowed(mask, call));
  EXPECT_FALSE(allowed(mask, tokenizer_->id_of("<")));
  ASSERT_TRUE(c->accept(call).ok());
  EXPECT_TRUE(accepts(*c, "abc"));
  mask = mask_of(*c);
  EXPECT_TRUE(allowed(mask, end_call));
  EXPECT_FALSE(allowed(mask, call));
  ASSERT_TRUE(c->accept(end_call).ok());
  EXPECT_TRUE(c->finished());

  auto json = take(factory_->json_object());
  ASSERT_TRUE(accepts(*json, "{\"a"));
  mask = mask_of(*json);
  for (int32_t id = 2039; id < kVocab; ++id) EXPECT_FALSE(allowed(mask, id)) << id;
}

TEST_F(ConstraintTest, EndsOnlyWhereTheTextIsComplete) {
  auto c = take(factory_->regex("ab*"));
  EXPECT_FALSE(may_end(*c));
  EXPECT_FALSE(c->finished());
  ASSERT_TRUE(accepts(*c, "a"));
  EXPECT_TRUE(may_end(*c));  // may end, may go on
  EXPECT_FALSE(c->finished());
  EXPECT_TRUE(allowed(mask_of(*c), ends_[1]));
  ASSERT_TRUE(accepts(*c, "b"));
  ASSERT_TRUE(c->accept(int32_t(ends_[0])).ok());
  EXPECT_TRUE(c->finished());

  c = take(factory_->regex("ab"));
  ASSERT_TRUE(accepts(*c, "ab"));
  EXPECT_TRUE(c->finished());  // nothing can follow
  std::vector<uint32_t> mask((kVocab + 31) / 32);
  EXPECT_FALSE(c->fill_mask(mask));
  for (int64_t id = 0; id < kVocab; ++id) EXPECT_EQ(allowed(mask, id), id == ends_[0] || id == ends_[1]) << id;
  EXPECT_TRUE(c->accept(int32_t(ends_[1])).ok());
  EXPECT_FALSE(c->accept(5).ok());
}

TEST_F(ConstraintTest, RefusedTokenIsAnError) {
  auto c = take(factory_->regex("[0-9]+"));
  const Status s = c->accept((*tokenizer_->encode("x", false))[0]);
  ASSERT_FALSE(s.ok());
  EXPECT_THAT(s.error().message(), HasSubstr("does not allow token"));
}

TEST_F(ConstraintTest, ClonesGoTheirOwnWays) {
  auto a = take(factory_->regex("x(yy|zz)"));
  ASSERT_TRUE(accepts(*a, "x"));
  auto b = a->clone();
  EXPECT_EQ(mask_of(*a), mask_of(*b));
  std::thread other([&] { EXPECT_TRUE(accepts(*b, "zz")); });
  EXPECT_TRUE(accepts(*a, "yy"));
  other.join();
  EXPECT_TRUE(a->finished());
  EXPECT_TRUE(b->finished());
}

TEST_F(ConstraintTest, BadGrammarsAreErrors) {
  EXPECT_THAT(factory_->json_schema("{").error().message(), HasSubstr("JSON schema is not valid JSON"));
  EXPECT_THAT(factory_->json_schema("7").error().message(), HasSubstr("JSON schema"));
  EXPECT_THAT(factory_->json_schema(R"({"type": "strange"})").error().message(),
              HasSubstr("JSON schema can't be used"));
  EXPECT_THAT(
      factory_->json_schema(R"({"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}})").error().message(),
      HasSubstr("none"));
  EXPECT_THAT(factory_->json_schema(R"({"$ref": "http://elsewhere/schema.json"})").error().message(),
              HasSubstr("JSON schema can't be used"));
  EXPECT_THAT(factory_->regex("(").error().message(), HasSubstr("regex can't be used"));
  EXPECT_THAT(factory_->lark("start: nothing").error().message(), HasSubstr("grammar can't be used"));
  EXPECT_FALSE(factory_->lark("").ok());
  EXPECT_FALSE(factory_->regex("a\xff").ok());
  EXPECT_EQ(factory_->regex("(").error().code(), ErrorCode::kUsage);
}

TEST_F(ConstraintTest, HostileGrammarsEnd) {
  std::string nested(5000, '[');
  EXPECT_FALSE(factory_->json_schema(nested).ok());
  std::string deep = "{\"type\":\"integer\"}";
  for (int i = 0; i < 60; ++i) deep = "{\"type\":\"array\",\"items\":" + deep + "}";
  EXPECT_TRUE(factory_->json_schema(deep).ok());
  for (int i = 0; i < 200; ++i) deep = "{\"type\":\"array\",\"items\":" + deep + "}";
  EXPECT_FALSE(factory_->json_schema(deep).ok());
  EXPECT_FALSE(factory_->regex(std::string(100000, '(')).ok());
  EXPECT_FALSE(factory_->lark(std::string(600 << 10, 'x')).ok());
  // Accepted or not, none may hang or grow without bound: each ends, goes on, or runs into a limit.
  std::vector<Result<std::unique_ptr<Constraint>>> hostile;
  hostile.push_back(factory_->regex("((a{1,1000}){1,1000}){1,1000}"));
  hostile.push_back(factory_->regex("(a|aa|aaa|a*b)*(.*x.*y.*)*z"));
  hostile.push_back(factory_->json_schema(R"({"type": "string", "pattern": "(((x{1,500}){1,500}){1,500}){1,500}"})"));
  hostile.push_back(factory_->json_schema(
      R"({"type": "array", "minItems": 1000000, "items": {"type": "array", "minItems": 1000000}})"));
  hostile.push_back(factory_->lark("start: a\na: a a | \"x\" | \"\""));
  for (auto& c : hostile)
    if (c.ok()) draw_some(**c, 40);
}

// As long as a grammar may be: each link is one more call on the stack of whoever reads it.
TEST_F(ConstraintTest, LongChainsOfReferencesEnd) {
  for (const int links : {3000, 14000}) {
    std::string schema = R"({"$ref": "#/d/0", "d": {)", lark = "start: r0\n";
    for (int i = 0; i < links; ++i) {
      schema += fmt::format(R"("{}":{{"$ref":"#/d/{}"}},)", i, i + 1);
      lark += fmt::format("r{}: r{}\n", i, i + 1);
    }
    EXPECT_FALSE(factory_->json_schema(schema + fmt::format(R"("{}":{{"type":"string"}}}}}})", links)).ok());
    EXPECT_TRUE(factory_->lark(lark + fmt::format("r{}: \"x\"\n", links)).ok());
  }
}

TEST_F(ConstraintTest, MultiplesThatTakeForEverAreRefused) {
  const auto one = [&](const std::string& v) { return factory_->json_schema(R"({"type": "number", "multipleOf": )" + v + "}"); };
  for (const char* v : {"7", "9973", "0.01", "1e-5", "1000000", "0.25"}) EXPECT_TRUE(one(v).ok()) << v;
  for (const char* v : {"999983", "99999999", "1e300", "0.3333333333333333"}) EXPECT_THAT(one(v).error().message(), HasSubstr("multipleOf")) << v;
  EXPECT_THAT(factory_->json_schema(R"({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]})").error().message(), HasSubstr("multipleOf 9967"));
  EXPECT_TRUE(factory_->json_schema(R"({"type": "object", "properties": {"multipleOf": {"type": "string"}}})").ok());
}

TEST_F(ConstraintTest, SchemasWhoseTimeGrowsFasterThanTheyAreRefused) {
  const auto optional = [&](int n) {
    std::string members;
    for (int i = 0; i < n; ++i) members += fmt::format(R"({}"a{}": {{"type": "string"}})", i ? "," : "", i);
    return factory_->json_schema(R"({"type": "object", "additionalProperties": false, "properties": {)" + members + "}}");
  };
  EXPECT_TRUE(optional(500).ok());
  EXPECT_THAT(optional(501).error().message(), HasSubstr("501 properties that are not required; up to 500"));
  EXPECT_THAT(optional(10000).error().message(), HasSubstr("up to 500"));
  std::string patterns;
  for (int i = 0; i < 64; ++i) patterns += fmt::format(R"({}"^a{}$": {{}})", i ? "," : "", i);
  EXPECT_TRUE(factory_->json_schema(R"({"patternProperties": {)" + patterns + "}}").ok());
  EXPECT_THAT(factory_->json_schema(R"({"patternProperties": {)" + patterns + R"(, "^b": {}}})").error().message(), HasSubstr("more than 64 patternProperties"));
  EXPECT_THAT(factory_->json_schema(R"({"allOf": [{"patternProperties": {)" + patterns + R"(}}, {"patternProperties": {"^b": {}}}]})").error().message(),
              HasSubstr("more than 64 patternProperties"));
  EXPECT_THAT(factory_->json_schema(R"({"enum": [")" + std::string(600 << 10, 'x') + R"("]})").error().message(), HasSubstr("bytes; up to 524288 are accepted"));
}

// The library speaks of its options, states and limits.
TEST_F(ConstraintTest, ErrorsAreInWordsOfTheGrammar) {
  const auto error = [&](const std::string& schema) { return factory_->json_schema(schema).error().message(); };
  EXPECT_EQ(error(R"({"type": "object", "properties": {"a": {"items": {"not": {"type": "string"}}}}})"),
            "the JSON schema can't be used: not cannot be followed (at properties.a.items)");
  EXPECT_EQ(error(R"({"type": "array", "items": {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}})"),
            "the JSON schema can't be used: oneOf can be followed only where no value can be two of its choices (at items); anyOf always can");
  EXPECT_EQ(error(R"({"anyOf": [{"type": "null"}, {"type": "strange"}]})"), "the JSON schema can't be used: there is no type 'strange' (at anyOf[1])");
  EXPECT_EQ(error(R"({"properties": {"n": {"type": "number", "minimum": -1e308, "maximum": 1e308}}})"),
            "the JSON schema can't be used: the bounds of a number, minimum to maximum, are too far apart or leave nothing between them (at properties.n)");
  EXPECT_EQ(error(R"({"properties": {"a": {"$ref": "#/$defs/none"}}})"), "the JSON schema can't be used: $ref '#/$defs/none' leads nowhere (at properties.a)");
  EXPECT_EQ(error(R"({"type": "string", "minLength": 3, "maxLength": 2})"), "the JSON schema can't be used: no value can satisfy it: minLength (3) is greater than maxLength (2)");
  EXPECT_THAT(error(R"({"patternProperties": {"^a": {}, "b$": {}}})"), HasSubstr("of patternProperties only one may hold for a name, and /^a/ and /b$/ have names in common"));
  EXPECT_THAT(error(R"({"type": "string", "pattern": "(a"})"), HasSubstr("a pattern cannot be read: unclosed group"));
  EXPECT_LT(error(R"({"type": ")" + std::string(100000, 'x') + R"("})").size(), 500u);
  // A vocabulary of some letters: a word that it cannot spell.
  const int64_t end[] = {5};
  const auto few = *ConstraintFactory::make(tokenizer_, end, 100);
  auto c = few->regex("\u00e9+");
  std::string why = c.ok() ? "" : c.error().message();
  if (c.ok()) {
    std::vector<uint32_t> mask(4);
    EXPECT_FALSE((*c)->fill_mask(mask));
    why = (*c)->failure().error().message();
  }
  EXPECT_EQ(why, "the grammar can't be followed further: no token of this model can follow");
}

TEST_F(ConstraintTest, LimitsThatShowWhileDecodingAreFailures) {
  // So many ways to go on after the first letter that a row of the parser overflows.
  std::string ways, rules;
  for (int i = 0; i < 3000; ++i) {
    ways += (i ? " | r" : "r") + std::to_string(i);
    rules += "r" + std::to_string(i) + ": \"b\" \"" + std::to_string(i) + "\"\n";
  }
  auto c = take(factory_->lark("start: \"a\" rest\nrest: " + ways + "\n" + rules));
  std::vector<uint32_t> mask((kVocab + 31) / 32);
  EXPECT_TRUE(c->failure().ok());
  EXPECT_TRUE(c->fill_mask(mask));
  Status s = c->accept((*tokenizer_->encode("a", false))[0]);
  if (s.ok()) {
    EXPECT_FALSE(c->fill_mask(mask));
    s = c->failure();
  }
  ASSERT_FALSE(s.ok());
  EXPECT_THAT(s.error().message(), HasSubstr("ways to go on are open at one place of the text; 2000 are the most"));
  EXPECT_FALSE(c->clone()->failure().ok());
  // A text that is complete has not failed.
  c = take(factory_->regex("ab"));
  ASSERT_TRUE(accepts(*c, "ab"));
  EXPECT_FALSE(c->fill_mask(mask));
  EXPECT_TRUE(c->failure().ok());
}

TEST_F(ConstraintTest, FactoryArguments) {
  EXPECT_THAT(ConstraintFactory::make(tokenizer_, {}, kVocab).error().message(), HasSubstr("end token"));
  const int64_t outside[] = {kVocab};
  EXPECT_FALSE(ConstraintFactory::make(tokenizer_, outside, kVocab).ok());
  // A model with fewer logits than the tokenizer has tokens.
  const int64_t small_end[] = {5};
  auto f = ConstraintFactory::make(tokenizer_, small_end, 100);
  ASSERT_TRUE(f.ok());
  auto c = (*f)->regex("[A-Z]+");
  std::vector<uint32_t> mask(4);
  EXPECT_TRUE((*c)->fill_mask(mask));
  EXPECT_NE(mask[1], 0u);
}

}  // namespace
}  // namespace mi::text
