#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <fstream>

#include "base/temp_dir.h"
#include "base/util.h"
#include "exec/test_model.h"
#include "tools/bench/against.h"
#include "tools/bench/compare.h"
#include "tools/bench/history.h"
#include "tools/testing.h"

namespace mi::tools {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

BenchRow gate_row(const std::string& metric, int64_t n, std::vector<double> tok_s) {
  BenchRow r{metric, n, {}};
  for (double v : tok_s) r.rounds.push_back({v, 100 / v, metric == "prefill" ? 0 : v / 2});
  return r;
}

// Seven rounds around a speed, a few percent apart.
std::vector<double> rounds(double middle, uint64_t seed = 1, double spread = 0.04) {
  std::vector<double> v;
  for (uint64_t i = 0; i < 7; ++i) v.push_back(middle * (1 + spread * (double(random_unit(seed, i)) - 0.5)));
  return v;
}

BenchRecord record(double prefill = 900, double decode = 60) {
  BenchRecord r;
  r.version = "metainfer 0.1.0";
  r.when = "2026-11-29T20:15:00Z";
  r.machine = testing::machine();
  r.engine = {"mini", "w8a8", "0123456789abcdef"};
  r.settings = {{{512}, {128}, {}}, "bf16", "tiles", 512};
  r.rows = {gate_row("prefill", 512, rounds(prefill, 1)), gate_row("decode", 128, rounds(decode, 2))};
  r.shares = {{0, 700, {Bound::kArithmetic, 0.7}}, {30, 60, {Bound::kMemory, 0.75}}};
  r.load_s = 1.5;
  r.peak_bytes = 3'000'000'000;
  return r;
}

class Files : public ::testing::Test {
 protected:
  Path file(const std::string& name) const { return dir_ / name; }
  TempDir dir_;
};

using RecordTest = Files;

TEST_F(RecordTest, RoundTrip) {
  const BenchRecord r = record();
  ASSERT_TRUE(write_record(r, file("a.json"), false).ok());
  const auto back = read_record(file("a.json"));
  ASSERT_TRUE(back.ok()) << back.error().message();
  EXPECT_EQ(record_json(*back), record_json(r));
  EXPECT_EQ(back->settings, r.settings);
  EXPECT_EQ(back->engine, r.engine);
  EXPECT_FALSE(write_record(r, file("a.json"), false).ok()) << "an existing file";
  EXPECT_TRUE(write_record(r, file("a.json"), true).ok());
  BenchRecord bare = record();
  bare.machine.limits.reset();
  bare.shares.clear();
  bare.peak_bytes.reset();
  const auto parsed = parse_record(record_json(bare), "x");
  ASSERT_TRUE(parsed.ok()) << parsed.error().message();
  EXPECT_FALSE(parsed->peak_bytes);
  EXPECT_TRUE(parsed->shares.empty());
}

TEST_F(RecordTest, BrokenRecordsAreNamed) {
  const auto broken = [](auto change, const std::string& words) {
    Json j = record_json(record());
    change(j);
    const auto r = parse_record(j, "base.json");
    ASSERT_FALSE(r.ok()) << words;
    EXPECT_EQ(r.error().code(), ErrorCode::kBadInput);
    EXPECT_THAT(r.error().message(), HasSubstr("base.json"));
    EXPECT_THAT(r.error().message(), HasSubstr(words));
  };
  broken([](Json& j) { j = Json::array(); }, "not a record");
  broken([](Json& j) { j["kind"] = "x"; }, "not a record");
  broken([](Json& j) { j["enginee"] = 1; }, "did you mean 'engine'");
  broken([](Json& j) { j.erase("machine"); }, "machine is missing");
  broken([](Json& j) { j["rows"] = Json::array(); }, "rows");
  broken([](Json& j) { j["rows"][0]["tok_s"].erase(0); }, "rounds");
  broken([](Json& j) { j["rows"][0]["tok_s"][0] = 0; }, "not positive");
  broken([](Json& j) { j["rows"][0].erase("share"); }, "share");
  broken([](Json& j) { j["rows"][1]["share"]["bound"] = "luck"; }, "luck");
  broken([](Json& j) { j["settings"]["prefill"] = "512"; }, "prefill");
}

TEST_F(RecordTest, EnginesAreToldApartByTheirManifest) {
  const exec::testing::TestModel a({}), b({.layers = 3});
  const auto ia = identify_engine(a.dir(), a.manifest()), ib = identify_engine(b.dir(), b.manifest());
  ASSERT_TRUE(ia.ok() && ib.ok());
  EXPECT_NE(ia->checksum, ib->checksum);
  EXPECT_EQ(*ia, *identify_engine(a.dir(), a.manifest()));
}

TEST(CompareTest, RefusesOtherMachinesEnginesAndSettings) {
  const auto refused = [](auto change, ErrorCode code, const std::string& words) {
    BenchRecord other = record();
    change(other);
    const auto c = compare_records(record(), other, "base.json", {});
    ASSERT_FALSE(c.ok()) << words;
    EXPECT_EQ(c.error().code(), code) << words;
    EXPECT_THAT(c.error().message(), HasSubstr("base.json cannot be compared with"));
    EXPECT_THAT(c.error().message(), HasSubstr(words));
  };
  refused([](BenchRecord& r) { r.machine.cpu = "other"; }, ErrorCode::kEnvironment, "'other'");
  refused([](BenchRecord& r) { r.machine.threads = 4; }, ErrorCode::kEnvironment, "--threads 4");
  refused([](BenchRecord& r) { r.machine.limits->read_gbs.all = 90; }, ErrorCode::kEnvironment, "90.0");
  refused([](BenchRecord& r) { r.engine.checksum = "ffff"; }, ErrorCode::kUsage, "--other-engine");
  refused([](BenchRecord& r) { r.settings.cases.prefill = {128, 512}; }, ErrorCode::kUsage, "--prefill 128,512");
  refused([](BenchRecord& r) { r.settings.kv_type = "int8"; }, ErrorCode::kUsage, "--kv-type int8");
  refused([](BenchRecord& r) { r.settings.attention_order = "pairs"; }, ErrorCode::kUsage, "--attention-order pairs");
  refused([](BenchRecord& r) { r.settings.max_tokens_per_step = 1024; }, ErrorCode::kUsage, "1024");
  refused([](BenchRecord& r) { r.rows[0].rounds.resize(3); }, ErrorCode::kUsage, "3 rounds");
  BenchRecord other = record();
  other.engine.checksum = "ffff";
  CompareOptions o;
  o.other_engine = true;
  EXPECT_TRUE(compare_records(record(), other, "base.json", o).ok());
}

const CompareRow& find(const Comparison& c, const std::string& figure) {
  for (const CompareRow& r : c.rows)
    if (r.figure == figure) return r;
  MI_CHECK(false, "no {}", figure);
}

TEST(CompareTest, RegressedOnlyWhenItIsSure) {
  const BenchRecord base = record();
  const auto same = compare_records(record(), base, "b", {});
  ASSERT_TRUE(same.ok());
  EXPECT_FALSE(same->regressed());
  EXPECT_EQ(same->rows.size(), 4u) << "prefill speed, decode speed and first token, memory";
  EXPECT_THAT(comparison_text(*same), HasSubstr("no regression"));

  const auto slower = compare_records(record(900, 50), base, "b", {});
  EXPECT_TRUE(slower->regressed());
  EXPECT_FALSE(find(*slower, "prefill 512 tok/s").regressed);
  const CompareRow& decode = find(*slower, "decode 128 tok/s");
  EXPECT_TRUE(decode.regressed);
  EXPECT_NEAR(decode.ratio.mid, 50.0 / 60, 0.03);
  EXPECT_TRUE(find(*slower, "decode 128 first token, s").regressed)
      << "slower is more seconds, and a ratio below 1 too";
  EXPECT_THAT(comparison_text(*slower), HasSubstr("REGRESSION"));
  EXPECT_TRUE(comparison_json(*slower)["compare"]["regressed"].get<bool>());

  EXPECT_FALSE(compare_records(record(900, 58), base, "b", {})->regressed()) << "3 % is within the threshold";
  CompareOptions tight;
  tight.threshold = 0.005;
  EXPECT_TRUE(compare_records(record(900, 56), base, "b", tight)->regressed());
  EXPECT_FALSE(compare_records(record(990, 66), base, "b", {})->regressed()) << "faster";
}

TEST(CompareTest, NoiseWidensTheIntervalInsteadOfFailing) {
  BenchRecord noisy = record();
  noisy.rows[1] = gate_row("decode", 128, {20, 62, 30, 58, 61, 25, 54});  // median 54 of 60, but all over the place
  const auto c = compare_records(noisy, record(), "b", {});
  const CompareRow& r = find(*c, "decode 128 tok/s");
  EXPECT_LT(r.ratio.mid, 0.95);
  EXPECT_FALSE(r.regressed);
  EXPECT_GT(r.ratio.high, 1);
}

TEST(CompareTest, MemoryPeakCounts) {
  BenchRecord more = record();
  more.peak_bytes = 3'300'000'000;
  EXPECT_TRUE(find(*compare_records(more, record(), "b", {}), "memory peak, MB").regressed);
  more.peak_bytes = 3'100'000'000;
  EXPECT_FALSE(compare_records(more, record(), "b", {})->regressed());
  more.peak_bytes.reset();
  EXPECT_EQ(compare_records(more, record(), "b", {})->rows.size(), 3u) << "not known, not judged";
}

// The machine slows down to a half in the middle: medians of two programs measured one after the other could say
// anything, the ratios of neighbours do not.
TEST(CompareTest, PhasesCancelInRatiosOfRounds) {
  std::vector<double> ours, theirs;
  for (int i = 0; i < 8; ++i) {
    const double phase = i < 4 ? 1 : 0.5;
    ours.push_back(90 * phase * (1 + 0.002 * i));
    theirs.push_back(100 * phase);
  }
  const Comparison c = compare_rounds({gate_row("decode", 128, ours)}, {gate_row("decode", 128, theirs)}, "old", {});
  const CompareRow& r = find(c, "decode 128 tok/s");
  EXPECT_TRUE(r.regressed);
  EXPECT_GT(r.ratio.low, 0.89);
  EXPECT_LT(r.ratio.high, 0.92);
  BenchRecord a = record(), b = record();
  a.rows[1] = gate_row("decode", 128, ours);
  b.rows[1] = gate_row("decode", 128, theirs);
  EXPECT_FALSE(find(*compare_records(a, b, "b", {}), "decode 128 tok/s").regressed) << "unpaired it is not certain";
}

constexpr const char* kOutput =
    "loading...\n{\"version\": \"metainfer 0.0.9\", \"load_s\": 1.25}\n"
    "{\"metric\": \"prefill\", \"n\": 8, \"tok_s\": 100.0, \"ttft_s\": 0.08, \"later\": 1}\n"
    "{\"metric\": \"decode\", \"n\": 4, \"tok_s\": 50.0, \"ttft_s\": 0.1, \"total_tok_s\": 40}\n"
    "{\"memory\": {\"peak_bytes\": 5000}}\n";

TEST(AgainstTest, ReadsTheProtocol) {
  const auto r = parse_bench_output(kOutput, {{8}, {4}, {}}, "old");
  ASSERT_TRUE(r.ok()) << r.error().message();
  EXPECT_EQ(r->version, "metainfer 0.0.9");
  EXPECT_EQ(r->load_s, 1.25);
  EXPECT_EQ(r->peak_bytes, 5000);
  ASSERT_EQ(r->rows.size(), 2u);
  EXPECT_EQ(r->rows[1].rounds[0].total_tok_s, 40);
  const auto missing = parse_bench_output(kOutput, {{8}, {4}, {2}}, "old");
  ASSERT_FALSE(missing.ok());
  EXPECT_THAT(missing.error().message(), HasSubstr("--batch 2"));
  EXPECT_FALSE(parse_bench_output("{\"metric\": \"prefill\", \"n\": 8}", {{8}, {}, {}}, "old").ok());
  EXPECT_FALSE(parse_bench_output("{broken", {{}, {}, {}}, "old").ok());
}

class Programs : public Files {
 protected:
  // A program that notes its name and arguments, and prints.
  Path program(const std::string& name, const std::string& prints, int code = 0) const {
    std::ofstream(file(name)) << "#!/bin/sh\necho \"" << name << " $*\" >> " << file("log").string()
                              << "\ncat <<'END'\n"
                              << prints << "END\nexit " << code << "\n";
    chmod(file(name).c_str(), 0755);
    return file(name);
  }
  AgainstOptions options(const Path& ours, const Path& theirs) const {
    AgainstOptions o;
    o.ours = ours;
    o.theirs = theirs;
    o.session.engine = "engine-a";
    o.session.threads = 3;
    o.their_engine = "engine-b";
    o.cases = {{8}, {4}, {}};
    o.rounds = 3;
    return o;
  }
  std::vector<std::string> log() const {
    std::vector<std::string> lines;
    std::ifstream f(file("log"));
    for (std::string l; std::getline(f, l);) lines.push_back(l);
    return lines;
  }
};

TEST_F(Programs, RunInTurnsAndChangeWhoGoesFirst) {
  std::string slow = kOutput;
  slow.replace(slow.find("50.0"), 4, "40.0");
  int told = 0;
  const auto r = run_against(options(program("new", slow), program("old", kOutput)), [&](int n) { told = n; });
  ASSERT_TRUE(r.ok()) << r.error().message();
  EXPECT_EQ(told, 3);
  const auto lines = log();
  ASSERT_EQ(lines.size(), 6u);
  const char* order[] = {"new", "old", "old", "new", "new", "old"};
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(lines[i].substr(0, 3), order[i]) << i;
    EXPECT_THAT(lines[i], HasSubstr(std::string("--engine engine-") + (lines[i][0] == 'n' ? "a" : "b")));
    EXPECT_THAT(lines[i], HasSubstr("--threads 3"));
    EXPECT_THAT(lines[i], HasSubstr("--rounds 1"));
  }
  ASSERT_EQ(r->ours.size(), 2u);
  EXPECT_EQ(r->ours[1].values(&BenchRound::tok_s), (std::vector<double>{40, 40, 40}));
  EXPECT_EQ(r->theirs[1].values(&BenchRound::tok_s), (std::vector<double>{50, 50, 50}));
  EXPECT_EQ(r->peak_bytes, 5000);
  EXPECT_TRUE(compare_rounds(r->ours, r->theirs, "old", {}).regressed());
}

TEST_F(Programs, BothAreToldWhatTheSessionIsTold) {
  AgainstOptions o = options(program("new", kOutput), program("old", kOutput));
  o.rounds = 1;
  ASSERT_TRUE(run_against(o, {}).ok());
  for (const char* usual : {"--kv-type", "--attention-order", "--weights", "--memory-pool", "--no-numa", "--no-checksums"})
    for (const std::string& line : log()) EXPECT_THAT(line, Not(HasSubstr(usual))) << "older programs may not know it";
  o.session.kv_type = "f32";
  o.session.attention_order = "pairs";
  o.session.weights = "map";
  o.session.memory_pool = o.session.numa = o.session.verify_checksums = false;
  std::filesystem::remove(file("log"));
  ASSERT_TRUE(run_against(o, {}).ok());
  for (const std::string& line : log())
    EXPECT_THAT(line, HasSubstr("--kv-type f32 --attention-order pairs --weights map --memory-pool false --no-numa --no-checksums"));
}

TEST_F(Programs, FailuresAreSentences) {
  const auto fails = run_against(options(program("new", kOutput), program("old", "", 4)), {});
  ASSERT_FALSE(fails.ok());
  EXPECT_EQ(fails.error().code(), ErrorCode::kEnvironment);
  EXPECT_THAT(fails.error().message(), HasSubstr("exit code 4"));
  const auto missing = run_against(options(program("new", kOutput), file("none")), {});
  ASSERT_FALSE(missing.ok());
  EXPECT_THAT(missing.error().message(), HasSubstr("cannot be run"));
  const auto silent = run_against(options(program("new", kOutput), program("quiet", "")), {});
  ASSERT_FALSE(silent.ok());
  EXPECT_THAT(silent.error().message(), HasSubstr("printed no figure for --prefill 8"));
}

using HistoryTest = Files;

TEST_F(HistoryTest, AppendsLinesAndReadsThemBack) {
  const Path p = file("runs.jsonl");
  EXPECT_TRUE(check_history(p).ok()) << "not there yet";
  ASSERT_TRUE(append_history(p, record(900)).ok());
  ASSERT_TRUE(append_history(p, record(950)).ok());
  ASSERT_TRUE(check_history(p).ok());
  const auto all = read_history(p);
  ASSERT_TRUE(all.ok()) << all.error().message();
  ASSERT_EQ(all->size(), 2u);
  EXPECT_EQ(record_json((*all)[1]), record_json(record(950)));
  EXPECT_FALSE(check_history(file("none/runs.jsonl")).ok());
}

TEST_F(HistoryTest, ForeignFilesAreLeftAlone) {
  std::ofstream(file("notes.txt")) << "shopping list\n";
  const Status s = check_history(file("notes.txt"));
  ASSERT_FALSE(s.ok());
  EXPECT_THAT(s.error().message(), HasSubstr("notes.txt, line 1"));
  std::ofstream(file("other.jsonl")) << dump_json(record_json(record())) << "\n{\"a\": 1}\n";
  EXPECT_THAT(check_history(file("other.jsonl")).error().message(), HasSubstr("line 2"));
}

TEST_F(HistoryTest, LineWithoutAnEndIsNotContinued) {
  const Path p = file("runs.jsonl");
  std::ofstream(p) << dump_json(record_json(record(900)));
  ASSERT_TRUE(append_history(p, record(950)).ok());
  EXPECT_EQ(read_history(p)->size(), 2u);
}

TEST_F(HistoryTest, LineOfAKilledRunIsGivenUp) {
  const Path p = file("runs.jsonl");
  const std::string whole = dump_json(record_json(record(900))) + "\n", next = dump_json(record_json(record(950)));
  for (const size_t n : {size_t(1), size_t(5), record_beginning().size(), next.size() - 1}) {
    std::ofstream(p) << whole << next.substr(0, n);
    ASSERT_TRUE(check_history(p).ok()) << n;
    ASSERT_EQ(read_history(p)->size(), 1u) << n;
    ASSERT_TRUE(append_history(p, record(800)).ok()) << n;
    ASSERT_EQ(*read_file(p), whole + dump_json(record_json(record(800))) + "\n") << n;
  }
  std::ofstream(p) << whole << "milk";
  EXPECT_THAT(check_history(p).error().message(), HasSubstr("line 2")) << "no beginning of a record";
}

TEST_F(HistoryTest, WhatCannotBeWrittenToIsSaidBefore) {
  EXPECT_THAT(check_history(file("none/runs.jsonl")).error().message(), HasSubstr("does not exist"));
  EXPECT_THAT(check_history(dir_.path()).error().message(), HasSubstr("regular"));
  EXPECT_TRUE(check_history(file("runs.jsonl")).ok());
  EXPECT_TRUE(std::filesystem::is_empty(dir_.path())) << "asking leaves nothing";
}

TEST_F(HistoryTest, TableAndPage) {
  std::vector<BenchRecord> all{record(900), record(950), record(800)};
  all[2].machine.cpu = "Second <CPU>";
  all[2].rows.pop_back();
  all[2].shares.pop_back();
  all[2].peak_bytes.reset();
  const std::string text = history_text(all, 2);
  EXPECT_THAT(text, HasSubstr("prefill 512"));
  EXPECT_THAT(text, HasSubstr("Second <CPU>"));
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1 + 2 + 2) << "header, two machines, the two newest runs";
  const std::string page = history_html(all, "runs");
  EXPECT_THAT(page, HasSubstr("<svg"));
  EXPECT_THAT(page, HasSubstr("Second &lt;CPU&gt;"));
  EXPECT_THAT(page, HasSubstr("decode 128, share of the limit"));
  EXPECT_THAT(page, Not(HasSubstr("<script")));
  EXPECT_THAT(page, Not(HasSubstr("Second <CPU>")));
  size_t circles = 0;
  for (size_t at = 0; (at = page.find("<circle", at)) != std::string::npos; ++at) ++circles;
  EXPECT_EQ(circles, 3u * 3 + 2 * 3 + 2)
      << "prefill's speed, time and share of three runs, decode's of two, memory of two";
}

}  // namespace
}  // namespace mi::tools
