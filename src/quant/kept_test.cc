// What is left of a run that was killed: used by the same run, whole and unchanged, and by no other.
#include "quant/kept.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <thread>

#include "ir/text.h"
#include "quant/quantize.h"
#include "quant/testing.h"
#include "tensor/safetensors.h"

namespace mi::quant {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::files_of;
using testing::recipe;
using testing::write_tiny;
namespace fs = std::filesystem;

TEST(KeptFilesTest, StayForTheSameKeyOnly) {
  const TempDir dir;
  const Path output = dir / "out";
  Path kept;
  {
    const KeptFiles k = KeptFiles::open(output, "one").value();
    kept = k.path();
    ASSERT_EQ(kept, dir / ".out.kept");
    ASSERT_TRUE(write_file(kept / "file", "work").ok());
  }
  EXPECT_EQ(read_file(kept / "file").value(), "work");  // left by the object, as by a run that was killed
  { EXPECT_TRUE(fs::exists(KeptFiles::open(output, "one").value().path() / "file")); }
  { EXPECT_FALSE(fs::exists(KeptFiles::open(output, "two").value().path() / "file")); }
  { EXPECT_FALSE(fs::exists(KeptFiles::open(output, "one").value().path() / "file")); }  // it went with the first other key
  ASSERT_TRUE(write_file(kept / "file", "work").ok());
  fs::remove(kept / "key");  // nothing says what they are part of
  { EXPECT_FALSE(fs::exists(KeptFiles::open(output, "one").value().path() / "file")); }
  // Another output has files of its own.
  ASSERT_TRUE(write_file(kept / "file", "work").ok());
  { EXPECT_NE(KeptFiles::open(dir / "other", "one").value().path(), kept); }
  EXPECT_TRUE(fs::exists(kept / "file"));
}

TEST(KeptFilesTest, OneRunAtATime) {
  const TempDir dir;
  KeptFiles first = KeptFiles::open(dir / "out", "one").value();
  ASSERT_TRUE(write_file(first.path() / "file", "work").ok());
  const auto second = KeptFiles::open(dir / "out", "two");  // is refused, and takes nothing away
  ASSERT_FALSE(second.ok());
  EXPECT_THAT(second.error().message(), AllOf(HasSubstr("another run"), HasSubstr("--output")));
  EXPECT_TRUE(fs::exists(first.path() / "file"));
  KeptFiles moved = std::move(first);
  EXPECT_EQ(first.path(), Path());
  first = KeptFiles();
  EXPECT_FALSE(KeptFiles::open(dir / "out", "one").ok());
  moved.remove();
  EXPECT_FALSE(fs::exists(dir / ".out.kept"));
}

TEST(KeptFilesTest, ALinkIsNotFollowed) {
  const TempDir dir, elsewhere;
  ASSERT_TRUE(write_file(elsewhere / "precious", "x").ok());
  fs::create_directory_symlink(elsewhere.path(), dir / ".out.kept");
  EXPECT_EQ(KeptFiles::open(dir / "out", "one").value().path(), Path());
  EXPECT_TRUE(fs::exists(elsewhere / "precious"));
}

// ---- the writer

constexpr size_t kShard = 3000;  // bytes: the tiny model takes several files

struct Written : ::testing::Test {
  TempDir dir;
  ir::Graph g = ir::testing::legal_graph(compiler::testing::tiny_mir("f32"));
  Path kept = dir / "kept";
  int outs = 0;
  void SetUp() override { fs::create_directory(kept); }
  ir::MirWriter writer() { return ir::MirWriter::create(dir / std::to_string(outs++), g, kShard, kept).value(); }
  static void write(ir::MirWriter& w, size_t from, size_t to) {
    for (size_t i = from; i < to; ++i) {
      std::vector<float> v(size_t(*shape_count(w.order()[i].shape)), float(i));
      ASSERT_TRUE(w.write(std::as_bytes(std::span(v))).ok());
    }
  }
  // A run that ends in the middle.
  void begin() {
    ir::MirWriter w = writer();
    ASSERT_EQ(w.first(), 0u);
    write(w, 0, w.order().size() - 3);
  }
};

TEST_F(Written, GoesOnFromWhatIsThere) {
  begin();
  ir::MirWriter w = writer();
  const size_t first = w.first();
  EXPECT_GT(first, 4u);
  EXPECT_LE(first, w.order().size() - 3);
  for (size_t i = 0; i < first; ++i) {
    const Tensor t = w.kept_tensor(i).value();
    float v;
    std::memcpy(&v, t.data.data(), sizeof v);
    EXPECT_EQ(v, float(i)) << w.order()[i].name;
  }
  write(w, first, w.order().size());
  ASSERT_TRUE(w.finish(g, Json::object()).ok());
  // The same files as of a run in one go.
  fs::remove_all(kept);
  fs::create_directory(kept);
  ir::MirWriter whole = writer();
  EXPECT_EQ(whole.first(), 0u);
  write(whole, 0, whole.order().size());
  ASSERT_TRUE(whole.finish(g, Json::object()).ok());
  EXPECT_EQ(files_of(dir / "1"), files_of(dir / "2"));
}

// The first file that is not good ends what is taken.
size_t first_after(Written& t, const std::function<void(const Path&)>& damage) {
  fs::remove_all(t.kept);
  fs::create_directory(t.kept);
  t.begin();
  const size_t before = t.writer().first();
  damage(t.kept / "00002.safetensors");
  const size_t after = t.writer().first();
  EXPECT_LT(after, before);
  return after;
}

TEST_F(Written, ADamagedFileIsNotTaken) {
  const size_t one = first_after(*this, [](const Path& p) { fs::remove(p); });
  EXPECT_GT(one, 0u);  // those before it
  EXPECT_EQ(first_after(*this, [](const Path& p) { fs::resize_file(p, fs::file_size(p) - 1); }), one);
  EXPECT_EQ(first_after(*this, [](const Path& p) { fs::resize_file(p, 0); }), one);
  EXPECT_EQ(first_after(*this, [](const Path& p) { fs::resize_file(p, fs::file_size(p) + 64); }), one);
  // One bit of a number.
  const auto flip = [](const Path& p) {
    std::fstream f(p, std::ios::in | std::ios::out | std::ios::binary);
    f.seekg(-5, std::ios::end);
    const char c = char(f.get() ^ 1);
    f.seekp(-5, std::ios::end);
    f.put(c);
  };
  EXPECT_EQ(first_after(*this, flip), one);
  // Another file's tensors under this name; the sum of this one beside it, or none.
  const auto other = [](const Path& p) { fs::copy_file(p.parent_path() / "00001.safetensors", p, fs::copy_options::overwrite_existing); };
  EXPECT_EQ(first_after(*this, other), one);
  EXPECT_EQ(first_after(*this, [](const Path& p) { fs::remove(Path(p).concat(".xxh3")); }), one);
  EXPECT_EQ(first_after(*this, [](const Path& p) { std::ofstream(Path(p).concat(".xxh3")) << ""; }), one);
}

// ---- quantize

struct KeptRunTest : ::testing::Test {
  TempDir dir;
  Path mir = write_tiny(dir.path());
  QuantizeOptions options(const char* yaml) {
    QuantizeOptions o;
    o.model = mir;
    o.output = dir / "out";
    o.config = recipe(std::string("calibration_samples: 16, calibration_length: 16, ") + yaml);
    o.keep_from = 0;
    o.shard_bytes = kShard;
    return o;
  }
  Result<QuantizeReport> run(const QuantizeOptions& o) {
    hw::ThreadPool pool(2);
    return quantize(o, pool);
  }
  QuantizeReport whole(const QuantizeOptions& o) {
    auto r = run(o);
    EXPECT_TRUE(r.ok()) << (r.ok() ? "" : r.error().message());
    EXPECT_FALSE(fs::exists(dir / ".out.kept"));
    return r.ok() ? *r : QuantizeReport{};
  }
  Path weights() const { return mir / "weights" / "00001.safetensors"; }
  // Ends in layer 2, which holds a NaN while it runs; the file is then as it was, its time too.
  void broken_off(const QuantizeOptions& o) {
    const auto time = fs::last_write_time(weights());
    const std::string good = read_file(weights()).value();
    std::string bad = good;
    {
      const Safetensors f = Safetensors::open(weights()).value();
      const Safetensors::Entry* e = f.find("layers.2.attn.q.weight");
      ASSERT_NE(e, nullptr);
      const uint16_t nan = 0x7fc0;
      std::memcpy(bad.data() + e->begin, &nan, 2);
    }
    const auto put = [&](const std::string& bytes) {
      std::ofstream(weights(), std::ios::binary) << bytes;
      fs::last_write_time(weights(), time);
    };
    put(bad);
    const auto r = run(o);
    put(good);
    ASSERT_FALSE(r.ok());
    EXPECT_THAT(r.error().message(), HasSubstr("layers.2.attn.q.weight"));
    ASSERT_TRUE(fs::exists(dir / ".out.kept" / "00002.safetensors"));
    EXPECT_FALSE(fs::exists(o.output));
  }
};
const auto kWentOn = Contains(HasSubstr("went on from an earlier run"));

TEST_F(KeptRunTest, TheSameRunGoesOnAndGivesTheSameBytes) {
  for (const char* yaml : {"smooth_quant: {down: true}", "weight_bits: 4, group_size: 32", "rounding: gptq, activation_scheme: per_tensor",
                           "saturation: {percentile: 99, layers: [\"re:.*down\"]}"}) {
    SCOPED_TRACE(yaml);
    const QuantizeOptions o = options(yaml);
    const QuantizeReport once = whole(o);
    EXPECT_THAT(once.notes, Not(kWentOn));
    const auto expected = files_of(o.output);
    fs::remove_all(o.output);
    broken_off(o);
    const QuantizeReport resumed = whole(o);
    EXPECT_THAT(resumed.notes, kWentOn);
    EXPECT_EQ(std::tie(resumed.smoothed_sites, resumed.static_scales, resumed.saturated),
              std::tie(once.smoothed_sites, once.static_scales, once.saturated));
    EXPECT_EQ(files_of(o.output), expected);
    fs::remove_all(o.output);
  }
}

TEST_F(KeptRunTest, TheSlowerOfTwoRunsLeavesNothing) {
  const QuantizeOptions o = options("");
  // The other's output appears while this run is at work.
  const Path kept = dir / ".out.kept";
  std::thread other([&] {
    while (!fs::exists(kept / "key")) std::this_thread::yield();
    fs::create_directory(o.output);
  });
  const auto r = run(o);
  other.join();
  ASSERT_FALSE(r.ok());
  EXPECT_THAT(r.error().message(), HasSubstr("appeared"));
  EXPECT_FALSE(fs::exists(kept));
}

TEST_F(KeptRunTest, AChangedFileIsMadeAgain) {
  const QuantizeOptions o = options("");
  whole(o);
  const auto expected = files_of(o.output);
  fs::remove_all(o.output);
  broken_off(o);
  const Path first = dir / ".out.kept" / "00001.safetensors";
  {
    std::fstream f(first, std::ios::in | std::ios::out | std::ios::binary);
    f.seekp(-3, std::ios::end);
    f.put(1);
    f.put(2);
  }
  EXPECT_THAT(whole(o).notes, Not(kWentOn));
  EXPECT_EQ(files_of(o.output), expected);
}

TEST_F(KeptRunTest, AnotherRecipeTextOrModelStartsAnew) {
  const auto anew = [&](const char* what, QuantizeOptions other, const std::function<void()>& change) {
    SCOPED_TRACE(what);
    fs::remove_all(dir / "out");
    broken_off(options(""));
    change();
    EXPECT_THAT(whole(other).notes, Not(kWentOn));
    const auto made = files_of(other.output);
    fs::remove_all(other.output);
    whole(other);
    EXPECT_EQ(files_of(other.output), made);
  };
  anew("recipe", options("smooth_quant: {alpha: 0.5}"), [] {});
  QuantizeOptions text = options("");
  text.calibration = dir / "text.jsonl";
  ASSERT_TRUE(write_file(text.calibration, "{\"ids\": [1, 2, 3, 4, 5, 6, 7, 8]}\n{\"ids\": [9, 8, 7, 6]}\n").ok());
  anew("calibration", text, [] {});
  anew("time of the weights", options(""), [&] { fs::last_write_time(weights(), fs::last_write_time(weights()) + std::chrono::seconds(1)); });
  anew("the model", options(""), [&] {
    fs::remove_all(mir);
    write_tiny(dir.path(), "bf16", [](const std::string& name, std::vector<float>& v) {
      if (name == "layers.0.attn.q.weight") v[0] += 1;
    });
  });
}

TEST_F(KeptRunTest, AComparisonIsNoPartOfIt) {
  QuantizeOptions o = options("");
  broken_off(o);
  o.compare = false;
  EXPECT_THAT(whole(o).notes, kWentOn);
}

}  // namespace
}  // namespace mi::quant
