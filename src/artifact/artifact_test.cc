// The engine directory on disk: JSON there and back, writing, opening, damage.

#include <gtest/gtest.h>

#include <fstream>

#include "artifact/json.h"
#include "artifact/reader.h"
#include "artifact/testing.h"

namespace mi::artifact {
namespace {

const ParallelFor last_first = [](int64_t tasks, const auto& f) {
  for (int64_t i = tasks; i-- > 0;) f(i, 0);
};

class ArtifactDir : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = std::filesystem::path(::testing::TempDir()) / fmt::format("mi-artifact-{}", getpid());
    std::filesystem::remove_all(dir_);
    std::filesystem::create_directories(dir_);
    testing::TinyEngine e;
    auto m = e.write(dir_, 4096);
    ASSERT_TRUE(m.ok()) << m.error().message();
    m_ = *m;
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  std::string json() { return *read_file(dir_ / "engine.json"); }
  void rewrite(const std::string& text) { std::ofstream(dir_ / "engine.json", std::ios::binary) << text; }
  void replace(const std::string& from, const std::string& to) {
    std::string text = json();
    const size_t at = text.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    rewrite(text.replace(at, from.size(), to));
  }
  Result<LoadedArtifact> open(bool check) {
    MI_TRY(LoadedArtifact a, open_artifact(dir_));
    if (check) MI_TRY_VOID(verify_weights(a, last_first));
    return a;
  }
  // The weights in memory.
  Status read(LoadedArtifact* a, std::vector<std::byte>* to, bool check) {
    to->assign(a->bytes.size(), std::byte(0xee));
    return read_weights(a, *to, check, last_first);
  }
  void refused(const std::string& words) {
    const auto a = open(true);
    ASSERT_FALSE(a.ok());
    EXPECT_NE(a.error().message().find(words), std::string::npos) << a.error().message();
    EXPECT_EQ(a.error().code(), ErrorCode::kBadInput);
  }

  Path dir_;
  Manifest m_;
};

TEST_F(ArtifactDir, OpensWhatWasWritten) {
  int64_t last = 0, total = 0, calls = 0;
  const auto a = open(false);
  ASSERT_TRUE(a.ok()) << a.error().message();
  ASSERT_TRUE(verify_weights(*a, last_first, [&](int64_t d, int64_t t) {
                EXPECT_GT(d, last);
                last = d;
                total = t;
                ++calls;
              }).ok());
  EXPECT_EQ(last, total);
  EXPECT_EQ(total, a->manifest.memory.weight_bytes);
  EXPECT_GE(calls, int64_t(m_.segments.size()));
  EXPECT_EQ(dump_json(to_json(a->manifest)), dump_json(to_json(m_)));
  for (const WeightTensor& w : a->manifest.weights) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(view_weight(*a, w)) % 64, 0u);
    const bool int4 = w.packing == Packing::kPackedI4;
    EXPECT_EQ(view_scales(*a, w) != nullptr, w.packing == Packing::kPackedI8 || (int4 && w.scale_dtype == DType::kF32));
    EXPECT_EQ(view_scales_bf16(*a, w) != nullptr, int4 && w.scale_dtype == DType::kBF16);
    EXPECT_EQ(view_colsums(*a, w) != nullptr, w.packing == Packing::kPackedI8);
  }
}

TEST_F(ArtifactDir, JsonKeepsFloatsAndDefaults) {
  Manifest m = m_;
  std::get<NormParams>(m.program[1].params).eps = 0.1f;  // not a decimal fraction in binary
  const auto back = parse_manifest(manifest_text(m), "text");
  ASSERT_TRUE(back.ok()) << back.error().message();
  EXPECT_EQ(std::get<NormParams>(back->program[1].params).eps, 0.1f);
  EXPECT_EQ(manifest_text(*back), manifest_text(m));
}

TEST_F(ArtifactDir, EverySegmentIsGuarded) {
  ASSERT_GT(m_.segments.size(), size_t(3));
  for (size_t i = 0; i < m_.segments.size(); ++i)
    for (const int64_t at : {m_.segments[i].offset, m_.segments[i].offset + m_.segments[i].bytes - 1}) {
      std::fstream f(dir_ / "weights.bin", std::ios::in | std::ios::out | std::ios::binary);
      f.seekg(at);
      const char was = char(f.get());
      f.seekp(at);
      f.put(char(was ^ 1));
      f.flush();
      refused(fmt::format("segment {} of {}", i, m_.segments.size()));
      auto a = open(false);  // nobody asked for checksums
      ASSERT_TRUE(a.ok());
      std::vector<std::byte> memory;
      const Status checked = read(&*a, &memory, true);
      ASSERT_FALSE(checked.ok());
      EXPECT_NE(checked.error().message().find(fmt::format("segment {} of {}", i, m_.segments.size())), std::string::npos);
      EXPECT_TRUE(read(&*a, &memory, false).ok());
      f.seekp(at);
      f.put(was);
    }
  EXPECT_TRUE(open(true).ok());
}

TEST_F(ArtifactDir, MemoryHoldsWhatTheFileHolds) {
  auto a = open(false);
  ASSERT_TRUE(a.ok());
  const std::vector<std::byte> mapped(a->bytes.begin(), a->bytes.end());
  std::vector<std::byte> memory;
  ASSERT_TRUE(read(&*a, &memory, true).ok());
  EXPECT_EQ(memory, mapped);
  EXPECT_EQ(a->bytes.data(), memory.data());

  auto shorter = open(false);
  ASSERT_TRUE(shorter.ok());
  std::filesystem::resize_file(dir_ / "weights.bin", size_t(m_.memory.weight_bytes - 64));  // after it was opened
  const Status s = read(&*shorter, &memory, false);
  ASSERT_FALSE(s.ok());
  EXPECT_NE(s.error().message().find("cut short"), std::string::npos) << s.error().message();
}

TEST_F(ArtifactDir, TruncatedOrMissingFiles) {
  std::filesystem::resize_file(dir_ / "weights.bin", size_t(m_.memory.weight_bytes - 64));
  refused("cut off");
  std::filesystem::remove(dir_ / "weights.bin");
  refused("weights.bin");
  std::filesystem::remove(dir_ / "engine.json");
  refused("no engine.json");
  std::ofstream(dir_ / "model.mir") << "x";
  refused("MIR directory");
  std::filesystem::remove_all(dir_);
  refused("not an engine directory");
}

TEST_F(ArtifactDir, EveryCutOfTheManifestIsRefused) {
  const std::string text = json();
  for (size_t n = 0; n + 2 < text.size(); n += 97) {
    rewrite(text.substr(0, n));
    refused("engine.json");
  }
}

TEST_F(ArtifactDir, NewerVersionIsRefusedBeforeItsUnknownKeys) {
  replace("\"format_version\": 2", "\"new_field\": 1,\n\"format_version\": 6");
  refused("use a newer metainfer");
}

// So that programs of the first version still read engines without int4 weights.
TEST_F(ArtifactDir, TheVersionIsTheOldestThatHasWhatTheEngineUses) {
  EXPECT_EQ(m_.format_version, 2);
  const auto old = testing::TinyEngine(false).write(dir_);
  ASSERT_TRUE(old.ok()) << old.error().message();
  EXPECT_EQ(old->format_version, 1);
  const std::string text = json();
  EXPECT_EQ(text.find("\"group\""), std::string::npos);
  EXPECT_EQ(text.find("scale_dtype"), std::string::npos);
  EXPECT_TRUE(open(true).ok());
}

TEST_F(ArtifactDir, TypesNamesAndKeys) {
  const std::string text = json();
  const std::pair<std::pair<std::string, std::string>, std::string> cases[] = {
      {{"\"format_version\": 2", "\"format_version\": \"2\""}, "format_version"},
      {{"\"format_version\": 2,", ""}, "format_version is missing"},
      {{"\"default_kv\"", "\"defualt_kv\""}, "'default_kv' is missing"},
      {{"\"target\": ", "\"tarrget\": 1, \"target\": "}, "unknown key 'tarrget'"},
      {{"\"packing\":\"packed_i8\"", "\"packing\":\"packed_i2\""}, "'packed_i2' is not a packing"},
      {{"\"scale_dtype\":\"BF16\"", "\"scale_dtype\":\"BF15\""}, "'BF15' is not a dtype"},
      {{"\"op\":\"rms_norm\"", "\"op\":\"layer_norm\""}, "'layer_norm' is not an op"},
      {{"\"role\":\"gate\"", "\"role\":\"door\""}, "'door' is not a weight's role"},
      {{"\"elem\":\"q8\"", "\"elem\":\"q4\""}, "'q4'"},
      {{"\"kv_heads\":2", "\"kv_heads\":2.5"}, "expected an integer"},
      {{"\"kv_heads\":2", "\"kv_heads\":99999999999999999999"}, "expected an integer"},
      {{"\"kv_heads\":2", "\"kv_heads\":18446744073709551615"}, "too large"},
      {{"\"experts\":6,\"k\":2", "\"experts\":6,\"kk\":2"}, "kk"},
      {{"\"segments\": [", "\"segments\": 3, \"x\": ["}, "segments"},
      {{"\"model\": {", "\"model\": {\"name\":\"a\",\"name\":\"b\","}, "name"},
  };
  for (const auto& [change, words] : cases) {
    rewrite(text);
    replace(change.first, change.second);
    refused(words);
  }
}

TEST_F(ArtifactDir, WriterRefusesAnInvalidProgram) {
  testing::TinyEngine e;
  e.manifest().program[0].layer_output = false;
  const auto m = e.write(dir_);
  ASSERT_FALSE(m.ok());
  EXPECT_NE(m.error().message().find("layer_output"), std::string::npos) << m.error().message();
}

}  // namespace
}  // namespace mi::artifact
