#include <algorithm>

#include "base/util.h"
#include "ir/mir_dir.h"
#include "model/origin.h"
#include "quant/calibration_data.h"
#include "quant/rewrite.h"
#include "quant/temporary_engine.h"
#include "tensor/int4.h"
#include "tensor/safetensors.h"
#include "tools/trace.h"
#include "tools/verify.h"
#include "tools/verify_judge.h"
#include "tools/verify_weights.h"

namespace mi::tools {
namespace {

constexpr std::string_view kWhole = "dequant.", kFirstRows = "dequant_first32rows.";

Path temporary_place() { return std::filesystem::temp_directory_path() / "metainfer-verify"; }

// The declaration of a matrix or vector; nullptr for the scales of one.
const ir::WeightDecl* declaration(const ir::MirDir& mir, const std::string& name) {
  const int32_t layer = quant::layer_of(name);
  const auto named = [&](const ir::WeightDecl& d) { return ir::full_name(d.name, layer) == name; };
  const std::vector<const ir::Block*> blocks =
      layer < 0 ? std::vector{&mir.graph.prologue, &mir.graph.epilogue} : std::vector{&mir.graph.block_of(layer)};
  for (const ir::Block* b : blocks)
    if (const auto d = std::find_if(b->weights.begin(), b->weights.end(), named); d != b->weights.end()) return &*d;
  return nullptr;
}

// The numbers of a weight of the MIR that `part` says, widened: [rows, cols] from row `first` of the part.
Result<std::vector<float>> mir_rows(const ir::MirDir& mir, const model::OriginPart& part, int64_t rows, int64_t cols,
                                    const std::string& what) {
  const ir::WeightDecl* d = declaration(mir, part.tensor);
  const TensorView w = mir.weight(part.tensor);
  const Shape& shape = d ? d->shape : w.shape;  // of int4, w's is that of the bytes
  const int64_t k = shape.empty() ? 1 : shape.back(), count = shape_count(shape).value_or(0);
  const int64_t per_expert = part.expert < 0 ? count / k : count / shape[0] / k;
  const int64_t first = std::max<int64_t>(part.expert, 0) * per_expert + part.first_row;
  if (cols != k || part.first_row + rows > per_expert || (part.expert >= 0 && part.expert >= shape[0]))
    return bad_input("{} has {} rows of {}, but {} of the MIR has shape {}", what, rows, cols, part.tensor,
                     shape_text(shape));
  std::vector<float> out(size_t(rows * cols));
  if (!d || !ir::is_quantized(*d)) {
    convert_to_f32(w.data + size_t(first * cols) * dtype_bytes(w.dtype), w.dtype, out.data(), out.size());
    return out;
  }
  const std::vector<float> scale = to_f32_vector(mir.weight(part.tensor + "_scale"));
  const bool int4 = d->format == ir::WeightFormat::kW4A8;
  const int64_t row_bytes = int4 ? int4_row_bytes(k) : k, groups = int4 ? int4_groups(k, d->group) : 1;
  for (int64_t r = 0; r < rows; ++r) {
    const std::byte* row = w.data + (first + r) * row_bytes;
    for (int64_t c = 0; c < cols; ++c) {
      const int8_t q = int4 ? int4_at(reinterpret_cast<const uint8_t*>(row), c) : int8_t(row[c]);
      out[size_t(r * cols + c)] = float(q) * scale[size_t((first + r) * groups + (int4 ? c / d->group : 0))];
    }
  }
  return out;
}

// One recorded tensor against every part of the MIR that it fills.
Status judge_tensor(const ir::MirDir& mir, const model::Origins& origins, const Safetensors& f,
                    const Safetensors::Entry& e, bool whole, Judge* judge) {
  const std::string name = e.name.substr(whole ? kWhole.size() : kFirstRows.size()),
                    where = f.file().path().string() + ": " + e.name;
  const std::vector<model::OriginPart> parts = model::parts_from(origins, name);
  if (parts.empty())
    return bad_input("{}: no weight of {} comes from {}; is this the reference of another model?", where,
                     mir.dir.string(), name);
  for (const model::OriginPart& part : parts) {
    auto view = model::apply(part.origin->ops, model::view_of(f.view(e)), !part.tensor.ends_with(".weight"));
    if (!view.ok()) return bad_input("{} {}", where, view.error().message());
    if (view->dim.empty() || view->count() == 0) return bad_input("{} is empty", where);
    const int64_t cols = view->dim.back(), rows = view->count() / cols;
    std::vector<std::byte> raw(size_t(view->count()) * dtype_bytes(view->dtype));
    model::gather(*view, 0, view->count(), raw.data());
    std::vector<float> want(size_t(view->count()));
    convert_to_f32(raw.data(), view->dtype, want.data(), want.size());
    MI_TRY(const std::vector<float> found, mir_rows(mir, part, rows, cols, where));
    judge->weight(part.expert < 0 ? part.tensor : fmt::format("{}[{}]", part.tensor, part.expert), found, want);
  }
  return {};
}

}  // namespace

Status check_mir(const Path& mir) {
  MI_TRY_VOID(ir::MirDir::open(mir));
  return {};
}

Result<VerifyReport> verify_mir(const Session& s, const Path& engine, const Path& mir, const Path& data,
                                VerifyLimits limits) {
  MI_TRY(const quant::TemporaryEngine files, quant::build_temporary_engine(mir, temporary_place(), 0, "fp32"));
  exec::LoadOptions l = s.engine->options();
  l.kv_type = "f32";
  l.attention_order = "auto";
  l.progress = {};
  MI_TRY(const auto plain, exec::Engine::load(files.path(), l, *s.pool));
  const artifact::ModelFacts& m = s.engine->manifest().model;
  const artifact::ModelFacts& p = plain->manifest().model;
  if (p.vocab != m.vocab || p.hidden != m.hidden || p.layers != m.layers)
    return bad_input("{}: is not the model of this engine ({} layers of {} there, {} of {} here)", mir.string(),
                     p.layers, p.hidden, m.layers, m.hidden);

  quant::CalibrationRequest request;
  request.file = data;
  request.draw = !data.empty();
  request.samples = 4;
  request.length = std::min<int64_t>({256, s.max_seq_len, s.engine->options().max_tokens_per_step});
  request.vocab = m.vocab;
  MI_TRY(const quant::CalibrationSet set, quant::load_calibration(request, s.text.tokenizer.get(), s.text.chat.get()));
  Judge judge(judged_precision(s.engine->manifest()), s.engine->options().kv_type, limits);
  {
    MI_TRY(const artifact::LoadedArtifact a, artifact::open_artifact(engine));
    MI_TRY(const ir::MirDir m, ir::MirDir::open(mir));
    MI_TRY_VOID(judge_weights(a, m, &judge, *s.pool));
  }
  for (size_t i = 0; i < std::min<size_t>(set.sequences.size(), 4); ++i) {
    const Trace want = trace(*plain, set.sequences[i]), found = trace(*s.engine, set.sequences[i]);
    const std::string name = fmt::format("text {}", i);
    Trace alone;
    if (judge.rounds()) alone = trace(*s.engine, set.sequences[i], &want.residual);
    for (const auto& [layer, x] : want.residual) {
      if (layer >= 0 && want.routing.count(layer))
        judge.routing(fmt::format("{} layer {}", name, layer), found.routing.at(layer), want.routing.at(layer).ids, {});
      if (layer >= 0 && judge.rounds())
        judge.alone(fmt::format("{} layer {} alone", name, layer), alone.residual.at(layer), x, want.residual.at(layer - 1));
      judge.hidden(layer < 0 ? name + " embedding" : fmt::format("{} layer {} output", name, layer),
                   found.residual.at(layer), x);
    }
    judge.logits(name, found.logits, want.logits, m.vocab, false);
  }
  judge.kl_over_all();
  return judge.report;
}

Result<VerifyReport> verify_tensors(const Path& mir_dir, const Path& reference, SessionOptions so,
                                    VerifyLimits limits) {
  MI_TRY(const Safetensors f, Safetensors::open(reference));
  Judge judge("fp32", "f32", limits);
  {
    MI_TRY(const ir::MirDir mir, ir::MirDir::open(mir_dir));
    MI_TRY(const model::Origins origins, model::read_origins(mir.provenance, (mir_dir / "provenance.json").string()));
    for (const Safetensors::Entry& e : f.entries()) {
      const bool whole = e.name.starts_with(kWhole);
      if (whole || e.name.starts_with(kFirstRows)) MI_TRY_VOID(judge_tensor(mir, origins, f, e, whole, &judge));
    }
  }
  VerifyReport r = judge.report;
  if (!f.find("input_ids.0") && !f.find("seq0.input_ids")) {
    if (r.rows.empty())
      return bad_input("{}: holds neither weights (dequant.NAME) nor inputs (input_ids.0, seq0.input_ids)",
                       reference.string());
    return r;
  }
  MI_TRY(const quant::TemporaryEngine files, quant::build_temporary_engine(mir_dir, temporary_place(), 0, "fp32"));
  so.engine = files.path();
  MI_TRY(const Session s, open_session(so));
  MI_TRY(VerifyReport outputs, verify_reference(s, reference, limits));
  outputs.rows.insert(outputs.rows.begin(), r.rows.begin(), r.rows.end());
  if (!r.first_bad.empty()) outputs.first_bad = r.first_bad;
  return outputs;
}

}  // namespace mi::tools
