#include "ir/mir_dir.h"

#include <algorithm>
#include <unordered_set>

#include "base/place.h"
#include "base/util.h"
#include "ir/text.h"
#include "ir/verify.h"

namespace mi::ir {
namespace fs = std::filesystem;

namespace {

constexpr size_t kMaxModelText = size_t(16) << 20;

void declare(const Block& b, int32_t layer, std::vector<SafetensorsWriter::Decl>* out) {
  for (const WeightDecl& d : b.weights) {
    const std::string name = full_name(d.name, layer);
    out->push_back({name, d.dtype, stored_shape(d)});
    if (is_quantized(d)) out->push_back({name + "_scale", DType::kF32, scale_shape(d)});
  }
}

Result<std::vector<Path>> weight_files(const Path& dir) {
  std::vector<Path> files;
  std::error_code ec;
  for (fs::directory_iterator it(dir, ec), end; !ec && it != end; it.increment(ec))
    if (it->path().extension() == ".safetensors") files.push_back(it->path());
  if (ec)
    return bad_input("{}: cannot be listed: {}; is this a MIR directory (the output of export or quantize)?",
                     dir.string(), ec.message());
  std::sort(files.begin(), files.end());
  return files;
}

// A MIR is not fetched, unlike the checkpoints that the readers of its files speak of.
Error make_again(const Error& e) {
  std::string m = e.message();
  constexpr std::string_view kFetch = "; fetch it again";
  if (m.ends_with(kFetch)) m.resize(m.size() - kFetch.size());
  return Error(e.code(), e.code() == ErrorCode::kBadInput ? m + "; export or quantize the model again" : m);
}

// The tensors in the files are the declared ones, each once.
Status check_tensors(const MirDir& m) {
  const auto decls = declared_tensors(m.graph);
  std::unordered_set<std::string_view> declared;
  for (const auto& d : decls) {
    declared.insert(d.name);
    const auto it = m.index.find(d.name);
    if (it == m.index.end())
      return bad_input("{}: tensor {} is missing: model.mir declares it, no file of weights/ holds it", m.dir.string(),
                       d.name);
    const auto& [file, e] = it->second;
    const std::string where = m.files[size_t(file)]->file().path().string();
    if (e->dtype != d.dtype)
      return bad_input("{}: tensor {} is {}, model.mir declares {}", where, d.name, dtype_name(e->dtype),
                       dtype_name(d.dtype));
    if (e->shape != d.shape)
      return bad_input("{}: tensor {} has shape {}, model.mir declares {}", where, d.name, shape_text(e->shape),
                       shape_text(d.shape));
  }
  for (const auto& [name, place] : m.index)
    if (!declared.count(name))
      return bad_input("{}: tensor {} is not declared in model.mir",
                       m.files[size_t(place.first)]->file().path().string(), name);
  return {};
}

}  // namespace

std::vector<SafetensorsWriter::Decl> declared_tensors(const Graph& g) {
  std::vector<SafetensorsWriter::Decl> out;
  declare(g.prologue, -1, &out);
  std::unordered_set<std::string> first;
  for (const auto& d : out) first.insert(d.name);
  for (int32_t l = 0; l < g.info.layers; ++l) declare(g.block_of(l), l, &out);
  std::vector<SafetensorsWriter::Decl> last;
  declare(g.epilogue, -1, &last);
  for (auto& d : last)
    if (!first.count(d.name)) out.push_back(std::move(d));
  return out;
}

Result<MirDir> MirDir::open(const Path& dir) {
  MirDir m;
  m.dir = dir;
  const Path text_path = dir / "model.mir";
  std::error_code ec;
  if (!std::filesystem::exists(text_path, ec)) {
    if (std::filesystem::exists(dir / "engine.json", ec))
      return bad_input("{}: this is an engine, not a MIR directory; give what metainfer export or quantize wrote",
                       dir.string());
    if (std::filesystem::exists(dir / "config.json", ec))
      return bad_input("{}: this is a checkpoint, not a MIR directory; run 'metainfer export --model-dir {}' first",
                       dir.string(), dir.string());
    if (!std::filesystem::exists(dir, ec)) return bad_input("{}: no such folder", dir.string());
    if (lower_ending(dir) == ".gguf")
      return bad_input("{}: this is a GGUF file, not a MIR directory; run 'metainfer export --model-dir {}' first",
                       dir.string(), dir.string());
    return bad_input("{}: {}; give the MIR directory that metainfer export or quantize wrote", dir.string(),
                     std::filesystem::is_directory(dir, ec) ? "this folder holds no model.mir" : "this is a file");
  }
  MI_TRY(const std::string text, read_file(text_path, kMaxModelText));
  auto graph = parse(text);
  if (!graph.ok()) return graph.error().with_context(text_path.string());
  if (auto s = verify(*graph); !s.ok()) return s.error().with_context(text_path.string());
  m.graph = std::move(graph).value();
  auto provenance = read_json(dir / "provenance.json");
  if (!provenance.ok()) return make_again(provenance.error());
  if (!provenance->is_object()) return make_again(bad_input("{}: expected an object", (dir / "provenance.json").string()));
  m.provenance = std::move(provenance).value();

  MI_TRY(const std::vector<Path> paths, weight_files(dir / "weights"));
  for (const Path& p : paths) {
    auto opened = Safetensors::open(p);
    if (!opened.ok()) return make_again(opened.error());
    m.files.push_back(std::make_shared<Safetensors>(std::move(opened).value()));
    for (const Safetensors::Entry& e : m.files.back()->entries()) {
      const auto [it, added] = m.index.try_emplace(e.name, std::pair{int(m.files.size()) - 1, &e});
      if (!added)
        return bad_input("{}: tensor {} is in {} too", p.string(), e.name,
                         m.files[size_t(it->second.first)]->file().path().string());
    }
  }
  MI_TRY_VOID(check_tensors(m));
  return m;
}

MirDir piece_of(const MirDir& whole, int32_t layer) {
  MirDir m;
  m.dir = whole.dir;
  m.provenance = whole.provenance;
  m.files = whole.files;
  Graph& g = m.graph;
  g.info = whole.graph.info;
  if (layer < 0) {
    g.info.layers = 1;
    g.prologue = whole.graph.prologue;
    g.epilogue = whole.graph.epilogue;
    Block through;
    through.name = "through";
    through.layers = {0};
    BlockBuilder t(&through);
    const ValueId x = t.input("x", {Rows::kToken, g.info.hidden, Elem::kF32});
    t.output(t.node(Op::kScale, {x}, {}, ScaleParams{1}, "same"));
    g.blocks.push_back(std::move(through));
    for (const auto& d : declared_tensors(g)) {
      if (const auto it = whole.index.find(d.name); it != whole.index.end()) m.index.emplace(*it);
      if (const auto it = whole.made.find(d.name); it != whole.made.end()) m.made.emplace(*it);
    }
    return m;
  }
  g.info.layers = 1;
  g.info.vocab = 1;
  g.blocks.push_back(whole.graph.block_of(layer));
  g.blocks[0].layers = {0};
  std::vector<SafetensorsWriter::Decl> from, to;
  declare(g.blocks[0], layer, &from);
  declare(g.blocks[0], 0, &to);
  for (size_t i = 0; i < from.size(); ++i) {
    if (const auto it = whole.index.find(from[i].name); it != whole.index.end()) m.index.emplace(to[i].name, it->second);
    if (const auto it = whole.made.find(from[i].name); it != whole.made.end()) m.made.emplace(to[i].name, it->second);
  }

  const int64_t hidden = g.info.hidden;
  const auto stub = [&](Block* b, const char* name, Mark mark) {
    m.made[name] = std::make_shared<const Tensor>(make_tensor(DType::kBF16, {1, hidden}));
    return BlockBuilder(b).weight({name, DType::kBF16, {1, hidden}, WeightFormat::kFloat, mark, 0});
  };
  g.prologue.name = "prologue";
  const int32_t embed = stub(&g.prologue, "embed.weight", Mark::kEmbedding);
  BlockBuilder p(&g.prologue);
  p.output(p.node(Op::kEmbed, {}, {{Role::kWeight, {embed}}}, EmbedParams{}, "x"));
  g.epilogue.name = "epilogue";
  const int32_t head = stub(&g.epilogue, "lm_head.weight", Mark::kHead);
  BlockBuilder e(&g.epilogue);
  const ValueId x = e.input("x", {Rows::kToken, hidden, Elem::kF32});
  const ValueId last = e.node(Op::kSelectRows, {x}, {}, SelectRowsParams{}, "last");
  e.output(e.node(Op::kLinear, {last}, {{Role::kWeight, {head}}}, LinearParams{}, "logits"));
  return m;
}

TensorView MirDir::weight(std::string_view full_name) const {
  if (const auto own = made.find(full_name); own != made.end()) return own->second->view();
  const auto it = index.find(full_name);
  MI_CHECK(it != index.end(), "{}: no tensor {}", dir.string(), full_name);
  return files[size_t(it->second.first)]->view(*it->second.second);
}

void MirDir::give_back(std::string_view full_name) const {
  const auto it = index.find(full_name);
  if (it == index.end() || made.count(full_name)) return;
  const auto& [file, entry] = it->second;
  files[size_t(file)]->file().drop(entry->begin, entry->end - entry->begin);
}

struct MirWriter::Impl {
  Path out;
  std::vector<SafetensorsWriter::Decl> order;
  std::vector<size_t> shard_end;  // shard s holds order[shard_end[s-1] .. shard_end[s])
  std::vector<uint64_t> shard_bytes;
  size_t shard = 0;      // the shard being written; shard_end.size(): all done
  uint64_t written = 0;  // bytes of it
  std::optional<SafetensorsWriter> file;
  Path kept;
  size_t kept_shards = 0;
  std::optional<Xxh3> sum;  // of the shard's tensors, where it is kept

  static std::string name(size_t shard) { return fmt::format("{:05}.safetensors", shard + 1); }
  size_t begin_of(size_t s) const { return s == 0 ? 0 : shard_end[s - 1]; }

  Path sum_file() const { return kept / (name(shard) + ".xxh3"); }

  // Links the next shard from `kept`, where it is whole and holds what it should.
  bool take_kept() {
    auto found = Safetensors::open(kept / name(shard));
    if (!found.ok() || found->entries().size() != shard_end[shard] - begin_of(shard)) return false;
    for (size_t i = begin_of(shard); i < shard_end[shard]; ++i) {
      const auto* e = found->find(order[i].name);
      if (!e || e->dtype != order[i].dtype || e->shape != order[i].shape) return false;
    }
    const auto& entries = found->entries();
    const auto recorded = read_file(sum_file(), 64);
    const auto tensors = found->file().bytes().subspan(entries.front().begin, entries.back().end - entries.front().begin);
    if (!recorded.ok() || *recorded != xxh3_hex(tensors)) return false;
    std::error_code ec;
    fs::create_hard_link(kept / name(shard), out / "weights" / name(shard), ec);
    return !ec;
  }

  Status open_shard() {
    const size_t begin = begin_of(shard);
    const Path p = out / "weights" / name(shard);
    MI_TRY(SafetensorsWriter w, SafetensorsWriter::create(p, {order.begin() + ptrdiff_t(begin),
                                                              order.begin() + ptrdiff_t(shard_end[shard])}));
    file.emplace(std::move(w));
    written = 0;
    if (!kept.empty()) sum.emplace();
    return {};
  }
};

MirWriter::MirWriter(std::unique_ptr<Impl> i) : impl_(std::move(i)) {}
MirWriter::MirWriter(MirWriter&&) noexcept = default;
MirWriter::~MirWriter() = default;

Result<MirWriter> MirWriter::create(const Path& out, const Graph& g, size_t shard_bytes, const Path& kept) {
  auto impl = std::make_unique<Impl>();
  impl->out = out;
  impl->kept = kept;
  impl->order = declared_tensors(g);
  uint64_t bytes = 0;
  for (size_t i = 0; i < impl->order.size(); ++i) {
    const auto& d = impl->order[i];
    const auto count = shape_count(d.shape);
    MI_CHECK(count, "{} {}", d.name, shape_text(d.shape));
    const uint64_t size = uint64_t(*count) * dtype_bytes(d.dtype);
    if (bytes > 0 && bytes + size > shard_bytes) {
      impl->shard_end.push_back(i);
      impl->shard_bytes.push_back(bytes);
      bytes = 0;
    }
    bytes += size;
  }
  if (!impl->order.empty()) {
    impl->shard_end.push_back(impl->order.size());
    impl->shard_bytes.push_back(bytes);
  }
  std::error_code ec;
  fs::create_directories(out / "weights", ec);
  if (ec) return fail(ErrorCode::kEnvironment, "{}: cannot be created: {}", (out / "weights").string(), ec.message());
  if (!kept.empty())
    while (impl->shard < impl->shard_end.size() && impl->take_kept()) ++impl->shard;
  impl->kept_shards = impl->shard;
  if (impl->shard < impl->shard_end.size()) MI_TRY_VOID(impl->open_shard());
  return MirWriter(std::move(impl));
}

const std::vector<SafetensorsWriter::Decl>& MirWriter::order() const { return impl_->order; }
size_t MirWriter::first() const { return impl_->begin_of(impl_->kept_shards); }

Result<Tensor> MirWriter::kept_tensor(size_t place) const {
  size_t shard = 0;
  while (place >= impl_->shard_end[shard]) ++shard;
  MI_CHECK(shard < impl_->kept_shards, "tensor {} was not kept", place);
  MI_TRY(const Safetensors file, Safetensors::open(impl_->out / "weights" / Impl::name(shard)));
  MI_TRY(const TensorView v, file.tensor(impl_->order[place].name));
  return Tensor{v.dtype, v.shape, {v.data, v.data + v.bytes}};
}

Status MirWriter::write(std::span<const std::byte> bytes) {
  Impl& m = *impl_;
  while (!bytes.empty()) {
    MI_CHECK(m.shard < m.shard_end.size(), "more bytes than the declared tensors hold");
    const size_t n = size_t(std::min<uint64_t>(bytes.size(), m.shard_bytes[m.shard] - m.written));
    MI_TRY_VOID(m.file->write(bytes.first(n)));
    if (m.sum) m.sum->update(bytes.first(n));
    m.written += n;
    bytes = bytes.subspan(n);
    if (m.written < m.shard_bytes[m.shard]) continue;
    MI_TRY_VOID(m.file->finish());
    m.file.reset();
    if (!m.kept.empty()) {
      std::error_code ec;  // a file system without links keeps nothing: then a later run starts anew
      fs::remove(m.sum_file(), ec);
      fs::remove(m.kept / Impl::name(m.shard), ec);
      fs::create_hard_link(m.out / "weights" / Impl::name(m.shard), m.kept / Impl::name(m.shard), ec);
      if (!ec) (void)write_file(m.sum_file(), m.sum->digest());  // without it the shard is made again
    }
    if (++m.shard < m.shard_end.size()) MI_TRY_VOID(m.open_shard());
  }
  return {};
}

Status MirWriter::finish(const Graph& g, const Json& provenance) {
  Impl& m = *impl_;
  MI_CHECK(m.shard == m.shard_end.size(), "tensors are missing: file {} of {}", m.shard + 1, m.shard_end.size());
  MI_TRY_VOID(verify(g));
  const auto same = [](const SafetensorsWriter::Decl& a, const SafetensorsWriter::Decl& b) {
    return a.name == b.name && a.dtype == b.dtype && a.shape == b.shape;
  };
  const auto decls = declared_tensors(g);
  MI_CHECK(std::equal(decls.begin(), decls.end(), m.order.begin(), m.order.end(), same),
           "the graph declares other tensors than were written");
  MI_TRY_VOID(write_file(m.out / "model.mir", print(g)));
  return write_file(m.out / "provenance.json", dump_json(provenance, 2) + "\n");
}

Status copy_tokenizer(const Path& from_dir, const Path& to_dir) {
  std::error_code ec;
  const Path from = fs::is_directory(from_dir / "tokenizer", ec) ? from_dir / "tokenizer" : from_dir;
  const Path to = to_dir / "tokenizer";
  fs::create_directories(to, ec);
  if (ec) return fail(ErrorCode::kEnvironment, "{}: cannot be created: {}", to.string(), ec.message());
  for (const char* name :
       {"tokenizer.json", "chat_template.jinja", "generation_config.json", "tokenizer_config.json"}) {
    if (!fs::is_regular_file(from / name, ec)) continue;
    fs::copy_file(from / name, to / name, fs::copy_options::overwrite_existing, ec);
    if (ec)
      return fail(ErrorCode::kEnvironment, "{}: cannot be copied to {}: {}", (from / name).string(),
                  (to / name).string(), ec.message());
  }
  return {};
}

Status write_source_config(std::string_view text, const Path& to_dir) {
  const Path to = to_dir / kSourceConfig;
  std::error_code ec;
  fs::create_directories(to.parent_path(), ec);
  if (ec) return fail(ErrorCode::kEnvironment, "{}: cannot be created: {}", to.parent_path().string(), ec.message());
  return write_file(to, text);
}

Status copy_source_config(const Path& from_dir, const Path& to_dir) {
  std::error_code ec;
  if (!fs::exists(from_dir / kSourceConfig, ec)) return {};
  MI_TRY(const std::string text, read_file(from_dir / kSourceConfig));
  return write_source_config(text, to_dir);
}

}  // namespace mi::ir
