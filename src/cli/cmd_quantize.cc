#include <fmt/format.h>

#include <optional>

#include "base/json.h"
#include "cli/command.h"
#include "hw/thread_pool.h"
#include "quant/quantize.h"

namespace mi::cli {

Command add_quantize(CLI::App& parent) {
  struct Flags {
    std::string model, config, output, calib;
    bool force = false, json = false, no_compare = false;
    int threads = 0;
    std::optional<double> max_kl;
  };
  auto f = std::make_shared<Flags>();
  CLI::App* app =
      parent.add_subcommand("quantize", "calibrate a float model and round its matrices to int8 (W8A8) or int4 (W4A8)");
  app->add_option("--model", f->model, "MIR directory, from metainfer export")->required();
  app->add_option("--config", f->config, "recipe (YAML); see the example below")->required();
  app->add_option("--output", f->output, "new MIR directory")->required();
  app->add_option("--calib", f->calib, "calibration text or .jsonl (default: the recipe's, else a built-in text)");
  app->add_option("--max-kl", f->max_kl, "exit with 1 when the mean KL divergence against the float model is larger")
      ->check(CLI::NonNegativeNumber);
  app->add_option("--threads", f->threads, "worker threads (default: what the CPU mask and quota allow)")
      ->check(CLI::Range(1, 1024));
  app->add_flag("--force", f->force, "replace an existing output");
  app->add_flag("--no-compare", f->no_compare, "skip the comparison with the float model");
  app->add_flag("--json", f->json, "print the report as JSON");
  app->footer(
      "Example:\n"
      "  metainfer quantize --model mini-m3-mir --config scripts/quant_w8a8.yaml --output mini-m3-w8a8\n"
      "\nA recipe:\n"
      "  quant:\n"
      "    weight_bits: 8                      # or 4\n"
      "    activation_bits: 8\n"
      "    weight_scheme: per_channel          # or per_tensor; with weight_bits 4: per_group\n"
      "    # group_size: 128                   # with weight_bits 4: 32, 64 or 128 inputs share a scale\n"
      "    activation_scheme: per_token        # or per_tensor (one scale from calibration)\n"
      "    calibration_samples: 512\n"
      "    calibration_length: 256\n"
      "    smooth_quant: {enable: true, alpha: 0.6}\n"
      "    sensitive_layers: []                # kept in float: \"layers.3.moe.experts.down\" or \"re:.*\\\\.down\"\n"
      "    # layers: {lm_head: int8}           # float, int8 or int4 by name or pattern: the last word\n"
      "    # calibration_data: calib.jsonl     # or --calib: text, or jsonl with \"text\", \"messages\" or \"ids\"\n"
      "The head, the router and a sparse-attention index stay float unless `layers` names them.");
  return {app, [f]() -> Result<int> {
            if (f->max_kl && f->no_compare)
              return fail(ErrorCode::kUsage, "--max-kl judges the comparison that --no-compare leaves out");
            quant::QuantizeOptions o;
            MI_TRY(o.config, quant::load_quant_config(f->config));
            o.model = f->model;
            o.output = f->output;
            o.calibration = f->calib;
            o.force = f->force;
            o.compare = !f->no_compare;
            hw::ThreadPool pool(f->threads > 0 ? f->threads : hw::advise_threads().threads);
            MI_TRY(const quant::QuantizeReport r, quant::quantize(o, pool));
            if (f->json)
              fmt::print("{}\n", dump_json(quant::report_json(r), 1));
            else
              fmt::print("{}written       {}\n", quant::report_text(r), f->output);
            if (f->max_kl && !(r.predictions.mean_kl <= *f->max_kl)) {
              fmt::print(stderr, "the mean KL {:.5f} is above the limit {:.5f}\n", r.predictions.mean_kl, *f->max_kl);
              return 1;
            }
            return 0;
          }};
}

}  // namespace mi::cli
