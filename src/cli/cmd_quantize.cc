#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "base/file.h"
#include "base/json.h"
#include "base/place.h"
#include "cli/command.h"
#include "hw/thread_pool.h"
#include "quant/plan.h"
#include "text/model_text.h"
#include "tools/eval.h"
#include "tools/quality.h"
#include "tools/sensitivity_page.h"

namespace mi::cli {

namespace {

struct Flags {
  std::string model, config, output, calib, held_out, traffic, eval, save_recipe, sensitivity;
  bool force = false, json = false, no_compare = false, search = false, compare_tokens_given = false, sample_given = false;
  int threads = 0;
  int64_t compare_tokens = 2048, sample = 512;
  std::optional<double> max_kl, max_drop, memory, bits;
  tools::QualityLimits quality;
};

// A flag that would change nothing is a mistake.
Status check_unused(const Flags& f) {
  const auto refuse = [](const char* with, std::initializer_list<std::pair<bool, const char*>> flags) -> Status {
    for (const auto& [given, flag] : flags)
      if (given) return fail(ErrorCode::kUsage, "{} has no effect with {}: leave one of them out", flag, with);
    return {};
  };
  if (!f.sensitivity.empty())
    MI_TRY_VOID(refuse("--sensitivity", {{f.search, "--search"}, {f.max_kl.has_value(), "--max-kl"}, {f.max_drop.has_value(), "--max-drop"},
                                         {!f.eval.empty(), "--eval"}, {!f.traffic.empty(), "--traffic"}, {!f.held_out.empty(), "--held-out"},
                                         {f.compare_tokens_given, "--compare-tokens"}, {f.no_compare, "--no-compare"}}));
  if (f.no_compare)
    MI_TRY_VOID(refuse("--no-compare", {{!f.held_out.empty(), "--held-out"}, {f.compare_tokens_given, "--compare-tokens"}}));
  if (f.sample_given && !f.search && f.sensitivity.empty())
    return fail(ErrorCode::kUsage, "--sample-tokens goes with --search and --sensitivity");
  return {};
}

Status check(const Flags& f) {
  if ((f.max_kl || f.max_drop) && f.no_compare)
    return fail(ErrorCode::kUsage, "--max-kl and --max-drop judge the comparison that --no-compare leaves out");
  if (f.output.empty() && f.sensitivity.empty())
    return fail(ErrorCode::kUsage, "--output is missing (a report alone needs --sensitivity FILE)");
  if (!f.output.empty() && !f.sensitivity.empty())
    return fail(ErrorCode::kUsage, "--sensitivity writes a report and no model: leave out --output");
  if (f.search && !f.max_kl && !f.max_drop && !f.memory && !f.bits)
    return fail(ErrorCode::kUsage, "--search needs a limit: --max-kl, --max-drop, --memory or --max-bits");
  if (!f.search && (f.memory || f.bits || !f.save_recipe.empty()))
    return fail(ErrorCode::kUsage, "--memory, --max-bits and --save-recipe go with --search");
  if (const std::string e = lower_ending(f.sensitivity); !f.sensitivity.empty() && e != ".html" && e != ".json" && e != ".txt")
    return fail(ErrorCode::kUsage, "--sensitivity {}: writes .html, .json or .txt; give one of these endings", f.sensitivity);
  return check_unused(f);
}

Result<int> run_sensitivity(const Flags& f, quant::QuantizeOptions o, hw::ThreadPool& pool) {
  const Path file = f.sensitivity;
  MI_TRY(OutputFile out, OutputFile::create(file, f.force));
  o.output = file;
  quant::PlanOptions p;
  p.sample_tokens = f.sample;
  p.search = true;
  MI_TRY(const quant::Planned plan, quant::plan_recipe(o, p, pool));
  const std::string text = quant::sensitivity_text(plan.sensitivity) + "\nchoices of formats that no other beats\n" +
                           quant::front_text(plan.front, nullptr);
  Json j = quant::sensitivity_json(plan.sensitivity);
  j["front"] = quant::front_json(plan.front, plan.sensitivity);
  const std::string ending = lower_ending(f.sensitivity);
  MI_TRY_VOID(out.writer().write(std::string_view(ending == ".json"   ? dump_json(j, 1)
                                                  : ending == ".html" ? tools::sensitivity_page(o.model.filename().string(), plan.sensitivity, plan.front)
                                                                      : text)));
  MI_TRY_VOID(out.commit());
  fmt::print("{}", f.json ? dump_json(j, 1) + "\n" : text + "written       " + f.sensitivity + "\n");
  return 0;
}

// Accuracy of groups before and after; the report's exit code.
Result<int> run_quality(const Flags& f, const quant::QuantizeOptions& o, Json* json) {
  if (f.eval.empty()) return 0;
  MI_TRY(const ir::MirDir mir, ir::MirDir::open(o.model));
  MI_TRY(const quant::CalibrationSet set, quant::calibration_of(mir, o));
  tools::QualityOptions q;
  q.source = o.model;
  q.result = o.output;
  q.eval.data = f.eval;
  q.scratch = beside(o.output, ".piece");
  q.threads = f.threads;
  q.limits = f.quality;
  q.calibration = &set.sequences;
  MI_TRY(const tools::QualityReport r, tools::measure_quality(q));
  if (json)
    (*json)["quality"] = tools::quality_json(r, f.quality);
  else
    fmt::print("\n{}", tools::quality_text(r, f.quality));
  const std::vector<std::string> exceeded = tools::quality_failures(r, f.quality);
  for (const std::string& line : exceeded) fmt::print(stderr, "{}\n", line);
  return exceeded.empty() ? 0 : 1;
}

int judge(const Flags& f, const quant::QuantizeReport& r) {
  int code = 0;
  if (f.max_kl && !(r.predictions.mean_kl <= *f.max_kl)) {
    fmt::print(stderr, "the mean KL {:.5f} is above the limit {:.5f}\n", r.predictions.mean_kl, *f.max_kl);
    code = 1;
  }
  const double drop = 100 * std::expm1(r.predictions.rounded_nll - r.predictions.nll);
  if (f.max_drop && !(drop <= *f.max_drop)) {
    fmt::print(stderr, "perplexity grows by {:.2f} %, more than {:.2f} %\n", drop, *f.max_drop);
    code = 1;
  }
  return code;
}

Result<int> run_quantize(const Flags& f) {
  MI_TRY_VOID(check(f));
  MI_TRY_VOID(check_outside(f.model, f.output));
  quant::QuantizeOptions o;
  MI_TRY(o.config, quant::load_quant_config(f.config));
  o.model = f.model;
  o.output = f.output;
  o.calibration = f.calib;
  o.held_out = f.held_out;
  o.traffic = f.traffic;
  o.compare_tokens = f.compare_tokens;
  o.force = f.force;
  o.compare = !f.no_compare;
  if (!f.eval.empty()) {
    tools::EvalOptions e;
    e.data = f.eval;
    MI_TRY(const text::ModelText text, text::load_model_text(o.model / "tokenizer"));
    MI_TRY_VOID(tools::check_eval(text, e));
  }
  std::optional<OutputFile> saved;
  if (!f.save_recipe.empty()) {
    MI_TRY(OutputFile file, OutputFile::create(f.save_recipe, f.force));
    saved.emplace(std::move(file));
  }
  hw::ThreadPool pool(f.threads > 0 ? f.threads : hw::advise_threads().threads);
  if (!f.sensitivity.empty()) return run_sensitivity(f, o, pool);
  if (!f.search) {
    MI_TRY(const quant::QuantizeReport r, quant::quantize(o, pool));
    Json j = quant::report_json(r);
    if (!f.json) fmt::print("{}written       {}\n", quant::report_text(r), f.output);
    MI_TRY(const int lost, run_quality(f, o, f.json ? &j : nullptr));
    if (f.json) fmt::print("{}\n", dump_json(j, 1));
    return std::max(judge(f, r), lost);
  }
  quant::PlanOptions p;
  p.sample_tokens = f.sample;
  if (f.max_kl) p.limits.max_kl = *f.max_kl;
  if (f.memory) p.limits.max_bytes = int64_t(*f.memory * 1e9);
  if (f.bits) p.limits.max_bits = *f.bits;
  MI_TRY(const quant::Searched s, quant::quantize_searched(o, p, f.max_drop, pool));
  if (saved) {
    MI_TRY(const std::string recipe, read_file(o.output / "recipe.yaml"));
    MI_TRY_VOID(saved->writer().write(std::string_view(recipe)));
    MI_TRY_VOID(saved->commit());
  }
  Json j = quant::report_json(s.report);
  j["sensitivity"] = quant::sensitivity_json(s.plan.sensitivity);
  j["front"] = quant::front_json(s.plan.front, s.plan.sensitivity);
  j["picked"] = quant::front_json({*s.plan.picked}, s.plan.sensitivity)[0];
  j["tries"] = s.tries;
  if (!f.json) {
    fmt::print("choices of formats that no other beats\n{}\n", quant::front_text(s.plan.front, &*s.plan.picked));
    for (const std::string& line : s.plan.reasons) fmt::print("{}\n", line);
    fmt::print("\n{}tries         {}\nwritten       {}\n", quant::report_text(s.report), s.tries, f.output);
  }
  MI_TRY(const int lost, run_quality(f, o, f.json ? &j : nullptr));
  if (f.json) fmt::print("{}\n", dump_json(j, 1));
  return std::max(judge(f, s.report), lost);
}

}  // namespace

Command add_quantize(CLI::App& parent) {
  auto f = std::make_shared<Flags>();
  CLI::App* app =
      parent.add_subcommand("quantize", "calibrate a float model and round its matrices to int8 (W8A8) or int4 (W4A8)");
  app->add_option("--model", f->model, "MIR directory, from metainfer export")->required();
  app->add_option("--config", f->config, "recipe (YAML); see the example below")->required();
  app->add_option("--output", f->output, "new MIR directory (not needed with --sensitivity)");
  app->add_option("--calib", f->calib, "calibration text or .jsonl (default: the recipe's, else a built-in text)");
  app->add_option("--traffic", f->traffic, "text or .jsonl of real prompts: warns where the calibration set differs from it");
  app->add_option("--held-out", f->held_out, "text or .jsonl for the comparison (default: up to 2048 tokens that are held out of the calibration text)");
  CLI::Option* compared = app->add_option("--compare-tokens", f->compare_tokens, "most tokens of the comparison, 0: all of the text")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app->add_flag("--search", f->search, "choose a format for each part of each layer: the fastest on this machine within the limits");
  app->add_option("--max-kl", f->max_kl, "exit with 1 when the mean KL divergence against the float model is larger; a search stays below it")
      ->check(at_least_zero());
  app->add_option("--max-drop", f->max_drop, "exit with 1 when perplexity grows by more percent; a search tries again with less")
      ->check(at_least_zero());
  app->add_option("--memory", f->memory, "of a search: most GB that the rounded parts' weights may take")->check(above_zero(1e9));
  app->add_option("--max-bits", f->bits, "of a search: most bits per weight of the experts (scales counted)")->check(above_zero(1e3));
  CLI::Option* sample = app->add_option("--sample-tokens", f->sample, "tokens on which a search and --sensitivity measure")->check(CLI::Range(16, 1 << 20))->capture_default_str();
  app->add_option("--save-recipe", f->save_recipe, "write the recipe that a search found (it is recipe.yaml in the output too)");
  app->add_option("--sensitivity", f->sensitivity, "write a report of what rounding each part costs (.html, .json or .txt) and stop");
  CLI::Option* eval = app->add_option("--eval", f->eval, "eval.jsonl (see metainfer eval): accuracy per group and greedy answers before and after");
  app->add_option("--max-points", f->quality.max_points, "with --eval: exit with 1 when a group loses more points; which layers did it is looked into")
      ->check(at_least_zero())
      ->needs(eval)
      ->capture_default_str();
  app->add_option("--min-exact", f->quality.min_exact, "with --eval: exit with 1 when fewer percent of the greedy answers are the same, token by token")
      ->check(CLI::Range(0.0, 100.0))
      ->needs(eval)
      ->capture_default_str();
  add_threads(*app, &f->threads);
  app->add_flag("--force", f->force, "replace an existing output");
  app->add_flag("--no-compare", f->no_compare, "skip the comparison with the float model");
  app->add_flag("--json", f->json, "print the report as JSON");
  app->footer(
      "Examples:\n"
      "  metainfer quantize --model mini-m3-mir --config scripts/quant_w8a8.yaml --output mini-m3-w8a8\n"
      "  metainfer quantize --model M --config w4.yaml --search --max-bits 6 --max-drop 5 --output M5\n"
      "  metainfer quantize --model M --config w8.yaml --sensitivity report.html\n"
      "  metainfer quantize --model M --config w8.yaml --output M8 --eval models/mini-m3-eval/eval.jsonl --max-points 1 --min-exact 97\n"
      "\nA recipe:\n"
      "  quant:\n"
      "    weight_bits: 8                      # or 4\n"
      "    activation_bits: 8\n"
      "    weight_scheme: per_channel          # or per_tensor; with weight_bits 4: per_group\n"
      "    # group_size: 128                   # with weight_bits 4: 32, 64 or 128 inputs share a scale\n"
      "    # rounding: auto                    # nearest, gptq (from calibration), none (smooth only); auto: gptq for int4\n"
      "    activation_scheme: per_token        # or per_tensor (one scale from calibration), or auto (within bound)\n"
      "    # activations: {\"re:.*down\": per_token}   # the same for inputs of single matrices\n"
      "    # saturation: {percentile: 99.9, layers: [\"re:.*down\"]}   # scales per token that end there; layers: auto\n"
      "    # observer: minmax                  # of per_tensor scales: minmax, percentile (percentile: 99.9), mse\n"
      "    calibration_samples: 512\n"
      "    calibration_length: 256\n"
      "    # coverage: {min_tokens: 8, force: false}   # experts that calibration hardly reaches\n"
      "    smooth_quant: {enable: true, alpha: 0.6}    # alpha: search; layers: {3: 0.7}; down: true\n"
      "    sensitive_layers: []                # kept in float: \"layers.3.moe.experts.down\" or \"re:.*\\\\.down\"; or auto\n"
      "    # bound: 0.01                       # of the autos: the KL that they may add\n"
      "    # layers: {lm_head: int8}           # float, int8, int4 (int4_g32 ...) by name or pattern: the last word\n"
      "    # calibration_data: calib.jsonl     # or --calib: text, or jsonl with \"text\", \"messages\" or \"ids\"\n"
      "The head, the router and a sparse-attention index stay float unless `layers` names them. The output's recipe.yaml\n"
      "gives the same bytes again. docs/quantization.md explains each key.");
  return {app, [f, compared, sample]() -> Result<int> {
            f->compare_tokens_given = compared->count() > 0;
            f->sample_given = sample->count() > 0;
            return run_quantize(*f);
          }};
}

}  // namespace mi::cli
