#include "tools/convert_checkpoint.h"

#include <algorithm>
#include <chrono>
#include <map>

#include "base/place.h"
#include "base/space.h"
#include "base/version.h"
#include "tools/hf/config.h"
#include "tools/hf/write.h"

namespace mi::tools {
namespace {

namespace fs = std::filesystem;

// The tokenizer's files lie at the top of a checkpoint.
Status copy_text_files(const Path& mir, const Path& out) {
  std::error_code ec;
  for (fs::directory_iterator it(mir / "tokenizer", ec), end; !ec && it != end; it.increment(ec)) {
    if (!it->is_regular_file(ec)) continue;
    MI_TRY(const std::string text, read_file(it->path()));
    MI_TRY_VOID(write_file(out / it->path().filename(), text));
  }
  return {};
}

// What the config says of the float weights: of the embedding where they are as the MIR has them.
DType stated_type(const hf::FilePlan& plan, std::optional<DType> dtype) {
  if (dtype) return *dtype;
  for (const hf::FileTensor& t : plan.tensors)
    if (t.pieces.front().weight == "embed.weight") return t.dtype;
  return DType::kF32;
}

Json made_by(const ir::MirDir& m) {
  Json j = {{"tool", "metainfer convert"}, {"version", version()}, {"name", m.graph.info.name}};
  for (const char* key : {"source", "quantize"})
    if (m.provenance.contains(key)) j[key] = m.provenance[key];
  return j;
}

void count(const hf::FilePlan& plan, ConvertReport* r) {
  std::map<std::string, int64_t> types;
  for (const hf::FileTensor& t : plan.tensors) ++types[std::string(dtype_name(t.dtype))];
  r->types.assign(types.begin(), types.end());
  r->tensors = int64_t(plan.tensors.size());
}

void note(const hf::FilePlan& plan, const hf::Written& w, const ir::MirDir& m, DType dtype, ConvertReport* r) {
  if (w.rounded > 0)
    r->notes.push_back(fmt::format("{} tensors hold numbers that {} rounds; --type keep stores them as they are",
                                   w.rounded, dtype_name(dtype)));
  if (w.groups > 0) r->notes.push_back("activations of the int4 layers are float for who reads the folder (W4A16)");
  if (w.negative > 0)
    r->notes.push_back(fmt::format(
        "{} of {} int4 groups keep a scale below zero, since they hold a -8, whose opposite 4 bits do not have",
        w.negative, w.groups));
  if (plan.static_scales)
    r->notes.push_back("the calibrated scales of activations are left out: activations are rounded per token there");
  if (plan.saturates)
    r->notes.push_back("the scales per token do not saturate there: the calibrated numbers at which they end are left out");
  if (m.provenance.contains("skipped") && m.provenance["skipped"].is_object())
    for (const auto& [why, n] : m.provenance["skipped"].items())
      if (n.is_number_integer() && n != 0 && !why.starts_with("rope"))
        r->notes.push_back(
            fmt::format("{} tensors of the source are not in a MIR and not here: {}", n.get<int64_t>(), why));
}

}  // namespace

Result<ConvertReport> convert_to_checkpoint(const CheckpointOptions& o) {
  const auto start = std::chrono::steady_clock::now();
  MI_TRY_VOID(check_outside(o.model, o.output));
  MI_TRY(const ir::MirDir m, ir::MirDir::open(o.model));
  const bool plain = o.form == hf::Form::kPlain;
  ConvertReport r;
  r.format = plain ? "hf" : "compressed-tensors";
  r.name = m.graph.info.name;
  r.arch = m.graph.info.model_type;
  MI_TRY(const hf::FilePlan plan, hf::plan_files(m, o.form, o.dtype));
  if (!plain && std::none_of(plan.modules.begin(), plan.modules.end(),
                             [](const hf::Module& x) { return x.format != ir::WeightFormat::kFloat; }))
    return bad_input("{}: no weight is quantized, so nothing is for compressed-tensors; quantize first, or use --to hf",
                     o.model.string());
  const DType dtype = stated_type(plan, o.dtype);
  MI_TRY(const Json config, hf::make_config(m, plan, o.form, dtype, &r.notes));
  count(plan, &r);

  const uint64_t data = hf::tensor_bytes(plan);
  MI_TRY(OutputDir out, OutputDir::create(o.output, o.force));
  MI_TRY_VOID(check_space(o.output, data));
  Progress progress("convert", data, true);
  MI_TRY(const hf::Written w, hf::write_files(m, plan, out.path(), o.shard_bytes, &progress));
  progress.done();
  r.bytes = w.bytes;
  note(plan, w, m, dtype, &r);
  MI_TRY_VOID(write_file(out.path() / "config.json", dump_json(config, 2) + "\n"));
  MI_TRY_VOID(copy_text_files(o.model, out.path()));
  MI_TRY_VOID(write_file(out.path() / "metainfer.json", dump_json(made_by(m), 2) + "\n"));
  MI_TRY_VOID(out.commit());
  r.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return r;
}

}  // namespace mi::tools
