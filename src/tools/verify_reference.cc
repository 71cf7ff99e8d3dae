#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>

#include "base/util.h"
#include "runtime/generate.h"
#include "tensor/safetensors.h"
#include "tools/trace.h"
#include "tools/verify.h"
#include "tools/verify_judge.h"

namespace mi::tools {
namespace {

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

// The limits recorded beside the reference; without any a float engine's logits are judged by their size.
Status read_tolerance(const Path& reference, VerifyLimits* limits) {
  const Path file = Path(reference).replace_extension(".json");
  if (!std::filesystem::exists(file)) {
    if (limits->given_logits) return {};
    limits->logits_relative = true;
    limits->logits_max_abs = 1e-4;
    return {};
  }
  MI_TRY(const std::string text, read_file(file));
  MI_TRY(const Json j, parse_json(without_infinities(text), file.string()));
  if (!j.is_object() || !j.contains("tolerance") || !j["tolerance"].contains("float32")) return {};
  const Json& t = j["tolerance"]["float32"];
  const std::string what = file.string() + ": tolerance.float32";
  if (!limits->given_logits) {
    MI_TRY(limits->logits_max_abs, json_get_or<double>(t, "logits_max_abs", limits->logits_max_abs, what));
  }
  if (!limits->given_hidden) {
    MI_TRY(limits->hidden_max_abs, json_get_or<double>(t, "hidden_max_abs", limits->hidden_max_abs, what));
  }
  MI_TRY(limits->weights_max_abs, json_get_or<double>(t, "weights_max_abs", limits->weights_max_abs, what));
  return {};
}

Result<std::vector<int32_t>> ids_of(const Safetensors& f, const std::string& name) {
  MI_TRY(const TensorView v, f.tensor(name));
  std::vector<int32_t> ids(static_cast<size_t>(v.count()));
  for (size_t i = 0; i < ids.size(); ++i) {
    if (v.dtype == DType::kI32)
      std::memcpy(&ids[i], v.data + i * 4, 4);
    else if (v.dtype == DType::kI64) {
      int64_t x;
      std::memcpy(&x, v.data + i * 8, 8);
      ids[i] = int32_t(x);
    } else
      return bad_input("{}: {} must hold integers", f.file().path().string(), name);
  }
  return ids;
}

struct Sequence {
  std::string name;         // "seq0"
  std::string ids, logits;  // tensor names
};

std::vector<Sequence> sequences_of(const Safetensors& f) {
  std::vector<Sequence> out;
  for (int i = 0;; ++i) {
    const std::string a = fmt::format("seq{}", i), n = std::to_string(i);
    if (f.find(a + ".input_ids"))
      out.push_back({a, a + ".input_ids", a + ".logits"});
    else if (f.find("input_ids." + n))
      out.push_back({a, "input_ids." + n, "logits." + n});
    else
      return out;
  }
}

Error wrong_size(const Safetensors& f, const std::string& name, int64_t expected, int64_t found) {
  return bad_input("{}: {} has {} values, this engine gives {}: it belongs to another model", f.file().path().string(),
                   name, found, expected);
}

// The recorded expert choices of a layer, where there are any.
Status judge_routing(const Safetensors& f, const Sequence& seq, int32_t layer, const Trace& t, Judge* judge) {
  const std::string prefix = fmt::format("{}.layer{}", seq.name, layer);
  if (!f.find(prefix + ".experts")) return {};
  if (!t.routing.count(layer))
    return bad_input("{}: {}.experts: this engine routes nothing in that layer: it belongs to another model",
                     f.file().path().string(), prefix);
  MI_TRY(const std::vector<int32_t> experts, ids_of(f, prefix + ".experts"));
  std::vector<float> weights;
  if (f.find(prefix + ".weights")) {
    MI_TRY(const TensorView w, f.tensor(prefix + ".weights"));
    weights = to_f32_vector(w);
  }
  const Trace::Routing& found = t.routing.at(layer);
  if (found.ids.size() != experts.size())
    return wrong_size(f, prefix + ".experts", int64_t(found.ids.size()), int64_t(experts.size()));
  if (!weights.empty() && found.weights.size() != weights.size())
    return wrong_size(f, prefix + ".weights", int64_t(found.weights.size()), int64_t(weights.size()));
  judge->routing(fmt::format("{} layer {}", seq.name, layer), found, experts, weights);
  return {};
}

// Records of layers that this engine does not have.
Status refuse_other_layers(const Safetensors& f, const Sequence& seq, int64_t layers) {
  const std::string prefix = seq.name + ".layer";
  for (const Safetensors::Entry& e : f.entries()) {
    if (!e.name.starts_with(prefix)) continue;
    int64_t layer = -1;
    const char* const end = e.name.data() + e.name.size();
    const auto number = std::from_chars(e.name.data() + prefix.size(), end, layer);
    if (number.ec == std::errc() && number.ptr < end && *number.ptr == '.' && layer >= 0 && layer < layers) continue;
    return bad_input("{}: {}: this engine has the layers 0 to {}: it belongs to another model",
                     f.file().path().string(), e.name, layers - 1);
  }
  return {};
}

Status judge_sequence(const Session& s, const Safetensors& f, const Sequence& seq, const std::vector<int32_t>& ids,
                      Judge* judge) {
  const artifact::ModelFacts& m = s.engine->manifest().model;
  MI_TRY_VOID(refuse_other_layers(f, seq, m.layers));
  const Trace t = trace(*s.engine, ids);
  const int64_t tokens = int64_t(ids.size()), row = tokens * m.hidden;
  std::vector<float> hidden;  // empty: not recorded
  if (f.find(seq.name + ".hidden")) {
    MI_TRY(const TensorView v, f.tensor(seq.name + ".hidden"));
    hidden = to_f32_vector(v);
    if (int64_t(hidden.size()) != (m.layers + 1) * row)
      return wrong_size(f, seq.name + ".hidden", (m.layers + 1) * row, int64_t(hidden.size()));
  }
  Residual given;
  Trace alone;
  if (!hidden.empty() && judge->rounds()) {
    for (int32_t layer = -1; layer < m.layers; ++layer)
      given[layer].assign(hidden.begin() + (layer + 1) * row, hidden.begin() + (layer + 2) * row);
    alone = trace(*s.engine, ids, &given);
  }
  for (int32_t layer = -1; layer < m.layers; ++layer) {
    // Routing first: a wrong choice explains a wrong output of the same layer.
    MI_TRY_VOID(judge_routing(f, seq, layer, t, judge));
    if (hidden.empty()) continue;
    if (layer >= 0 && judge->rounds())
      judge->alone(fmt::format("{} layer {} alone", seq.name, layer), alone.residual.at(layer), given.at(layer),
                   given.at(layer - 1));
    judge->hidden(layer < 0 ? seq.name + " embedding" : fmt::format("{} layer {} output", seq.name, layer),
                  t.residual.at(layer), std::span(hidden).subspan(size_t((layer + 1) * row), size_t(row)));
  }
  if (f.find(seq.logits)) {
    MI_TRY(const TensorView v, f.tensor(seq.logits));
    const std::vector<float> logits = to_f32_vector(v);
    if (logits.size() != t.logits.size())
      return wrong_size(f, seq.logits, int64_t(t.logits.size()), int64_t(logits.size()));
    judge->logits(seq.name, t.logits, logits, m.vocab);
  }
  return {};
}

Status judge_greedy(const Session& s, const Safetensors& f, const Sequence& seq, const std::vector<int32_t>& ids,
                    Judge* judge) {
  const std::string name = seq.name + ".greedy_tokens";
  if (!f.find(name)) return {};
  MI_TRY(const std::vector<int32_t> expected, ids_of(f, name));
  if (expected.empty()) return bad_input("{}: {} is empty", f.file().path().string(), name);
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
  judge->row(seq.name + " greedy tokens", double(differ), 0, "differ", !judge->rounds());
  return {};
}

}  // namespace

Status check_reference(const Path& reference) {
  MI_TRY(const Safetensors f, Safetensors::open(reference));
  VerifyLimits limits;
  MI_TRY_VOID(read_tolerance(reference, &limits));
  if (sequences_of(f).empty())
    return bad_input("{}: holds neither seq0.input_ids nor input_ids.0, so there is nothing to run", reference.string());
  return {};
}

Result<VerifyReport> verify_reference(const Session& s, const Path& reference, VerifyLimits limits) {
  MI_TRY_VOID(check_reference(reference));
  MI_TRY(const Safetensors f, Safetensors::open(reference));
  MI_TRY_VOID(read_tolerance(reference, &limits));
  const std::vector<Sequence> sequences = sequences_of(f);
  const artifact::ModelFacts& m = s.engine->manifest().model;
  Judge judge(judged_precision(s.engine->manifest()), s.engine->options().kv_type, limits);
  for (const Sequence& seq : sequences) {
    MI_TRY(const std::vector<int32_t> ids, ids_of(f, seq.ids));
    if (ids.empty() || int64_t(ids.size()) > s.max_seq_len)
      return bad_input("{}: {} has {} tokens; this session holds 1 to {}", reference.string(), seq.ids, ids.size(),
                       s.max_seq_len);
    for (int32_t id : ids)
      if (id < 0 || id >= m.vocab)
        return bad_input("{}: {} holds the id {}, the model's vocabulary has {}", reference.string(), seq.ids, id,
                         m.vocab);
    MI_TRY_VOID(judge_sequence(s, f, seq, ids, &judge));
    MI_TRY_VOID(judge_greedy(s, f, seq, ids, &judge));
  }
  const auto& rows = judge.report.rows;
  if (std::none_of(rows.begin(), rows.end(), [](const VerifyRow& r) { return r.judged; }))
    return bad_input(
        "{}: holds nothing that this engine is judged by; record hidden states, logits{}",
        reference.string(), judge.rounds() ? "" : ", expert choices or greedy tokens");
  return judge.report;
}

}  // namespace mi::tools
