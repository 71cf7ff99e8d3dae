#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <fstream>

#include "base/counted.h"
#include "base/file.h"
#include "base/json.h"
#include "base/place.h"
#include "base/temp_dir.h"
#include "base/utf8.h"
#include "base/util.h"

namespace mi {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class Files : public testing::Test {
 protected:
  void put(const std::string& name, const std::string& text) { std::ofstream(dir_ / name) << text; }
  std::string get(const fs::path& p) { return read_file(p).value(); }
  size_t entries() const { return size_t(std::distance(fs::directory_iterator(dir_), fs::directory_iterator())); }
  const TempDir folder_;
  const fs::path dir_ = folder_.path();
};

TEST(ResultTest, CarriesValueOrErrorWithContext) {
  const auto half = [](int x) -> Result<int> {
    if (x % 2) return bad_input("{} is odd", x);
    return x / 2;
  };
  const auto quarter = [&](int x) -> Result<int> {
    MI_TRY(const int h, half(x));
    return half(h);
  };
  EXPECT_EQ(*quarter(8), 2);
  EXPECT_EQ(quarter(6).error().message(), "3 is odd");
  EXPECT_EQ(quarter(6).error().with_context("a").message(), "a: 3 is odd");
  EXPECT_EQ(quarter(6).error().code(), ErrorCode::kBadInput);
}

TEST(CheckDeathTest, PrintsBothValues) { EXPECT_DEATH(MI_CHECK_EQ(1 + 1, 3), "2 vs 3"); }

TEST_F(Files, AnOutputIsOutsideOfItsInput) {
  fs::create_directories(dir_ / "model" / "weights");
  fs::create_symlink(dir_ / "model", dir_ / "link");
  for (const char* inside : {"model", "model/", "model/new", "link", "link/new", "model/../model/weights/new", "other/../model"})
    EXPECT_THAT(check_outside(dir_ / "model", dir_ / inside).error().message(), HasSubstr("own folder")) << inside;
  EXPECT_FALSE(check_outside(dir_ / "model/", dir_ / "model").ok());
  EXPECT_FALSE(check_outside(dir_ / "link", dir_ / "model/x").ok());
  EXPECT_THAT(check_outside(dir_ / "model/weights", dir_ / "model").error().message(), HasSubstr("inside the output"));
  for (const char* outside : {"model2", "mode", "new", "model/../new"}) EXPECT_TRUE(check_outside(dir_ / "model", dir_ / outside).ok()) << outside;
  EXPECT_TRUE(check_outside(dir_ / "model", "").ok());
  EXPECT_EQ(beside("a/out/", ".piece"), Path("a/out.piece"));
  EXPECT_EQ(beside("a/out", ".piece"), Path("a/out.piece"));
}

TEST_F(Files, ReadRefusesWhatIsNoRegularFile) {
  EXPECT_THAT(read_file(dir_).error().message(), HasSubstr("not a regular file"));
  EXPECT_THAT(read_file(dir_ / "none").error().message(), HasSubstr("no such file"));
  ASSERT_EQ(mkfifo((dir_ / "fifo").c_str(), 0600), 0);
  EXPECT_THAT(read_file(dir_ / "fifo").error().message(), HasSubstr("not a regular file"));      // and does not wait
  EXPECT_THAT(MappedFile::open(dir_ / "fifo").error().message(), HasSubstr("not a regular file"));
  put("a", "12345");
  EXPECT_THAT(read_file(dir_ / "a", 4).error().message(), HasSubstr("limit of 4"));
  EXPECT_EQ(get(dir_ / "a"), "12345");
}

TEST_F(Files, MapsEmptyAndFull) {
  put("empty", "");
  EXPECT_TRUE(MappedFile::open(dir_ / "empty")->bytes().empty());
  put("a", "hello");
  const auto m = MappedFile::open(dir_ / "a");
  EXPECT_EQ(m->bytes().size(), 5u);
  EXPECT_EQ(char(m->bytes()[1]), 'e');
}

TEST_F(Files, WriterPadsAndPatches) {
  auto w = FileWriter::create(dir_ / "w").value();
  ASSERT_TRUE(w.write("abc").ok());
  ASSERT_TRUE(w.pad_to(8).ok());
  EXPECT_EQ(w.offset(), 8u);
  ASSERT_TRUE(w.write(std::string(3 << 20, 'x')).ok());
  ASSERT_TRUE(w.write_at(1, std::as_bytes(std::span("Z", 1))).ok());
  ASSERT_TRUE(w.finish().ok());
  const std::string s = get(dir_ / "w");
  EXPECT_EQ(s.substr(0, 8), std::string("aZc\0\0\0\0\0", 8));
  EXPECT_EQ(s.size(), 8u + (3u << 20));
}

TEST_F(Files, FullDiskIsSaid) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "skipped: no /dev/full here";
  auto w = FileWriter::create("/dev/full").value();
  ASSERT_TRUE(w.write("x").ok());
  const Status s = w.finish();
  ASSERT_FALSE(s.ok());
  EXPECT_EQ(s.error().code(), ErrorCode::kEnvironment);
  EXPECT_THAT(s.error().message(), HasSubstr("disk is full"));
}

TEST_F(Files, OutputAppearsWholeOrNotAtAll) {
  {
    auto d = OutputDir::create(dir_ / "out", false).value();
    ASSERT_TRUE(write_file(d.path() / "model.mir", "1").ok());
    EXPECT_FALSE(fs::exists(dir_ / "out"));
  }
  EXPECT_EQ(entries(), 0u);
  auto d = OutputDir::create(dir_ / "out/", false).value();     // a trailing slash is no other name
  ASSERT_TRUE(write_file(d.path() / "model.mir", "1").ok());
  ASSERT_TRUE(d.commit().ok());
  EXPECT_EQ(get(dir_ / "out" / "model.mir"), "1");
  EXPECT_EQ(entries(), 1u);
}

TEST_F(Files, ExistingOutputIsRefusedOrSwapped) {
  fs::create_directory(dir_ / "out");
  put("out/model.mir", "old");
  EXPECT_THAT(OutputDir::create(dir_ / "out", false).error().message(), HasSubstr("--force"));
  auto d = OutputDir::create(dir_ / "out", true).value();
  ASSERT_TRUE(write_file(d.path() / "model.mir", "new").ok());
  EXPECT_EQ(get(dir_ / "out" / "model.mir"), "old");
  ASSERT_TRUE(d.commit().ok());
  EXPECT_EQ(get(dir_ / "out" / "model.mir"), "new");
  EXPECT_EQ(entries(), 1u);
}

TEST_F(Files, ForceSparesWhatIsNotOurs) {
  fs::create_directory(dir_ / "home");
  put("home/thesis.txt", "years of work");
  EXPECT_THAT(OutputDir::create(dir_ / "home", true).error().message(), HasSubstr("not written by metainfer"));
  put("file", "x");
  EXPECT_FALSE(OutputDir::create(dir_ / "file", true).ok());
  EXPECT_THAT(OutputDir::create(dir_ / "no" / "where", false).error().message(), HasSubstr("does not exist"));
}

TEST_F(Files, OutputThatAppearedMeanwhileIsNotReplaced) {
  auto d = OutputDir::create(dir_ / "out", false).value();
  fs::create_directory(dir_ / "out");
  put("out/x", "other");
  EXPECT_FALSE(d.commit().ok());
  EXPECT_EQ(get(dir_ / "out" / "x"), "other");
}

TEST_F(Files, SignalRemovesUnfinishedOutputs) {
  for (int sig : {SIGINT, SIGTERM}) {
    const pid_t child = fork();
    if (child == 0) {
      remove_outputs_on_signal();
      auto d = OutputDir::create(dir_ / "out", false).value();
      (void)write_file(d.path() / "model.mir", "1");
      kill(getpid(), sig);
      sleep(20);
      _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    ASSERT_TRUE(WIFEXITED(status));
    EXPECT_EQ(WEXITSTATUS(status), 128 + sig);
    EXPECT_EQ(entries(), 0u);
  }
}

TEST_F(Files, WhatKillLeftIsClearedByTheNextRun) {
  const pid_t child = fork();
  if (child == 0) {
    auto d = OutputDir::create(dir_ / "out", false).value();
    kill(getpid(), SIGKILL);
  }
  waitpid(child, nullptr, 0);
  EXPECT_EQ(entries(), 1u);
  auto d = OutputDir::create(dir_ / "out", false).value();
  ASSERT_TRUE(d.commit().ok());
  EXPECT_EQ(entries(), 1u);
  EXPECT_TRUE(fs::exists(dir_ / "out"));
}

TEST_F(Files, LeftoversGoWhateverTheirProcessNumber) {
  // In a container the next run may have the number of the one that was killed.
  for (const std::string& name : {fmt::format(".out.tmp-{}-0", getpid()), std::string(".out.tmp-1-0"), std::string(".other.tmp-1-0")}) {
    fs::create_directory(dir_ / name);
    put(name + "/part", "x");
  }
  auto live = OutputDir::create(dir_ / "out", false).value();
  EXPECT_EQ(entries(), 2u);                                 // ours, and what belongs to another output
  auto second = OutputDir::create(dir_ / "out", false).value();
  EXPECT_TRUE(fs::exists(live.path()));                     // a live one is no leftover
  EXPECT_NE(live.path(), second.path());
}

TEST_F(Files, OutputFileAppearsWholeOrNotAtAll) {
  {
    auto f = OutputFile::create(dir_ / "report.json", false).value();
    ASSERT_TRUE(f.writer().write("half").ok());
  }
  EXPECT_EQ(entries(), 0u);
  for (const bool force : {false, true}) {
    auto f = OutputFile::create(dir_ / "report.json", force).value();
    ASSERT_TRUE(f.writer().write(force ? "second" : "first").ok());
    ASSERT_TRUE(f.commit().ok());
    EXPECT_EQ(get(dir_ / "report.json"), force ? "second" : "first");
    EXPECT_EQ(entries(), 1u);
  }
  EXPECT_THAT(OutputFile::create(dir_ / "report.json", false).error().message(), HasSubstr("--force"));
  fs::create_directory(dir_ / "folder");
  EXPECT_THAT(OutputFile::create(dir_ / "folder", true).error().message(), HasSubstr("not a regular file"));
}

TEST_F(Files, ProcFilesAreReadToTheirEnd) { EXPECT_THAT(get("/proc/self/stat"), HasSubstr(std::to_string(getpid()))); }

TEST(JsonTest, ErrorsNameTheSourceAndThePlace) {
  EXPECT_THAT(parse_json("{\"a\": 1,\n \"b\" 2}", "config.json").error().message(), testing::AllOf(HasSubstr("config.json"), HasSubstr("line 2")));
  EXPECT_THAT(parse_json("{\"a\": 1, \"a\": 2}", "x").error().message(), HasSubstr("'a' occurs twice"));
  EXPECT_FALSE(parse_json("", "x").ok());
  EXPECT_FALSE(parse_json("{} x", "x").ok());
  EXPECT_THAT(parse_json("[1, 1e999]", "x").error().message(), HasSubstr("1e999"));
  EXPECT_LT(parse_json("[\"" + std::string(100000, 'a'), "x").error().message().size(), 500u);     // quotes only a part
}

TEST(JsonTest, ValuesAreCounted) {
  JsonLimits limits;
  limits.max_values = 5;
  const std::string five = R"([1, {"a": null, "b": "x"}])";
  EXPECT_TRUE(parse_json(five, "x", limits).ok());
  EXPECT_EQ(parse_json("[" + five + "]", "x", limits).error().message(), "x: JSON of more than 5 values");
  EXPECT_FALSE(parse_json("[[], [], [], [], []]", "x", limits).ok());
}

TEST(JsonTest, LastDuplicateCountsWhereAllowed) {
  JsonLimits limits;
  limits.refuse_duplicate_keys = false;
  EXPECT_EQ(parse_json(R"({"a": 1, "b": 2, "a": {"c": 3, "c": 4}})", "x", limits)->dump(), R"({"a":{"c":4},"b":2})");
}

TEST(JsonTest, MembersOneByOne) {
  std::string seen;
  const auto collect = [&](std::string key, Json value) -> Status {
    seen += key + value.dump() + ";";
    if (key == "stop") return bad_input("stopped");
    return {};
  };
  EXPECT_TRUE(parse_json_members(R"({"a": 1, "b": {"x": [2]}, "c": []})", "x", {}, collect).ok());
  EXPECT_EQ(seen, "a1;b{\"x\":[2]};c[];");
  EXPECT_EQ(parse_json_members(R"({"stop": 1, "b": 2})", "x", {}, collect).error().message(), "stopped");
  EXPECT_THAT(parse_json_members(R"({"a": 1, "a": 2})", "x", {}, collect).error().message(), HasSubstr("'a' occurs twice"));
  for (const char* no_object : {"[]", "3", "null"}) EXPECT_THAT(parse_json_members(no_object, "x", {}, collect).error().message(), HasSubstr("expected an object"));
}

TEST(JsonTest, DepthAndSizeAreBounded) {
  for (int depth : {1000, 100000, 3000000}) EXPECT_THAT(parse_json(std::string(size_t(depth), '['), "x").error().message(), HasSubstr("nested"));
  EXPECT_TRUE(parse_json("\"[[[[[[[\\\"[[[\"", "x", {100, 2, true}).ok());      // brackets in a string are none
  EXPECT_FALSE(parse_json("[1,2,3,4]", "x", {4, 10, true}).ok());
}

TEST(JsonTest, TypedAccess) {
  const Json j = parse_json(R"({"i": 3, "f": 1.5, "s": "x", "n": null, "l": [1, 2], "big": 18446744073709551615})", "j").value();
  EXPECT_EQ(*json_get<int64_t>(j, "i", "j"), 3);
  EXPECT_EQ(*json_get<double>(j, "i", "j"), 3.0);
  EXPECT_EQ(*json_get_or<int64_t>(j, "n", 7, "j"), 7);
  EXPECT_EQ(*json_get_or<int64_t>(j, "none", 7, "j"), 7);
  EXPECT_THAT(json_get<int64_t>(j, "f", "j").error().message(), HasSubstr("j: f: expected an integer, found a fractional number"));
  EXPECT_THAT(json_get<int64_t>(j, "s", "j").error().message(), HasSubstr("found a string"));
  EXPECT_FALSE(json_get<int64_t>(j, "big", "j").ok());
  EXPECT_EQ(json_get<std::vector<int64_t>>(j, "l", "j")->size(), 2u);
  EXPECT_THAT(json_get<bool>(j, "none", "j").error().message(), HasSubstr("none is missing"));
}

TEST(JsonTest, UnknownKeysAndNearestNames) {
  const Json j = parse_json(R"({"alhpa": 1})", "j").value();
  EXPECT_THAT(refuse_unknown_keys(j, {"alpha", "enable"}, "j").error().message(), HasSubstr("did you mean 'alpha'"));
  EXPECT_EQ(nearest_name("mixtrall", {"mixtral", "llama"}), "mixtral");
  EXPECT_EQ(nearest_name("zzzzzz", {"mixtral", "llama"}), "");
  EXPECT_EQ(nearest_name("abc", {"axy"}), "");
}

TEST(JsonTest, DumpNeverThrows) { EXPECT_THAT(dump_json(Json("a\xff")), HasSubstr("\xef\xbf\xbd")); }

TEST(Utf8Test, BrokenBytesAreReplacedOneByOne) {
  EXPECT_EQ(clean_utf8("a\u00e9\u20ac\U0001f600"), "a\u00e9\u20ac\U0001f600");
  const std::string bad = "\xef\xbf\xbd";
  EXPECT_EQ(clean_utf8("\xff"), bad);
  EXPECT_EQ(clean_utf8("\xc0\xaf"), bad + bad);                // overlong
  EXPECT_EQ(clean_utf8("\xed\xa0\x80"), bad + bad + bad);      // surrogate
  EXPECT_EQ(clean_utf8("\xf4\x90\x80\x80x"), bad + bad + bad + bad + "x");
  EXPECT_EQ(clean_utf8("x\xe2\x82"), "x" + bad + bad);         // cut off
}

TEST(Utf8Test, LongTextIsCutBetweenCharacters) {
  EXPECT_EQ(shortened("", 3), "");
  EXPECT_EQ(shortened("abc", 3), "abc");
  EXPECT_EQ(shortened("abcd", 3), "ab…");
  EXPECT_EQ(shortened("\u00e9\u20ac\U0001f600x", 3), "\u00e9\u20ac…");
  EXPECT_EQ(shortened("\xff\xff\xff\xff", 2), "\xef\xbf\xbd…");
  EXPECT_EQ(shortened(std::string(64, 'a')), std::string(64, 'a'));
  EXPECT_EQ(shortened(std::string(65, 'a')), std::string(63, 'a') + "…");
  EXPECT_EQ(shortened("ab", 1), "…");
}

TEST(UtilTest, SizesAndTimes) {
  EXPECT_EQ(human_bytes(12884901888.0), "12.88 GB");
  EXPECT_EQ(human_bytes(999), "999 B");
  EXPECT_EQ(human_bytes(999999), "1.00 MB");
  EXPECT_EQ(human_seconds(0.85), "850 ms");
  EXPECT_EQ(human_seconds(125), "2 min 5 s");
  EXPECT_EQ(counted(1, "thread") + ", " + counted(0, "round") + ", " + counted(2, "step"), "1 thread, 0 rounds, 2 steps");
}

TEST(UtilTest, HashesAndRandomNumbersAreTheSameEverywhere) {
  EXPECT_EQ(xxh3_hex({}), "99aa06d3014798d86001c324468d497f");     // XXH3-128 of nothing, from the reference's test vectors
  Xxh3 h;
  h.update(std::as_bytes(std::span("ab", 2)));
  h.update(std::as_bytes(std::span("c", 1)));
  EXPECT_EQ(h.digest(), xxh3_hex(std::as_bytes(std::span("abc", 3))));
  EXPECT_EQ(random_u64(1, 2), random_u64(1, 2));
  EXPECT_NE(random_u64(1, 2), random_u64(2, 1));
  double mean = 0, square = 0;
  for (uint64_t i = 0; i < 20000; ++i) {
    const double x = random_normal(3, i);
    mean += x / 20000;
    square += x * x / 20000;
  }
  EXPECT_NEAR(mean, 0, 0.03);
  EXPECT_NEAR(square, 1, 0.05);
}

}  // namespace
}  // namespace mi
