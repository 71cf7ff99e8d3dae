#include "model/export.h"

#include <algorithm>
#include <chrono>

#include "base/counted.h"
#include "base/json.h"
#include "base/place.h"
#include "base/space.h"
#include "base/util.h"
#include "base/version.h"
#include "ir/mir_dir.h"
#include "ir/verify.h"
#include "model/bind.h"
#include "model/dummy_weights.h"
#include "model/folder.h"
#include "model/gguf_import.h"
#include "model/origin.h"
#include "model/quant_scheme.h"
#include "model/tokenizer_files.h"
#include "model/weight_writer.h"

namespace mi::model {
namespace {

namespace fs = std::filesystem;

// What is wrong with the checkpoint, with the way out where the message has none yet.
Error with_way_out(const Error& e) {
  constexpr std::string_view kWays[] = {"fetch",  "did you mean", "known are", "correct",
                                        "remove", "--",           "use the",   "use another"};
  const std::string& m = e.message();
  const bool has =
      std::any_of(std::begin(kWays), std::end(kWays), [&](std::string_view w) { return m.find(w) != m.npos; });
  return e.code() != ErrorCode::kBadInput || has
             ? e
             : bad_input("{}; fetch this file again, or correct it if it is your own", m);
}

// What is exported: a folder with its config.json, or a GGUF file.
struct Located {
  Path dir, config, gguf;
};

Result<Located> locate(const ExportOptions& o) {
  std::error_code ec;
  if (fs::is_regular_file(o.model_dir, ec)) {
    if (o.model_dir.extension() == ".gguf") return Located{.gguf = o.model_dir};
    if (o.dummy_weights && o.model_dir.extension() == ".json")
      return Located{o.model_dir.parent_path(), o.model_dir, {}};
    return bad_input(
        "{}: is a file; --model-dir takes the folder that holds config.json and the weights, or a .gguf file",
        o.model_dir.string());
  }
  if (!fs::is_directory(o.model_dir, ec)) return bad_input("{}: no such folder", o.model_dir.string());
  if (!is_in_folder(o.model_dir, "config.json")) {
    std::vector<std::string> files;
    for (fs::directory_iterator it(o.model_dir, ec), end; !ec && it != end; it.increment(ec))
      if (it->path().extension() == ".gguf") files.push_back(it->path().filename().string());
    std::sort(files.begin(), files.end());
    if (files.size() > 1)
      return bad_input("{}: holds {} GGUF files ({}); --model-dir takes the path of one of them", o.model_dir.string(),
                       files.size(), list_text(files));
    if (files.size() == 1) {
      MI_TRY(const Path p, file_in_folder(o.model_dir, files[0], "the folder"));
      return Located{.gguf = p};
    }
    return bad_input("{}: holds no config.json; --model-dir takes the folder of a checkpoint", o.model_dir.string());
  }
  MI_TRY(const Path config, file_in_folder(o.model_dir, "config.json", "the folder"));
  return Located{o.model_dir, config, {}};
}

Result<Recipe> choose_recipe(const ExportOptions& o, const Json& root, const std::string& path,
                             std::string* model_type) {
  if (!root.is_object()) return bad_input("{}: expected an object", path);
  MI_TRY(const std::string said, json_get_or<std::string>(root, "model_type", "", path));
  *model_type = said.empty() ? o.model_type : said;
  if (model_type->empty())
    return bad_input("{}: model_type is missing; say it with --model-type ({})", path,
                     fmt::join(known_model_types(), ", "));
  Recipe r;
  if (!o.family_file.empty()) {
    MI_TRY(const std::string text, read_file(o.family_file, size_t(1) << 20));
    MI_TRY(r, parse_recipe(text, o.family_file.string()));
  } else {
    MI_TRY(r, find_recipe(o.model_type.empty() ? said : o.model_type, o.model_type.empty() ? path : "--model-type"));
  }
  for (const std::string& t : {o.model_type, said})
    if (!t.empty() && !accepts(r, t))
      return bad_input("{}: model_type is '{}', but the recipe {} is for {}", t == said ? path : "--model-type", t,
                       r.family, fmt::join(r.model_types, ", "));
  return r;
}

// Does the head read the embedding? The config, the files and --tie together.
Result<bool> decide_tied(const ArchSpec& a, const ExportOptions& o, Binder& b, const Checkpoint& k, Config& c,
                         std::vector<std::string>* notes) {
  using Tied = ArchSpec::Tied;
  const Checkpoint::Tensor* head = b.find_top("lm_head.weight");
  if (!head) {
    if (a.tied == Tied::kNo && !o.tie)
      return bad_input(
          "{}: {} is false, but no file holds lm_head.weight; fetch the checkpoint again, or give --tie if the head is "
          "meant to be the embedding",
          k.dir().string(), c.spelled("tied"));
    if (a.tied != Tied::kYes) notes->push_back("no lm_head.weight: the head is the embedding");
    return true;
  }
  if (a.tied != Tied::kYes) {
    if (o.tie) notes->push_back("--tie has no effect: the checkpoint has a head of its own, lm_head.weight");
    return false;
  }
  const Checkpoint::Tensor* embed = b.find_top("embed.weight");
  const TensorView h = head->view(), e = embed ? embed->view() : TensorView{};
  if (embed && h.dtype == e.dtype && h.shape == e.shape && std::equal(h.data, h.data + h.bytes, e.data)) {
    b.use_up("lm_head.weight");
    notes->push_back("lm_head.weight equals the embedding and is stored once");
    return true;
  }
  notes->push_back(fmt::format("warning: {} is true, but {} differs from the embedding; the head in the file is used",
                               c.spelled("tied"), head->name()));
  return false;
}

Result<int64_t> extra_layers(const Recipe& r, Config& c) {
  if (r.extra_layers.is_null()) return 0;
  if (r.extra_layers.is_number_integer()) return r.extra_layers.get<int64_t>();
  const std::string s = r.extra_layers.is_string() ? r.extra_layers.get<std::string>() : "";
  if (!s.starts_with("$")) return bad_input("{}.yaml: extra_layers: expected a number or $name", r.family);
  return c.eval(s.substr(1));
}

struct Place {
  int32_t layer;
  const ir::WeightDecl* decl;
};
std::map<std::string, Place> places(const ir::Graph& g) {
  std::map<std::string, Place> p;
  const auto add = [&](const ir::Block& b, int32_t layer) {
    for (const ir::WeightDecl& d : b.weights) p.emplace(ir::full_name(d.name, layer), Place{layer, &d});
  };
  add(g.prologue, -1);
  for (const ir::Block& b : g.blocks)
    for (int32_t l : b.layers) add(b, l);
  add(g.epilogue, -1);
  return p;
}

std::string source_text(const Source& s) {
  std::vector<std::string> names;
  for (const Part& p : s.parts) names.push_back(p.tensor->name());
  std::string text = names.size() <= 2
                         ? fmt::format("{}", fmt::join(names, ", "))
                         : fmt::format("{} .. {} ({} tensors)", names.front(), names.back(), names.size());
  if (!s.origin.ops.empty()) text += "  [" + ops_text(s.origin.ops) + "]";
  if (!s.scales.empty()) text += "  with _scale";
  if (s.dequantized()) text += "  dequantized from " + s.stored_as();
  return text;
}

std::string explain_text(const Config& c, const Recipe& r, const ir::Graph& g, const Binder* b,
                         const std::vector<std::pair<std::string, int64_t>>& skipped) {
  std::string s = fmt::format("recipe {}\nconfig values\n", r.family);
  for (const auto& v : c.resolved()) s += fmt::format("  {:<28} {:<24} {}\n", v.name, v.value, v.source);
  s += "tensors\n";
  for (const auto& d : ir::declared_tensors(g)) {
    std::string from = "(computed)";
    if (b) {
      const auto it = b->sources().find(d.name);
      if (it != b->sources().end())
        from = source_text(it->second);
      else if (d.name.ends_with("_scale") && b->sources().count(d.name.substr(0, d.name.size() - 6)))
        continue;
    } else if (!d.name.ends_with("rope.inv_freq")) {
      from = "(random)";
    }
    s += fmt::format("  {:<44} {:<5}{:<18} <- {}\n", d.name, dtype_name(d.dtype), shape_text(d.shape), from);
  }
  for (const auto& [why, n] : skipped) s += fmt::format("skipped: {} tensors, {}\n", n, why);
  return s;
}

// config: may be empty.
Result<Json> hash_files(const Checkpoint* k, const Path& config) {
  Json files = Json::object();
  if (!config.empty()) {
    MI_TRY(const std::string text, read_file(config));
    files[config.filename().string()] = {{"bytes", text.size()}, {"xxh3", xxh3_hex(std::as_bytes(std::span(text)))}};
  }
  if (!k) return files;
  uint64_t total = 0;
  for (const MappedFile* f : k->files()) total += f->bytes().size();
  Progress progress("hash", total, true);
  constexpr size_t kChunk = size_t(8) << 20;
  for (const MappedFile* f : k->files()) {
    const std::span<const std::byte> all = f->bytes();
    Xxh3 h;
    for (size_t at = 0; at < all.size(); at += kChunk) {
      const size_t n = std::min(kChunk, all.size() - at);
      f->will_need(at, std::min(2 * kChunk, all.size() - at));
      h.update(all.subspan(at, n));
      progress.advance(n, f->path().filename().string());
    }
    files[f->path().filename().string()] = {{"bytes", all.size()}, {"xxh3", h.digest()}};
  }
  progress.done();
  return files;
}

uint64_t total_bytes(const std::vector<SafetensorsWriter::Decl>& decls) {
  uint64_t n = 0;
  for (const auto& d : decls) n += uint64_t(*shape_count(d.shape)) * dtype_bytes(d.dtype);
  return n;
}

// Everything that export needs to know before it writes.
struct Plan {
  Recipe recipe;
  std::optional<Config> config;
  ArchSpec arch;
  std::optional<QuantScheme> scheme;
  std::optional<Checkpoint> checkpoint;
  std::optional<Binder> binder;
  std::optional<DummyWeights> dummy;
  const GgufArch* gguf = nullptr;  // the source is a GGUF file
  TokenizerFiles text;
  ir::Graph graph;
};

Status write_weights(const Plan& p, ir::MirWriter* out, DummyWeights* dummy, std::vector<std::string>* notes) {
  const auto where = places(p.graph);
  Progress progress(dummy ? "random weights" : "export", total_bytes(out->order()), true);
  WeightWriter writer(out, &progress, notes);
  for (const auto& d : out->order()) {
    const auto place = where.find(d.name);
    if (place != where.end() && place->second.decl->mark == ir::Mark::kConstant) {
      const LayerSpec& l = p.arch.layer[size_t(place->second.layer)];
      MI_TRY_VOID(out->write(std::as_bytes(std::span(p.arch.ropes[size_t(l.rope)].inv_freq))));
    } else if (dummy) {
      MI_TRY_VOID(dummy->write(d, place->second.decl->mark, out, &progress));
    } else if (place != where.end()) {
      MI_TRY_VOID(writer.write(d.name, p.binder->sources().at(d.name)));
    } else {
      const std::string matrix = d.name.substr(0, d.name.size() - std::string_view("_scale").size());
      MI_TRY_VOID(writer.write_scales(matrix, p.binder->sources().at(matrix)));
    }
  }
  progress.done();
  return {};
}

Json provenance(const ExportOptions& o, const Plan& p, const ExportReport& r, Json files) {
  Json j = Json::object();
  j["tool"] = "metainfer export";
  j["version"] = version();
  j["family"] = r.family;
  j["model_type"] = r.info.model_type;
  j["source"] = {{"name", fs::weakly_canonical(o.model_dir).filename().string()}, {"files", std::move(files)}};
  Json options = Json::object();
  if (!o.family_file.empty()) options["family_file"] = o.family_file.filename().string();
  if (o.tie) options["tie"] = true;
  if (o.dummy_weights) options["dummy_weights"] = {{"seed", o.seed}};
  j["options"] = std::move(options);
  j["quantized"] = p.scheme ? p.scheme->method() : p.gguf ? "gguf" : "none";
  Json skipped = Json::object();
  for (const auto& [why, n] : r.skipped) skipped[why] = n;
  j["skipped"] = std::move(skipped);
  if (p.binder) {
    Origins origins;
    for (const auto& [name, source] : p.binder->sources()) origins[name] = source.origin;
    j["tensors"] = origins_json(origins);
  }
  return j;
}

// Keys of config.json that nothing reads. One that looks like a slip of a key that the recipe would read is a warning.
void note_unread_keys(const Config& c, const Recipe& r, std::vector<std::string>* notes) {
  const std::vector<std::string> present = c.keys();
  std::vector<std::string> known, unread;
  for (const auto& [name, spec] : r.keys)
    for (const std::string& k : spec.keys)
      if (std::find(present.begin(), present.end(), k) == present.end()) known.push_back(k);
  for (const std::string& k : c.unread_keys()) {
    if (std::any_of(r.ignored_keys.begin(), r.ignored_keys.end(),
                    [&](const std::string& i) { return glob_match(i, k); }))
      continue;
    const std::string near = nearest_name(k, known);
    const bool slip =
        !near.empty() && std::max(near.size(), k.size()) - std::min(near.size(), k.size()) <= 2 && near[0] == k[0];
    if (slip)
      notes->push_back(fmt::format("warning: config.json: {} has no effect; did you mean {}?", k, near));
    else
      unread.push_back(k);
  }
  if (!unread.empty())
    notes->push_back(
        fmt::format("config.json: {} {} no effect", list_text(unread, 12), unread.size() == 1 ? "has" : "have"));
}

// Reads and checks everything; the graph is complete and every tensor accounted for.
Status make_plan(const ExportOptions& o, const Located& at, Plan* p, ExportReport* r) {
  const Path& config_path = at.gguf.empty() ? at.config : at.gguf;
  std::string model_type;
  Json root;
  GgufModel gguf;
  if (!at.gguf.empty()) {
    if (o.dummy_weights || !o.family_file.empty())
      return bad_input("{}: is a GGUF file, which {} is not for; give the folder of a checkpoint", at.gguf.string(),
                       o.dummy_weights ? "--dummy-weights" : "--family-file");
    GgufHeader header;
    MI_TRY(p->checkpoint, Checkpoint::open_gguf(at.gguf, &header));
    MI_TRY(gguf, read_gguf_model(header, at.gguf.string()));
    if (!o.model_type.empty() && !accepts(gguf.recipe, o.model_type))
      return bad_input("--model-type is '{}', but {} holds a model of the family {}; correct one of them", o.model_type,
                       at.gguf.string(), gguf.recipe.family);
    p->gguf = gguf.arch;
    p->recipe = gguf.recipe;
    p->text = gguf.text;
    root = gguf.config;
    model_type = gguf.model_type;
  } else {
    MI_TRY(root, read_json(config_path));
    MI_TRY(p->recipe, choose_recipe(o, root, config_path.string(), &model_type));
  }
  r->notes = p->recipe.notes;
  r->notes.insert(r->notes.end(), gguf.notes.begin(), gguf.notes.end());
  MI_TRY(p->config, Config::create(std::move(root), config_path.string(), p->recipe.keys, p->recipe.text_config));
  Config& c = *p->config;
  MI_TRY(p->arch, resolve_arch(p->recipe, c));
  p->arch.model_type = model_type;
  if (p->gguf) {
    if (auto s = follow_gguf(gguf, &p->arch); !s.ok()) return s.error().with_context(config_path.string());
  } else {
    MI_TRY(p->scheme, QuantScheme::read(c, o.dummy_weights ? Path() : at.dir));
  }
  MI_TRY(const int64_t extra, extra_layers(p->recipe, c));

  bool tied = false;
  if (o.dummy_weights) {
    p->dummy.emplace(p->arch, o.seed);
    p->scheme.reset();  // random weights are float, whatever the release is
    tied = p->arch.tied == ArchSpec::Tied::kYes ||
           (p->arch.tied == ArchSpec::Tied::kUnsaid && p->arch.tied_by_default) || o.tie;
  } else {
    if (!p->gguf) {
      MI_TRY(p->checkpoint, Checkpoint::open(at.dir));
    }
    r->notes.insert(r->notes.end(), p->checkpoint->notes().begin(), p->checkpoint->notes().end());
    if (p->scheme && !p->scheme->supported()) return p->scheme->refuse();
    MI_TRY(Binder b,
           Binder::create(p->recipe, *p->checkpoint, c, p->scheme ? &*p->scheme : nullptr, p->arch.layers, extra));
    p->binder.emplace(std::move(b));
    MI_TRY(tied, decide_tied(p->arch, o, *p->binder, *p->checkpoint, c, &r->notes));
  }
  const NeedWeight need = [&](int32_t layer, const std::string& local, const Shape& shape,
                              ir::Mark mark) -> Result<WeightInfo> {
    if (mark == ir::Mark::kConstant) return WeightInfo{DType::kF32};
    if (p->dummy) return WeightInfo{local == "moe.select_bias" ? DType::kF32 : p->dummy->dtype()};
    return p->binder->need(layer, local, shape, mark);
  };
  MI_TRY(p->graph, build_graph(p->arch, tied, need));
  if (p->binder) {
    MI_TRY_VOID(p->binder->finish());
    // What is dequantized gets its type once all of its kind is known.
    MI_TRY(const bool settled, p->binder->settle_dtypes());
    if (settled) {
      MI_TRY(p->graph,
             build_graph(p->arch, tied, [&](int32_t layer, const std::string& local, const Shape&, ir::Mark mark) {
               return mark == ir::Mark::kConstant ? WeightInfo{DType::kF32}
                                                  : p->binder->info(ir::full_name(local, layer));
             }));
    }
    r->dequantized = p->binder->dequantized();
    for (const std::string& n : p->binder->notes()) r->notes.push_back(n);
  }
  if (!p->gguf) {
    MI_TRY(p->text, read_tokenizer_files(at.dir));
  }
  ir::ModelInfo& info = p->graph.info;
  if (!p->text.eos_ids.empty()) info.eos_ids = p->text.eos_ids;
  info.name = !o.name.empty()  ? o.name
              : p->gguf        ? at.gguf.stem().string()
              : at.dir.empty() ? fs::weakly_canonical(".").filename().string()
                               : fs::weakly_canonical(at.dir).filename().string();
  if (auto s = ir::verify(p->graph); !s.ok()) return s.error().with_context(config_path.string());

  if (!p->gguf) note_unread_keys(c, p->recipe, &r->notes);  // those of GGUF are what the import put there
  r->notes.insert(r->notes.end(), p->text.notes.begin(), p->text.notes.end());
  if (p->scheme)
    for (const std::string& n : p->scheme->notes()) r->notes.push_back(n);
  return {};
}

}  // namespace

Result<ExportReport> export_model(const ExportOptions& o) {
  const auto start = std::chrono::steady_clock::now();
  ExportReport r;
  Plan p;
  MI_TRY_VOID(check_outside(o.model_dir, o.output));
  MI_TRY(const Located at, locate(o));
  if (auto s = make_plan(o, at, &p, &r); !s.ok()) return with_way_out(s.error());
  r.info = p.graph.info;
  r.family = p.recipe.family;
  if (p.checkpoint) r.source_tensors = int64_t(p.checkpoint->tensors().size());
  if (p.binder) {
    r.used_tensors = p.binder->used();
    r.skipped = p.binder->skipped();
  }
  r.has_tokenizer = p.text.has_tokenizer;
  r.has_chat_template = !p.text.chat_template.empty();
  for (const auto& [name, place] : places(p.graph))
    if (place.decl->mark != ir::Mark::kConstant) r.parameters += *shape_count(place.decl->shape);
  const auto decls = ir::declared_tensors(p.graph);
  r.bytes = total_bytes(decls);
  if (o.explain) r.explain = explain_text(*p.config, p.recipe, p.graph, p.binder ? &*p.binder : nullptr, r.skipped);

  if (!o.output.empty()) {
    MI_TRY(OutputDir out, OutputDir::create(o.output, o.force));
    MI_TRY_VOID(check_space(o.output, r.bytes));
    MI_TRY(Json files, hash_files(p.checkpoint ? &*p.checkpoint : nullptr, at.config));
    MI_TRY(ir::MirWriter writer, ir::MirWriter::create(out.path(), p.graph));
    if (auto s = write_weights(p, &writer, p.dummy ? &*p.dummy : nullptr, &r.notes); !s.ok())
      return with_way_out(s.error());
    MI_TRY_VOID(write_tokenizer_files(p.text, out.path()));
    std::string config = dump_json(p.config->root(), 2) + "\n";
    if (!p.gguf) {
      MI_TRY(config, read_file(at.config));
    }
    MI_TRY_VOID(ir::write_source_config(config, out.path()));
    MI_TRY_VOID(writer.finish(p.graph, provenance(o, p, r, std::move(files))));
    MI_TRY_VOID(out.commit());
  }
  r.graph = std::move(p.graph);
  r.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return r;
}

std::string report_text(const ExportReport& r) {
  std::string s;
  s += fmt::format("model         {} ({}, {} layers, hidden {}, vocabulary {})\n", r.info.name, r.family, r.info.layers,
                   r.info.hidden, r.info.vocab);
  const bool billions = r.parameters >= 1'000'000'000;
  s += fmt::format("weights       {:.4g} {} numbers, {}\n", double(r.parameters) / (billions ? 1e9 : 1e6),
                   billions ? "billion" : "million", human_bytes(double(r.bytes)));
  if (r.source_tensors > 0)
    s += fmt::format("tensors       {} in the checkpoint, {} read\n", r.source_tensors, r.used_tensors);
  for (const auto& [why, n] : r.skipped) s += fmt::format("skipped       {} tensors: {}\n", n, why);
  for (const auto& d : r.dequantized)
    s += fmt::format("dequantized   {}: {} to {}\n", counted(d.tensors, d.kind + " tensor"), d.format, dtype_name(d.dtype));
  s += fmt::format("text          {}, {}\n", r.has_tokenizer ? "tokenizer.json" : "no tokenizer",
                   r.has_chat_template ? "chat template" : "no chat template");
  for (const std::string& n : r.notes) s += "note          " + n + "\n";
  s += fmt::format("time          {}\n", human_seconds(r.seconds));
  return s;
}

}  // namespace mi::model
