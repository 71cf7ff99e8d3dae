#include <fmt/format.h>

#include "base/json.h"
#include "cli/command.h"
#include "hw/thread_pool.h"
#include "tools/convert.h"
#include "tools/gguf/arch.h"

namespace mi::cli {
namespace {

struct Flags {
  std::string to = "gguf", model, output, type = "q8_0", pre_tokenizer;
  bool force = false, no_tokenizer = false, json = false;
  int threads = 0;
};

Result<int> run(const Flags& f) {
  tools::ConvertOptions o;
  o.model = f.model;
  o.output = f.output;
  o.type = f.type == "q8_0"   ? model::GgufType::kQ8_0
           : f.type == "bf16" ? model::GgufType::kBF16
           : f.type == "f16"  ? model::GgufType::kF16
                              : model::GgufType::kF32;
  o.force = f.force;
  o.vocab.leave_out = f.no_tokenizer;
  o.vocab.pre_tokenizer = f.pre_tokenizer;
  hw::ThreadPool pool(f.threads > 0 ? f.threads : hw::advise_threads().threads);
  MI_TRY(const tools::ConvertReport r, tools::convert_to_gguf(o, pool));
  if (f.json)
    fmt::print("{}\n", dump_json(tools::report_json(r), 1));
  else
    fmt::print("{}written       {}\n", tools::report_text(r), f.output);
  return 0;
}

}  // namespace

Command add_convert(CLI::App& parent) {
  auto f = std::make_shared<Flags>();
  CLI::App* app =
      parent.add_subcommand("convert", "write a MIR in another program's format (GGUF), with the same weights");
  app->add_option("--to", f->to, "the format: gguf (llama.cpp, ik_llama.cpp)")
      ->check(CLI::IsMember({"gguf"}))
      ->capture_default_str();
  app->add_option("--model", f->model, "MIR directory, from metainfer export or quantize")->required();
  app->add_option("--output", f->output, "new file")->required();
  app->add_option("--type", f->type, "of the matrices; norms, routers and biases are f32")
      ->check(CLI::IsMember({"q8_0", "bf16", "f16", "f32"}))
      ->capture_default_str();
  app->add_flag("--no-tokenizer", f->no_tokenizer, "a file that takes token ids only");
  app->add_option("--pre-tokenizer", f->pre_tokenizer,
                  "llama.cpp's name of the splitting rule (default: recognised from tokenizer.json)");
  app->add_option("--threads", f->threads, "worker threads (default: what the CPU mask and quota allow)")
      ->check(CLI::Range(1, 1024));
  app->add_flag("--force", f->force, "replace an existing file");
  app->add_flag("--json", f->json, "print the report as JSON");
  app->footer(
      fmt::format("Families: {}\n\nExample:\n"
                  "  metainfer convert --to gguf --model mini-m3-mir --output mini-m3.gguf --type q8_0",
                  fmt::join(tools::gguf::known_families(), ", ")));
  return {app, [f]() { return run(*f); }};
}

}  // namespace mi::cli
