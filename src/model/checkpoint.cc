#include "model/checkpoint.h"

#include <algorithm>
#include <cstdio>
#include <set>

#include "base/json.h"
#include "base/counted.h"
#include "model/folder.h"

namespace mi::model {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";
constexpr int kMaxShards = 100000;

// "model-00002-of-00005.safetensors" -> 2, 5.
struct ShardName {
  int number = 0, count = 0;
};
std::optional<ShardName> shard_name(const std::string& name) {
  ShardName s;
  int end = 0;
  if (std::sscanf(name.c_str(), "model-%5d-of-%5d.safetensors%n", &s.number, &s.count, &end) != 2 ||
      size_t(end) != name.size())
    return std::nullopt;
  if (s.number < 1 || s.count < 1 || s.count > kMaxShards) return std::nullopt;
  return s;
}

std::vector<std::string> safetensors_in(const Path& dir) {
  std::vector<std::string> names;
  std::error_code ec;
  for (fs::directory_iterator it(dir, ec), end; !ec && it != end; it.increment(ec))
    if (it->path().extension() == ".safetensors") names.push_back(it->path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

// The shards of a folder without index, in order; all of one numbering and complete.
Result<std::vector<std::string>> shards_without_index(const Path& dir, const std::vector<std::string>& names) {
  std::map<int, std::string> shards;
  int count = 0;
  for (const std::string& n : names) {
    const auto s = shard_name(n);
    if (!s) continue;
    if (count != 0 && s->count != count)
      return bad_input(
          "{}: shards of two sets, one of {} and one of {} files; there is no {} that says which belong to the model",
          dir.string(), count, s->count, kIndex);
    count = s->count;
    if (!shards.emplace(s->number, n).second || s->number > count)
      return bad_input("{}: {} does not fit a set of {} shards", dir.string(), n, count);
  }
  std::vector<std::string> missing, listed;
  for (int i = 1; i <= count && missing.size() < 100; ++i) {
    if (shards.count(i))
      listed.push_back(shards[i]);
    else
      missing.push_back(fmt::format("model-{:05}-of-{:05}.safetensors", i, count));
  }
  if (!missing.empty())
    return bad_input("{}: {} of {} shards are missing: {}; fetch them again", dir.string(), missing.size(), count,
                     list_text(missing));
  return listed;
}

Error no_checkpoint(const Path& dir) {
  std::error_code ec;
  for (fs::directory_iterator it(dir, ec), end; !ec && it != end; it.increment(ec)) {
    const std::string name = it->path().filename().string();
    if (name.ends_with(".bin") || name.ends_with(".pt") || name.ends_with(".pth"))
      return bad_input("{}: holds {}, but no {}; pickled weights are not read: convert them to safetensors",
                       dir.string(), name, kSingle);
  }
  return bad_input("{}: holds no {} and no shards model-00001-of-000NN.safetensors", dir.string(), kSingle);
}

}  // namespace

std::string list_text(const std::vector<std::string>& names, size_t most) {
  std::string s;
  for (size_t i = 0; i < std::min(most, names.size()); ++i) s += (i ? ", " : "") + names[i];
  if (names.size() > most) s += fmt::format(" and {} more", names.size() - most);
  return s;
}

const Checkpoint::Tensor* Checkpoint::find(std::string_view name) const {
  const auto it = tensors_.find(name);
  return it == tensors_.end() ? nullptr : &it->second;
}

std::vector<const MappedFile*> Checkpoint::files() const {
  std::vector<const MappedFile*> out;
  for (const auto& f : files_) out.push_back(&f->file());
  if (gguf_) out.push_back(gguf_.get());
  return out;
}

Result<Checkpoint> Checkpoint::open_gguf(const Path& file, GgufHeader* h) {
  Checkpoint c;
  c.dir_ = file;
  MI_TRY(MappedFile mapped, MappedFile::open(file));
  c.gguf_ = std::make_unique<MappedFile>(std::move(mapped));
  MI_TRY(*h, read_gguf_bytes(c.gguf_->bytes(), file.string()));
  const std::pair<uint32_t, DType> kFloats[] = {{0, DType::kF32}, {1, DType::kF16}, {30, DType::kBF16}};
  for (const GgufHeader::Tensor& t : h->tensors) {
    auto e = std::make_unique<Safetensors::Entry>(
        Safetensors::Entry{t.name, DType::kU8, t.shape, size_t(t.begin), size_t(t.begin + t.bytes)});
    Tensor entry{c.gguf_.get(), e.get(), t.type};
    for (const auto& [type, dtype] : kFloats)
      if (type == t.type) {
        e->dtype = dtype;
        entry.gguf_type.reset();
      }
    c.tensors_.emplace(t.name, entry);
    c.gguf_entries_.push_back(std::move(e));
  }
  return c;
}

Status Checkpoint::open_file(const std::string& name, const std::string& origin) {
  MI_TRY(const Path p, file_in_folder(dir_, name, origin));
  MI_TRY(Safetensors s, Safetensors::open(p));
  files_.push_back(std::make_unique<Safetensors>(std::move(s)));
  const Safetensors& file = *files_.back();
  for (const Safetensors::Entry& e : file.entries()) {
    const auto [it, added] = tensors_.try_emplace(e.name, Tensor{&file.file(), &e});
    if (!added)
      return bad_input("{}: tensor {} is in {} too; remove one of the files or fetch the checkpoint again", p.string(),
                       e.name, it->second.path());
  }
  return {};
}

// Files beside the listed ones: one that looks like a shard, or that repeats a tensor, makes the checkpoint ambiguous.
Status Checkpoint::refuse_strangers(const std::vector<std::string>& listed) {
  for (const std::string& name : safetensors_in(dir_)) {
    if (std::find(listed.begin(), listed.end(), name) != listed.end()) continue;
    if (shard_name(name) || name == kSingle)
      return bad_input(
          "{}: {} lies beside the model's {}, but is not one of them; remove it or fetch the checkpoint again",
          dir_.string(), name, counted(int64_t(listed.size()), "file"));
    const auto p = file_in_folder(dir_, name, "the folder");
    const auto s = p.ok() ? Safetensors::open(*p) : Result<Safetensors>(p.error());
    if (s.ok())
      for (const Safetensors::Entry& e : s->entries())
        if (tensors_.count(e.name))
          return bad_input("{}: {} repeats tensor {} of {}, but is not part of the model; remove it from the folder",
                           dir_.string(), name, e.name, tensors_.find(e.name)->second.path());
    notes_.push_back(fmt::format("{} is not part of the checkpoint and was not read", name));
  }
  return {};
}

Result<Checkpoint> Checkpoint::open(const Path& dir) {
  Checkpoint c;
  c.dir_ = dir;
  const std::vector<std::string> names = safetensors_in(dir);
  if (!is_in_folder(dir, kIndex)) {
    std::vector<std::string> listed;
    if (is_in_folder(dir, kSingle)) {
      listed = {kSingle};
    } else {
      MI_TRY(listed, shards_without_index(dir, names));
      if (listed.empty()) return no_checkpoint(dir);
      c.notes_.push_back(fmt::format("no {}: the {} shards are taken by their names", kIndex, listed.size()));
    }
    for (const std::string& n : listed) MI_TRY_VOID(c.open_file(n, "the folder"));
    MI_TRY_VOID(c.refuse_strangers(listed));
    return c;
  }

  MI_TRY(const Path index_path, file_in_folder(dir, kIndex, "the folder"));
  MI_TRY(const Json index, read_json(index_path));
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object())
    return bad_input("{}: expected an object with weight_map", index_path.string());
  const Json& map = index["weight_map"];
  std::set<std::string> shards;
  for (const auto& [tensor, shard] : map.items()) {
    if (!shard.is_string()) return bad_input("{}: weight_map: {}: expected a file name", index_path.string(), tensor);
    shards.insert(shard.get<std::string>());
  }
  std::vector<std::string> missing;
  for (const std::string& s : shards) {
    auto p = file_in_folder(dir, s, kIndex);
    if (p.ok()) continue;
    if (s.find('/') != s.npos || s.find('\0') != s.npos || s.empty() || is_in_folder(dir, s)) return p.error();
    missing.push_back(s);
  }
  if (!missing.empty())
    return bad_input("{}: {} of {} shards that {} lists are missing: {}; fetch them again", dir.string(),
                     missing.size(), shards.size(), kIndex, list_text(missing));

  const std::vector<std::string> listed(shards.begin(), shards.end());
  for (const std::string& n : listed) MI_TRY_VOID(c.open_file(n, kIndex));
  for (const auto& [name, shard] : map.items()) {
    const Tensor* t = c.find(name);
    const std::string where = shard.get<std::string>();
    if (!t)
      return bad_input("{}: tensor {} should be in {}, which does not hold it; fetch the checkpoint again",
                       index_path.string(), name, where);
    if (t->file->path().filename() != where)
      return bad_input("{}: tensor {} should be in {}, but it is in {}", index_path.string(), name, where,
                       t->file->path().filename().string());
  }
  for (const auto& [name, t] : c.tensors_)
    if (!map.contains(name))
      return bad_input("{}: tensor {} is not listed in {}; the index is not that of these shards", t.path(), name,
                       kIndex);
  MI_TRY_VOID(c.refuse_strangers(listed));
  return c;
}

}  // namespace mi::model
