#include "ir/mir_dir.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <cstring>

#include "base/temp_dir.h"
#include "base/util.h"
#include "ir/edit.h"
#include "ir/testing.h"

namespace mi::ir {
namespace {

using testing::graph_text;
using ::testing::HasSubstr;
using testing::legal_graph;
namespace fs = std::filesystem;

// Pseudo-random bytes for a tensor, by its name.
std::vector<std::byte> bytes_of(const SafetensorsWriter::Decl& d) {
  std::vector<std::byte> r(size_t(*shape_count(d.shape)) * dtype_bytes(d.dtype));
  const uint64_t seed = seed_of(1, d.name);
  for (size_t i = 0; i < r.size(); ++i) r[i] = std::byte(random_u64(seed, i));
  return r;
}

class MirDirTest : public ::testing::Test {
 protected:
  // Int8 and int4 matrices and a tied head, so that scales and sharing take part.
  static Graph graph() {
    Graph g = legal_graph(graph_text("m3_small_w8a8_fused.mir"));
    g.epilogue.weights[1] = g.prologue.weights[0];
    for (Block& b : g.blocks)
      for (WeightDecl& d : b.weights)
        if (d.name == "moe.experts.down.weight") set_format(d, {WeightFormat::kW4A8, 32});
    return g;
  }
  void write(const Graph& g, size_t shard_bytes) {
    auto w = MirWriter::create(dir_, g, shard_bytes);
    ASSERT_TRUE(w.ok()) << w.error().message();
    std::vector<std::byte> all;
    for (const auto& d : w->order()) {
      const auto b = bytes_of(d);
      all.insert(all.end(), b.begin(), b.end());
    }
    for (size_t at = 0; at < all.size(); at += 100) {  // parts that cross tensors and files
      const auto s = w->write(std::span(all).subspan(at, std::min<size_t>(100, all.size() - at)));
      ASSERT_TRUE(s.ok()) << s.error().message();
    }
    const auto s = w->finish(g, Json{{"tool_version", "0.1"}});
    ASSERT_TRUE(s.ok()) << s.error().message();
  }
  // One more file, or another first file, with these tensors (zeros).
  void write_file_of(const std::string& name, const std::vector<SafetensorsWriter::Decl>& decls) {
    auto w = SafetensorsWriter::create(dir_ / "weights" / name, decls);
    ASSERT_TRUE(w.ok());
    for (const auto& d : decls)
      ASSERT_TRUE(w->write(std::vector<std::byte>(size_t(*shape_count(d.shape)) * dtype_bytes(d.dtype))).ok());
    ASSERT_TRUE(w->finish().ok());
  }
  std::string error() {
    const auto m = MirDir::open(dir_);
    return m.ok() ? "no error" : m.error().message();
  }

  const TempDir folder_;
  const Path dir_ = folder_.path();
};

TEST_F(MirDirTest, DeclaresInWritingOrder) {
  const auto d = declared_tensors(graph());
  EXPECT_EQ(d[0].name, "embed.weight");
  EXPECT_EQ(d[1].name, "layers.0.attn.norm.weight");
  EXPECT_EQ(d[2].name, "layers.0.attn.q.weight");
  EXPECT_EQ(d[3].name, "layers.0.attn.q.weight_scale");
  EXPECT_EQ(d[3].shape, Shape{16});
  EXPECT_EQ(d[3].dtype, DType::kF32);
  const auto tensor = [&](const std::string& name) {
    return *std::find_if(d.begin(), d.end(), [&](const auto& t) { return t.name == name; });
  };
  const std::string down = "layers.1.moe.experts.down.weight";
  EXPECT_EQ(tensor(down).shape, (Shape{4, 8, 3}));
  EXPECT_EQ(tensor(down).dtype, DType::kU8);
  EXPECT_EQ(tensor(down + "_scale").shape, (Shape{4, 8, 1}));
  EXPECT_EQ(d.back().name, "norm.weight");  // the tied head is not written again
  const auto scale = std::find_if(d.begin(), d.end(),
                                  [](const auto& x) { return x.name == "layers.2.moe.experts.gate.weight_scale"; });
  ASSERT_NE(scale, d.end());
  EXPECT_EQ(scale->shape, (Shape{4, 6}));
}

TEST_F(MirDirTest, WritesAndReads) {
  const Graph g = graph();
  for (size_t shard : {size_t(1), size_t(700), size_t(1) << 30}) {
    fs::remove_all(dir_ / "weights");
    ASSERT_NO_FATAL_FAILURE(write(g, shard));
    const auto m = MirDir::open(dir_);
    ASSERT_TRUE(m.ok()) << m.error().message();
    EXPECT_TRUE(m->graph == g);
    EXPECT_EQ(m->provenance["tool_version"], "0.1");
    if (shard == size_t(1)) {
      EXPECT_EQ(m->files.size(), declared_tensors(g).size());
    }
    if (shard > 1000) {
      EXPECT_EQ(m->files.size(), 1u);
    }
    for (const auto& d : declared_tensors(g)) {
      const TensorView v = m->weight(d.name);
      const auto expected = bytes_of(d);
      EXPECT_EQ(v.shape, d.shape);
      ASSERT_EQ(v.bytes, expected.size()) << d.name;
      EXPECT_EQ(std::memcmp(v.data, expected.data(), v.bytes), 0) << d.name;
    }
    EXPECT_FALSE(m->has("head.weight"));
  }
}

TEST_F(MirDirTest, ErrorsNameFileAndTensor) {
  EXPECT_THAT(error(), HasSubstr("model.mir"));
  const Graph g = graph();
  const auto all = declared_tensors(g);
  ASSERT_NO_FATAL_FAILURE(write(g, size_t(1) << 30));
  EXPECT_EQ(error(), "no error");

  write_file_of("more.safetensors", {{"layers.9.w", DType::kF32, {1}}});
  EXPECT_THAT(error(), HasSubstr("more.safetensors: tensor layers.9.w is not declared in model.mir"));
  write_file_of("more.safetensors", {{"embed.weight", DType::kBF16, {32, 8}}});
  EXPECT_THAT(error(), HasSubstr("more.safetensors: tensor embed.weight is in "));
  EXPECT_THAT(error(), HasSubstr("00001.safetensors too"));
  fs::remove(dir_ / "weights/more.safetensors");

  auto without = all;
  std::erase_if(without, [](const auto& d) { return d.name == "layers.0.attn.q.weight_scale"; });
  write_file_of("00001.safetensors", without);
  EXPECT_THAT(error(), HasSubstr("tensor layers.0.attn.q.weight_scale is missing"));
  auto other = all;
  other[0].dtype = DType::kF32;
  write_file_of("00001.safetensors", other);
  EXPECT_THAT(error(), HasSubstr("00001.safetensors: tensor embed.weight is F32, model.mir declares BF16"));
  other = all;
  other[0].shape = {8, 32};
  write_file_of("00001.safetensors", other);
  EXPECT_THAT(error(),
              HasSubstr("00001.safetensors: tensor embed.weight has shape [8, 32], model.mir declares [32, 8]"));

  fs::remove(dir_ / "provenance.json");
  EXPECT_THAT(error(), HasSubstr("provenance.json"));
  fs::remove_all(dir_ / "weights");
  ASSERT_TRUE(write_file(dir_ / "provenance.json", "{}").ok());
  EXPECT_THAT(error(), HasSubstr("weights: cannot be listed"));
  ASSERT_TRUE(write_file(dir_ / "model.mir", "mir 1 modal").ok());
  EXPECT_THAT(error(), HasSubstr("model.mir: line 1, column 7: expected 'model', found 'modal'"));
}

TEST_F(MirDirTest, CopiesTheTokenizer) {
  fs::create_directories(dir_ / "from/tokenizer");
  for (const char* name : {"tokenizer.json", "generation_config.json", "other.txt"})
    ASSERT_TRUE(write_file(dir_ / "from/tokenizer" / name, name).ok());
  ASSERT_TRUE(copy_tokenizer(dir_ / "from", dir_ / "to").ok());
  EXPECT_TRUE(fs::exists(dir_ / "to/tokenizer/tokenizer.json"));
  EXPECT_TRUE(fs::exists(dir_ / "to/tokenizer/generation_config.json"));
  EXPECT_FALSE(fs::exists(dir_ / "to/tokenizer/other.txt"));
  ASSERT_TRUE(copy_tokenizer(dir_ / "from/tokenizer", dir_ / "flat").ok());  // a checkpoint has them at its top
  EXPECT_TRUE(fs::exists(dir_ / "flat/tokenizer/tokenizer.json"));
  ASSERT_TRUE(write_file(dir_ / "file", "").ok());
  EXPECT_THAT(copy_tokenizer(dir_ / "from", dir_ / "file").error().message(),
              HasSubstr("file/tokenizer: cannot be created"));
}

TEST_F(MirDirTest, CopiesTheSourceConfigWhereThereIsOne) {
  ASSERT_TRUE(copy_source_config(dir_ / "older", dir_ / "to").ok());
  EXPECT_FALSE(fs::exists(dir_ / "to"));
  ASSERT_TRUE(write_source_config("{\"a\": 1}", dir_ / "from").ok());
  ASSERT_TRUE(copy_source_config(dir_ / "from", dir_ / "to").ok());
  EXPECT_EQ(read_file(dir_ / "to" / kSourceConfig).value(), "{\"a\": 1}");
  ASSERT_TRUE(write_file(dir_ / "file", "").ok());
  EXPECT_THAT(copy_source_config(dir_ / "from", dir_ / "file").error().message(), HasSubstr("file/source: cannot be created"));
}

}  // namespace
}  // namespace mi::ir
