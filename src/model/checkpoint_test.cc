// Which files make a checkpoint: three-way check of index, shards and disk; names that leave the folder.

#include "model/checkpoint.h"

#include <gmock/gmock.h>
#include <sys/stat.h>

#include "model/testing.h"

namespace mi::model {
namespace {

using namespace testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr const char* kShard1 = "model-00001-of-00002.safetensors";
constexpr const char* kShard2 = "model-00002-of-00002.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";
constexpr const char* kDown = "model.layers.0.mlp.experts.1.down_proj.weight";

// The tiny model in two shards with an index that `edit` may change.
struct Sharded {
  TempDir tmp;
  Json map = Json::object();
  Sharded() {
    write_text(tmp / "config.json", dump_json(Tiny{}.config()));
    TensorMap parts[2];
    size_t i = 0;
    for (auto& [name, t] : Tiny{}.tensors()) {
      const int shard = i++ % 2;
      map[name] = shard == 0 ? kShard1 : kShard2;
      parts[shard][name] = t;
    }
    write_tensors(tmp / kShard1, parts[0]);
    write_tensors(tmp / kShard2, parts[1]);
    write_index();
  }
  void write_index() const {
    write_text(tmp / kIndex, dump_json(Json{{"metadata", {{"total_size", 0}}}, {"weight_map", map}}));
  }
  Result<ExportReport> open() const { return check(tmp.path()); }
};

TEST(Checkpoint, ShardsWithIndexLoad) {
  Sharded s;
  const auto r = s.open();
  ASSERT_TRUE(r.ok()) << r.error().message();
  EXPECT_EQ(r->used_tensors, int64_t(Tiny{}.tensors().size()));
}

TEST(Checkpoint, DeletedShardIsNamed) {
  Sharded s;
  fs::remove(s.tmp / kShard2);
  EXPECT_THAT(refusal(s.open()), HasSubstr(kShard2));
}

TEST(Checkpoint, TensorThatOnlyTheIndexForgetsIsNamed) {
  Sharded s;
  s.map.erase(kDown);
  s.write_index();
  EXPECT_THAT(refusal(s.open()), AllOf(HasSubstr(kDown), HasSubstr(kIndex)));
}

TEST(Checkpoint, UnlistedShardIsRefused) {
  Sharded s;
  write_tensors(s.tmp / "model-00003-of-00003.safetensors", {{kDown, random_bf16({32, 16}, 9)}});
  EXPECT_THAT(refusal(s.open()), HasSubstr("model-00003-of-00003.safetensors"));
}

TEST(Checkpoint, UnlistedFileThatRepeatsTensorsIsRefusedWhateverItsName) {
  Sharded s;
  write_tensors(s.tmp / "extra.safetensors", {{kDown, random_bf16({32, 16}, 9)}});
  EXPECT_THAT(refusal(s.open()), AllOf(HasSubstr("extra.safetensors"), HasSubstr(kDown)));
}

TEST(Checkpoint, ForeignFileIsIgnoredWithANote) {
  Sharded s;
  write_tensors(s.tmp / "golden.safetensors", {{"seq0.logits", random_bf16({2, 2}, 9)}});
  const auto r = s.open();
  ASSERT_TRUE(r.ok()) << r.error().message();
  EXPECT_THAT(r->notes, ::testing::Contains(HasSubstr("golden.safetensors")));
}

TEST(Checkpoint, ShardsWithoutIndexLoadWhenComplete) {
  Sharded s;
  fs::remove(s.tmp / kIndex);
  const auto r = s.open();
  ASSERT_TRUE(r.ok()) << r.error().message();
  EXPECT_THAT(r->notes, ::testing::Contains(HasSubstr(kIndex)));
  fs::remove(s.tmp / kShard1);
  EXPECT_THAT(refusal(s.open()), HasSubstr(kShard1));
}

TEST(Checkpoint, ShardsOfTwoSetsAreRefused) {
  Sharded s;
  fs::remove(s.tmp / kIndex);
  fs::copy(s.tmp / kShard1, s.tmp / "model-00001-of-00003.safetensors");
  EXPECT_THAT(refusal(s.open()), HasSubstr("two sets"));
}

TEST(Checkpoint, IndexThatPutsATensorIntoAnotherShardIsRefused) {
  Sharded s;
  s.map[kDown] = s.map[kDown] == kShard1 ? kShard2 : kShard1;
  s.write_index();
  EXPECT_THAT(refusal(s.open()), HasSubstr(kDown));
}

TEST(Checkpoint, NamesThatLeaveTheFolderAreNeverOpened) {
  TempDir outside;
  write_text(outside / "secret", "x");
  for (const std::string& name :
       {std::string("../model.safetensors"), std::string("/etc/hostname"), std::string(""), std::string("."),
        std::string(".."), std::string("sub/model.safetensors"), std::string("a\0b", 3), std::string("folder"),
        std::string("link"), std::string("fifo"), std::string("dangling")}) {
    Sharded s;
    fs::create_directory(s.tmp / "folder");
    fs::create_symlink(outside / "secret", s.tmp / "link");
    fs::create_symlink(outside / "nothing", s.tmp / "dangling");
    ASSERT_EQ(mkfifo((s.tmp / "fifo").c_str(), 0600), 0);  // opening it for reading would wait for ever
    s.map[kDown] = name;
    s.write_index();
    const std::string message = refusal(s.open());
    EXPECT_THAT(message,
                ::testing::AnyOf(HasSubstr("no plain file name"), HasSubstr("link"), HasSubstr("not a regular file")))
        << name;
  }
}

TEST(Checkpoint, LinksInsideTheFolderAndIntoADownloadCacheAreFollowed) {
  Sharded s;
  fs::rename(s.tmp / kShard1, s.tmp / "data1");
  fs::create_symlink("data1", s.tmp / kShard1);
  EXPECT_TRUE(s.open().ok());

  TempDir cache;
  fs::create_directories(cache / "blobs");
  fs::create_directories(cache / "snapshots/abc");
  int i = 0;
  for (const std::string name : {"config.json", kIndex, kShard1, kShard2}) {
    const std::string blob = std::to_string(i++);
    fs::copy(s.tmp / name, cache / ("blobs/" + blob));
    fs::create_symlink("../../blobs/" + blob, cache / ("snapshots/abc/" + name));
  }
  const auto r = check(cache / "snapshots/abc");
  EXPECT_TRUE(r.ok()) << r.error().message();
}

TEST(Checkpoint, ConfigAndTokenizerLinksOutOfTheFolderAreRefused) {
  for (const char* name :
       {"tokenizer.json", "chat_template.jinja", "generation_config.json", "tokenizer_config.json"}) {
    TempDir tmp, outside;
    write_checkpoint(tmp.path(), Tiny{}.config(), Tiny{}.tensors());
    write_text(outside / "secret", "{}");
    fs::create_symlink(outside / "secret", tmp / name);
    EXPECT_THAT(refusal(check(tmp.path())), HasSubstr("link out of the folder")) << name;
  }
}

TEST(Checkpoint, NothingToReadIsSaid) {
  TempDir tmp;
  EXPECT_THAT(refusal(check(tmp.path())), HasSubstr("config.json"));
  EXPECT_THAT(refusal(check(tmp / "nowhere")), HasSubstr("no such folder"));
  write_text(tmp / "config.json", dump_json(Tiny{}.config()));
  EXPECT_THAT(refusal(check(tmp.path())), HasSubstr("model.safetensors"));
  write_text(tmp / "pytorch_model.bin", "x");
  EXPECT_THAT(refusal(check(tmp.path())), HasSubstr("pytorch_model.bin"));
}

}  // namespace
}  // namespace mi::model
