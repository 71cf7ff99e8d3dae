#include "tools/verify_passes.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/html.h"
#include "base/util.h"
#include "exec/engine.h"
#include "hw/thread_pool.h"
#include "quant/calibration_data.h"
#include "quant/temporary_engine.h"
#include "text/model_text.h"
#include "tools/trace.h"

namespace mi::tools {
namespace {

struct Built {
  int64_t nodes = 0, instructions = 0;
  double bound = 0;  // relative to the largest logit; 0: equal bits
  std::vector<Trace> traces;
};

class Builder {
 public:
  Builder(const PassesOptions& o, const ir::MirDir& mir, const std::vector<std::vector<int32_t>>& texts)
      : o_(o), mir_(mir), texts_(texts), pool_(o.threads > 0 ? o.threads : hw::advise_threads().threads) {}

  Result<Built> run(const std::vector<std::string>& disabled) {
    compiler::BuildOptions b;
    b.precision = o_.precision;
    b.disabled_passes = disabled;
    b.passes = o_.passes;
    b.rules = o_.rules;
    MI_TRY(const quant::TemporaryEngine files,
           quant::build_temporary_engine(mir_, std::filesystem::temp_directory_path() / "metainfer-passes", std::move(b)));
    exec::LoadOptions l;
    l.max_tokens_per_step = o_.length;
    l.kv_pages = (o_.length + artifact::kKvPageTokens - 1) / artifact::kKvPageTokens;
    l.kv_type = o_.kv_type;
    l.attention_order = o_.attention_order;
    l.verify_checksums = false;  // of what was written a moment ago
    MI_TRY(const auto engine, exec::Engine::load(files.path(), l, pool_));
    const artifact::Manifest& m = engine->manifest();
    Built r;
    r.nodes = m.passes.back().nodes_after;
    r.instructions = int64_t(m.program.size());
    if (m.model.precision == "fp32" || m.model.precision == "bf16") {
      int64_t k = 0;
      for (const artifact::WeightTensor& w : m.weights) k = std::max(k, w.k);
      r.bound = double(m.model.layers + 1) * double(k) * std::ldexp(1.0, -24);
    }
    for (const auto& ids : texts_) r.traces.push_back(trace(*engine, ids));
    return r;
  }

 private:
  const PassesOptions& o_;
  const ir::MirDir& mir_;
  const std::vector<std::vector<int32_t>>& texts_;
  hw::ThreadPool pool_;
};

// The row in which two matrices first differ, -1 if in none. NaN is equal to NaN: bits count.
int64_t first_row(std::span<const float> a, std::span<const float> b, int64_t rows) {
  const size_t cols = a.size() / size_t(rows);
  for (int64_t r = 0; r < rows; ++r)
    if (std::memcmp(a.data() + size_t(r) * cols, b.data() + size_t(r) * cols, cols * sizeof(float)) != 0) return r;
  return -1;
}

PassCheck compare(std::string what, const Built& found, const Built& before, int64_t vocab, int64_t layers,
                  double least_same) {
  PassCheck c;
  c.what = std::move(what);
  c.nodes = found.nodes;
  c.instructions = found.instructions;
  int64_t same = 0, tokens = 0;
  double largest = 0;
  for (size_t t = 0; t < found.traces.size(); ++t) {
    const Trace &a = found.traces[t], &b = before.traces[t];
    const int64_t rows = int64_t(a.logits.size()) / vocab;
    for (int64_t r = 0; r < rows; ++r) {
      const float *x = a.logits.data() + r * vocab, *y = b.logits.data() + r * vocab;
      same += std::max_element(x, x + vocab) - x == std::max_element(y, y + vocab) - y;
      for (int64_t v = 0; v < vocab; ++v) {
        largest = std::max(largest, double(std::abs(y[v])));
        const double d = std::abs(double(x[v]) - double(y[v]));
        // What is no number on one side only is as different as can be.
        if (d > c.max_logit_difference || std::isnan(x[v]) != std::isnan(y[v]))
          c.max_logit_difference = std::isnan(d) ? INFINITY : d;
      }
    }
    tokens += rows;
    if (!c.where.empty()) continue;
    for (const auto& [layer, x] : a.residual)
      if (const int64_t row = first_row(x, b.residual.at(layer), rows); row >= 0) {
        c.first_layer = layer;
        c.first_token = row;
        c.where = layer < 0 ? fmt::format("embedding, token {} of text {}", row, t)
                            : fmt::format("layer {}, token {} of text {}", layer, row, t);
        break;
      }
    if (!c.where.empty()) continue;
    if (const int64_t row = first_row(a.logits, b.logits, rows); row >= 0) {
      c.first_layer = layers;
      c.first_token = row;
      c.where = fmt::format("head, token {} of text {}", row, t);
    }
  }
  c.same_tokens = double(same) / double(std::max<int64_t>(tokens, 1));
  c.bound = found.bound * largest;
  c.ok = c.where.empty() || (c.max_logit_difference <= c.bound && c.same_tokens >= least_same);
  return c;
}

}  // namespace

Result<PassesReport> verify_passes(const PassesOptions& o) {
  MI_TRY(const ir::MirDir mir, ir::MirDir::open(o.model));
  const ir::ModelInfo& info = mir.graph.info;
  MI_TRY(const text::ModelText text, text::load_model_text(o.model / "tokenizer"));
  quant::CalibrationRequest request;
  request.file = o.data;
  request.draw = !o.data.empty();
  request.samples = o.samples;
  request.length = std::min(o.length, info.max_positions);
  request.vocab = info.vocab;
  MI_TRY(const quant::CalibrationSet set, quant::load_calibration(request, text.tokenizer.get(), text.chat.get()));

  // Which passes have something to do here: the others would only build the same engine again.
  std::vector<std::string> names, busy;
  {
    ir::Graph g = mir.graph;
    ir::PipelineOptions p;
    p.list = o.passes;
    p.rules = o.rules;
    MI_TRY(const std::vector<ir::PassRun> runs, ir::run_pipeline(g, p));
    const auto& list = o.passes ? *o.passes : ir::passes();
    for (size_t i = 0; i < runs.size(); ++i) {
      names.push_back(runs[i].name);
      if (runs[i].changed || !list[i].run) busy.push_back(runs[i].name);
    }
  }
  Builder builder(o, mir, set.sequences);
  Progress progress("verify passes", 1 + busy.size() * (busy.size() > 1 ? 2 : 1), false);
  PassesReport report;
  report.texts = set.source;
  report.tokens = set.tokens;
  const auto add = [&](PassCheck c, const std::string& pass) {
    if (!c.ok && report.culprit.empty()) report.culprit = pass;
    report.rows.push_back(std::move(c));
  };

  MI_TRY(Built before, builder.run(names));
  progress.advance(1);
  report.rows.push_back({.what = "no passes", .nodes = before.nodes, .instructions = before.instructions});
  for (size_t i = 0; i < names.size(); ++i) {
    if (std::find(busy.begin(), busy.end(), names[i]) == busy.end()) {
      report.rows.push_back(
          {.what = names[i], .idle = true, .nodes = before.nodes, .instructions = before.instructions});
      continue;
    }
    auto built = builder.run(std::vector<std::string>(names.begin() + long(i) + 1, names.end()));
    if (!built.ok()) return built.error().with_context("with the passes up to " + names[i]);
    add(compare(names[i], *built, before, info.vocab, info.layers, o.least_same), names[i]);
    before = std::move(*built);
    progress.advance(1);
  }
  // One busy pass alone: without it is "no passes", which was compared.
  if (busy.size() > 1)
    for (const std::string& name : busy) {
      auto built = builder.run({name});
      if (!built.ok()) return built.error().with_context("without the pass " + name);
      add(compare("all but " + name, *built, before, info.vocab, info.layers, o.least_same), name);
      progress.advance(1);
    }
  progress.done();
  return report;
}

std::string passes_text(const PassesReport& r) {
  size_t wide = 0;
  for (const PassCheck& c : r.rows) wide = std::max(wide, c.what.size());
  std::string s = fmt::format("{} tokens of {}; each line beside the one before it, \"all but\" beside all passes\n{:<{}} {:>8} {:>8} {:>12} {:>12} {:>8}  {}\n",
                              r.tokens, r.texts, "pass", wide, "ops", "calls", "logits differ", "bound", "tokens", "first difference");
  for (const PassCheck& c : r.rows) {
    s += fmt::format("{:<{}} {:>8} {:>8} ", c.what, wide, c.nodes, c.instructions);
    if (c.idle)
      s += fmt::format("{:>12}\n", "nothing to do");
    else if (&c == &r.rows.front())
      s += "\n";
    else
      s += fmt::format("{:>13.3g} {:>12} {:>6.1f} %  {}{}\n", c.max_logit_difference,
                       c.bound > 0 ? fmt::format("{:.3g}", c.bound) : "equal bits", 100 * c.same_tokens,
                       c.where.empty() ? "none" : c.where, c.ok ? "" : "   <-- differs");
  }
  return s + (r.ok() ? "verified: no pass changes what the model says\n"
                     : fmt::format("NOT verified: pass {} changes what the model says; --disable-pass {} goes around it\n",
                                   r.culprit, r.culprit));
}

std::string passes_html(const PassesReport& r) {
  std::vector<std::vector<std::string>> rows{{"passes", "ops", "kernel calls", "same tokens", "logits differ by", "first difference"}};
  for (const PassCheck& c : r.rows) {
    const bool compared = !c.idle && &c != &r.rows.front();
    rows.push_back({c.what, fmt::format("{}", c.nodes), fmt::format("{}", c.instructions),
                    c.idle ? "nothing to do" : compared ? fmt::format("{:.2f} %", 100 * c.same_tokens) : "",
                    compared ? fmt::format("{:.3g}", c.max_logit_difference) : "",
                    !compared ? "" : c.where.empty() ? "none" : c.where});
  }
  return fmt::format("<h2>Equivalence</h2>\n<p>{} tokens of {}; each line beside the one before it, \"all but\" beside all passes.</p>\n{}",
                     r.tokens, html::escape(r.texts), html::table(rows));
}

Json passes_json(const PassesReport& r) {
  Json j{{"ok", r.ok()}, {"culprit", r.culprit}, {"texts", r.texts}, {"tokens", r.tokens}, {"rows", Json::array()}};
  for (const PassCheck& c : r.rows) {
    Json row{{"what", c.what}, {"ops", c.nodes}, {"kernel_calls", c.instructions}, {"nothing_to_do", c.idle}};
    if (!c.idle && &c != &r.rows.front()) {
      row["max_logit_difference"] = std::isfinite(c.max_logit_difference) ? Json(c.max_logit_difference) : Json();
      row["bound"] = c.bound;
      row["same_tokens"] = c.same_tokens;
      row["first_difference"] = c.where;
      row["ok"] = c.ok;
    }
    j["rows"].push_back(std::move(row));
  }
  return j;
}

}  // namespace mi::tools
