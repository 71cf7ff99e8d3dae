#include "tools/verify.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/util.h"
#include "compiler/build.h"
#include "quant/calibration_data.h"
#include "quant/compare.h"
#include "runtime/generate.h"
#include "tensor/safetensors.h"
#include "tools/trace.h"

namespace mi::tools {
namespace {

double max_abs_difference(std::span<const float> a, std::span<const float> b) {
  double m = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double d = std::fabs(double(a[i]) - b[i]);
    if (!(d <= m)) m = std::isnan(d) ? INFINITY : d;      // a NaN is the worst difference
  }
  return m;
}

double relative_rms(std::span<const float> found, std::span<const float> reference) {
  double e = 0, r = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    const double d = double(found[i]) - reference[i];
    e += d * d;
    r += double(reference[i]) * reference[i];
  }
  return r > 0 ? std::sqrt(e / r) : std::sqrt(e);
}

class Judge {
 public:
  Judge(bool int8, VerifyLimits limits) : int8_(int8), limits_(limits) {}
  VerifyReport report;

  void row(std::string what, double found, double limit, std::string unit, bool judged = true) {
    const bool ok = found <= limit;
    if (judged && !ok && report.first_bad.empty()) report.first_bad = what;
    report.rows.push_back({std::move(what), found, limit, ok, judged, std::move(unit)});
  }
  void hidden(const std::string& what, std::span<const float> found, std::span<const float> reference) {
    if (int8_) row(what, relative_rms(found, reference), limits_.max_layer_deviation, "relative");
    else row(what, max_abs_difference(found, reference), limits_.hidden_max_abs, "max abs");
  }
  void routing(const std::string& what, const Trace::Routing& found, std::span<const int32_t> ids, std::span<const float> weights) {
    int64_t differ = 0;
    for (size_t i = 0; i < ids.size(); ++i) differ += found.ids[i] != ids[i];
    row(what + " experts", double(differ), 0, "differ", !int8_);
    if (differ == 0 && !weights.empty()) row(what + " weights", max_abs_difference(found.weights, weights), limits_.weights_max_abs, "max abs", !int8_);
  }
  // judged false: the divergence is only added to the mean, which kl_over_all() judges.
  void logits(const std::string& what, std::span<const float> found, std::span<const float> reference, int64_t vocab, bool judged = true) {
    const int64_t tokens = int64_t(found.size()) / vocab;
    double kl = 0;
    for (int64_t t = 0; t < tokens; ++t) kl += quant::kl_divergence(reference.data() + t * vocab, found.data() + t * vocab, vocab);
    report.mean_kl = (report.mean_kl * double(report.tokens) + kl) / double(report.tokens + tokens);
    report.tokens += tokens;
    if (int8_) row(what + " logits", kl / double(tokens), limits_.max_kl, "mean KL", judged);
    else row(what + " logits", max_abs_difference(found, reference), limits_.logits_max_abs, "max abs");
  }
  void kl_over_all() {
    if (int8_) row("logits over all texts", report.mean_kl, limits_.max_kl, "mean KL");
  }
  bool int8() const { return int8_; }

 private:
  bool int8_;
  VerifyLimits limits_;
};

// Python writes Infinity and NaN, which are not JSON, where a margin has no bound; such values are no limits: null.
std::string without_infinities(const std::string& text) {
  std::string out;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '"' && (i == 0 || text[i - 1] != '\\')) in_string = !in_string;
    size_t word = 0;
    if (!in_string)
      for (const char* w : {"-Infinity", "Infinity", "NaN"})
        if (word == 0 && text.compare(i, std::strlen(w), w) == 0) word = std::strlen(w);
    if (word > 0) {
      out += "null";
      i += word - 1;
    } else {
      out += text[i];
    }
  }
  return out;
}

// The limits recorded beside the reference.
Status read_tolerance(const Path& reference, VerifyLimits* limits) {
  const Path file = Path(reference).replace_extension(".json");
  if (!std::filesystem::exists(file)) return {};
  MI_TRY(const std::string text, read_file(file));
  MI_TRY(const Json j, parse_json(without_infinities(text), file.string()));
  if (!j.is_object() || !j.contains("tolerance") || !j["tolerance"].contains("float32")) return {};
  const Json& t = j["tolerance"]["float32"];
  const std::string what = file.string() + ": tolerance.float32";
  if (!limits->given_logits) { MI_TRY(limits->logits_max_abs, json_get_or<double>(t, "logits_max_abs", limits->logits_max_abs, what)); }
  if (!limits->given_hidden) { MI_TRY(limits->hidden_max_abs, json_get_or<double>(t, "hidden_max_abs", limits->hidden_max_abs, what)); }
  MI_TRY(limits->weights_max_abs, json_get_or<double>(t, "weights_max_abs", limits->weights_max_abs, what));
  return {};
}

Result<std::vector<int32_t>> ids_of(const Safetensors& f, const std::string& name) {
  MI_TRY(const TensorView v, f.tensor(name));
  std::vector<int32_t> ids(static_cast<size_t>(v.count()));
  for (size_t i = 0; i < ids.size(); ++i) {
    if (v.dtype == DType::kI32) std::memcpy(&ids[i], v.data + i * 4, 4);
    else if (v.dtype == DType::kI64) { int64_t x; std::memcpy(&x, v.data + i * 8, 8); ids[i] = int32_t(x); }
    else return bad_input("{}: {} must hold integers", f.file().path().string(), name);
  }
  return ids;
}

struct Sequence {
  std::string name;            // "seq0"
  std::string ids, logits;     // tensor names
};

std::vector<Sequence> sequences_of(const Safetensors& f) {
  std::vector<Sequence> out;
  for (int i = 0;; ++i) {
    const std::string a = fmt::format("seq{}", i), n = std::to_string(i);
    if (f.find(a + ".input_ids")) out.push_back({a, a + ".input_ids", a + ".logits"});
    else if (f.find("input_ids." + n)) out.push_back({a, "input_ids." + n, "logits." + n});
    else return out;
  }
}

Error wrong_size(const Safetensors& f, const std::string& name, int64_t expected, int64_t found) {
  return bad_input("{}: {} has {} values, this engine gives {}: it belongs to another model", f.file().path().string(), name, found, expected);
}

// The recorded expert choices of a layer, where there are any.
Status judge_routing(const Safetensors& f, const Sequence& seq, int32_t layer, const Trace& t, Judge* judge) {
  const std::string prefix = fmt::format("{}.layer{}", seq.name, layer);
  if (!f.find(prefix + ".experts") || !t.routing.count(layer)) return {};
  MI_TRY(const std::vector<int32_t> experts, ids_of(f, prefix + ".experts"));
  std::vector<float> weights;
  if (f.find(prefix + ".weights")) {
    MI_TRY(const TensorView w, f.tensor(prefix + ".weights"));
    weights = to_f32_vector(w);
  }
  const Trace::Routing& found = t.routing.at(layer);
  if (found.ids.size() != experts.size()) return wrong_size(f, prefix + ".experts", int64_t(found.ids.size()), int64_t(experts.size()));
  judge->routing(fmt::format("{} layer {}", seq.name, layer), found, experts, weights);
  return {};
}

Status judge_sequence(const Session& s, const Safetensors& f, const Sequence& seq, const std::vector<int32_t>& ids, Judge* judge) {
  const artifact::ModelFacts& m = s.engine->manifest().model;
  const Trace t = trace(*s.engine, ids);
  const int64_t tokens = int64_t(ids.size()), row = tokens * m.hidden;
  std::vector<float> hidden;                 // empty: not recorded
  if (f.find(seq.name + ".hidden")) {
    MI_TRY(const TensorView v, f.tensor(seq.name + ".hidden"));
    hidden = to_f32_vector(v);
    if (int64_t(hidden.size()) != (m.layers + 1) * row) return wrong_size(f, seq.name + ".hidden", (m.layers + 1) * row, int64_t(hidden.size()));
  }
  for (int32_t layer = -1; layer < m.layers; ++layer) {
    // Routing first: a wrong choice explains a wrong output of the same layer.
    MI_TRY_VOID(judge_routing(f, seq, layer, t, judge));
    if (hidden.empty()) continue;
    judge->hidden(layer < 0 ? seq.name + " embedding" : fmt::format("{} layer {} output", seq.name, layer), t.residual.at(layer),
                  std::span(hidden).subspan(size_t((layer + 1) * row), size_t(row)));
  }
  if (f.find(seq.logits)) {
    MI_TRY(const TensorView v, f.tensor(seq.logits));
    const std::vector<float> logits = to_f32_vector(v);
    if (logits.size() != t.logits.size()) return wrong_size(f, seq.logits, int64_t(t.logits.size()), int64_t(logits.size()));
    judge->logits(seq.name, t.logits, logits, m.vocab);
  }
  return {};
}

Status judge_greedy(const Session& s, const Safetensors& f, const Sequence& seq, const std::vector<int32_t>& ids, Judge* judge) {
  const std::string name = seq.name + ".greedy_tokens";
  if (!f.find(name)) return {};
  MI_TRY(const std::vector<int32_t> expected, ids_of(f, name));
  runtime::Request r;
  r.prompt = ids;
  r.sampling.temperature = 0;
  r.sampling.ignore_eos = true;
  r.max_tokens = int64_t(expected.size());
  std::vector<runtime::Request> one;
  one.push_back(std::move(r));
  const auto loop = s.make_loop();
  MI_TRY(const std::vector<runtime::Completion> done, runtime::generate(*loop, std::move(one)));
  int64_t differ = 0;
  for (size_t i = 0; i < expected.size(); ++i) differ += i >= done[0].tokens.size() || done[0].tokens[i] != expected[i];
  judge->row(seq.name + " greedy tokens", double(differ), 0, "differ", !judge->int8());
  return {};
}

}  // namespace

Result<VerifyReport> verify_reference(const Session& s, const Path& reference, VerifyLimits limits) {
  MI_TRY(const Safetensors f, Safetensors::open(reference));
  MI_TRY_VOID(read_tolerance(reference, &limits));
  const std::vector<Sequence> sequences = sequences_of(f);
  if (sequences.empty()) return bad_input("{}: holds neither seq0.input_ids nor input_ids.0, so there is nothing to run", reference.string());
  const artifact::ModelFacts& m = s.engine->manifest().model;
  Judge judge(m.precision == "w8a8", limits);
  for (const Sequence& seq : sequences) {
    MI_TRY(const std::vector<int32_t> ids, ids_of(f, seq.ids));
    if (ids.empty() || int64_t(ids.size()) > s.max_seq_len) return bad_input("{}: {} has {} tokens; this session holds 1 to {}", reference.string(), seq.ids, ids.size(), s.max_seq_len);
    for (int32_t id : ids)
      if (id < 0 || id >= m.vocab) return bad_input("{}: {} holds the id {}, the model's vocabulary has {}", reference.string(), seq.ids, id, m.vocab);
    MI_TRY_VOID(judge_sequence(s, f, seq, ids, &judge));
    MI_TRY_VOID(judge_greedy(s, f, seq, ids, &judge));
  }
  return judge.report;
}

Result<VerifyReport> verify_mir(const Session& s, const Path& mir, VerifyLimits limits) {
  MI_TRY(OutputDir dir, OutputDir::create(std::filesystem::temp_directory_path() / "metainfer-verify", true));
  compiler::BuildOptions b;
  b.model = mir;
  b.output = dir.path() / "engine";
  b.opt_level = 0;
  b.precision = "fp32";
  MI_TRY(auto built, compiler::build_engine(b));
  exec::LoadOptions l = s.engine->options();
  l.kv_type = "f32";
  l.progress = {};
  MI_TRY(const auto plain, exec::Engine::load(b.output, l, *s.pool));
  const artifact::ModelFacts& m = s.engine->manifest().model;
  const artifact::ModelFacts& p = plain->manifest().model;
  if (p.vocab != m.vocab || p.hidden != m.hidden || p.layers != m.layers)
    return bad_input("{}: is not the model of this engine ({} layers of {} there, {} of {} here)", mir.string(), p.layers, p.hidden, m.layers, m.hidden);

  quant::CalibrationRequest request;
  request.samples = 4;
  request.length = std::min<int64_t>({256, s.max_seq_len, s.engine->options().max_tokens_per_step});
  request.vocab = m.vocab;
  MI_TRY(const quant::CalibrationSet set, quant::load_calibration(request, s.text.tokenizer.get(), nullptr));
  Judge judge(m.precision == "w8a8", limits);
  for (size_t i = 0; i < std::min<size_t>(set.sequences.size(), 4); ++i) {
    const Trace want = trace(*plain, set.sequences[i]), found = trace(*s.engine, set.sequences[i]);
    const std::string name = fmt::format("text {}", i);
    for (const auto& [layer, x] : want.residual) {
      if (layer >= 0 && want.routing.count(layer)) judge.routing(fmt::format("{} layer {}", name, layer), found.routing.at(layer), want.routing.at(layer).ids, {});
      judge.hidden(layer < 0 ? name + " embedding" : fmt::format("{} layer {} output", name, layer), found.residual.at(layer), x);
    }
    judge.logits(name, found.logits, want.logits, m.vocab, false);
  }
  judge.kl_over_all();
  return judge.report;
}

std::string verify_text(const VerifyReport& r) {
  std::string s = fmt::format("{:<28} {:>12} {:>12}  {}\n", "what", "found", "limit", "unit");
  for (const VerifyRow& row : r.rows)
    s += fmt::format("{:<28} {:>12.4g} {:>12.4g}  {}{}\n", row.what, row.found, row.limit, row.unit, row.ok ? "" : row.judged ? "   <-- out of limits" : "   (not judged)");
  if (r.tokens > 0) s += fmt::format("mean KL over {} tokens: {:.6f}\n", r.tokens, r.mean_kl);
  s += r.ok() ? "verified: everything within limits\n" : fmt::format("NOT verified: the first difference is {}\n", r.first_bad);
  return s;
}

Json verify_json(const VerifyReport& r) {
  Json j{{"ok", r.ok()}, {"first_difference", r.first_bad}, {"mean_kl", r.mean_kl}, {"tokens", r.tokens}, {"rows", Json::array()}};
  for (const VerifyRow& row : r.rows)
    j["rows"].push_back({{"what", row.what}, {"found", row.found}, {"limit", row.limit}, {"unit", row.unit}, {"ok", row.ok}, {"judged", row.judged}});
  return j;
}

}  // namespace mi::tools
