#include <fmt/format.h>

#include <cmath>

#include "base/json.h"
#include "cli/command.h"
#include "hw/thread_pool.h"
#include "tools/convert.h"
#include "tools/convert_checkpoint.h"
#include "tools/gguf/arch.h"

namespace mi::cli {
namespace {

struct Flags {
  std::string to = "gguf", model, output, type, pre_tokenizer;
  double shard_gb = 0;
  bool force = false, no_tokenizer = false, json = false;
  int threads = 0;
};

constexpr const char* kGgufTypes = "q8_0, q4_0, bf16, f16, f32";
constexpr const char* kFloatTypes = "bf16, f16, f32, keep";

Result<model::GgufType> gguf_type(const std::string& s) {
  using model::GgufType;
  if (s.empty() || s == "q8_0") return GgufType::kQ8_0;
  if (s == "q4_0") return GgufType::kQ4_0;
  if (s == "bf16") return GgufType::kBF16;
  if (s == "f16") return GgufType::kF16;
  if (s == "f32") return GgufType::kF32;
  return fail(ErrorCode::kUsage, "--type {} is not for --to gguf, which takes {}", s, kGgufTypes);
}

Result<std::optional<DType>> float_type(const Flags& f) {
  const std::string s = !f.type.empty() ? f.type : f.to == "hf" ? "bf16" : "keep";
  if (s == "keep") return std::optional<DType>();
  if (s == "bf16") return std::optional(DType::kBF16);
  if (s == "f16") return std::optional(DType::kF16);
  if (s == "f32") return std::optional(DType::kF32);
  return fail(ErrorCode::kUsage, "--type {} is not for --to {}, which takes {} (of what is in float)", s, f.to,
              kFloatTypes);
}

Result<tools::ConvertReport> to_gguf(const Flags& f) {
  if (f.shard_gb != 0) return fail(ErrorCode::kUsage, "--shard-gb is not for --to gguf, which writes one file");
  tools::ConvertOptions o;
  o.model = f.model;
  o.output = f.output;
  MI_TRY(o.type, gguf_type(f.type));
  o.force = f.force;
  o.vocab.leave_out = f.no_tokenizer;
  o.vocab.pre_tokenizer = f.pre_tokenizer;
  hw::ThreadPool pool(f.threads > 0 ? f.threads : hw::advise_threads().threads);
  return tools::convert_to_gguf(o, pool);
}

Result<tools::ConvertReport> to_checkpoint(const Flags& f) {
  if (f.no_tokenizer || !f.pre_tokenizer.empty() || f.threads > 0)
    return fail(ErrorCode::kUsage, "{} is for --to gguf only",
                f.no_tokenizer  ? "--no-tokenizer"
                : f.threads > 0 ? "--threads"
                                : "--pre-tokenizer");
  tools::CheckpointOptions o;
  o.model = f.model;
  o.output = f.output;
  o.form = f.to == "hf" ? tools::hf::Form::kPlain : tools::hf::Form::kCompressedTensors;
  MI_TRY(o.dtype, float_type(f));
  if (f.shard_gb != 0) o.shard_bytes = uint64_t(std::ceil(f.shard_gb * 1e9));
  o.force = f.force;
  return tools::convert_to_checkpoint(o);
}

Result<int> run(const Flags& f) {
  MI_TRY(const tools::ConvertReport r, f.to == "gguf" ? to_gguf(f) : to_checkpoint(f));
  if (f.json)
    fmt::print("{}\n", dump_json(tools::report_json(r), 1));
  else
    fmt::print("{}written       {}\n", tools::report_text(r), f.output);
  return 0;
}

}  // namespace

Command add_convert(CLI::App& parent) {
  auto f = std::make_shared<Flags>();
  CLI::App* app = parent.add_subcommand(
      "convert",
      "write a MIR in another program's format (GGUF, Hugging Face, compressed-tensors), with the same weights");
  app->add_option("--to", f->to,
                  "the format: gguf (llama.cpp, ik_llama.cpp: one file), hf (transformers and others: a folder in "
                  "float), compressed-tensors (vLLM, transformers: a folder, int8 and int4 weights as they are)")
      ->check(CLI::IsMember({"gguf", "hf", "compressed-tensors"}))
      ->capture_default_str();
  app->add_option("--model", f->model, "MIR directory, from metainfer export or quantize")->required();
  app->add_option("--output", f->output, "new file (gguf) or folder")->required();
  app->add_option("--type", f->type,
                  fmt::format("gguf: of the matrices, {} (default q8_0; norms, routers and biases are f32); hf and "
                              "compressed-tensors: of what is in float, {} (default bf16 for hf, keep for "
                              "compressed-tensors)",
                              kGgufTypes, kFloatTypes))
      ->check(CLI::IsMember({"q8_0", "q4_0", "bf16", "f16", "f32", "keep"}));
  app->add_option("--shard-gb", f->shard_gb, "hf, compressed-tensors: bytes of a file, in billions (default 4.3)")
      ->check(CLI::Range(1e-6, 1e6));
  app->add_flag("--no-tokenizer", f->no_tokenizer, "gguf: a file that takes token ids only");
  app->add_option("--pre-tokenizer", f->pre_tokenizer,
                  "gguf: llama.cpp's name of the splitting rule (default: recognised from tokenizer.json)");
  add_threads(*app, &f->threads, "gguf: ");
  app->add_flag("--force", f->force, "replace an existing output");
  app->add_flag("--json", f->json, "print the report as JSON");
  app->footer(
      fmt::format("Families of gguf: {}\nhf and compressed-tensors: every family that export reads\n\nExamples:\n"
                  "  metainfer convert --to gguf --model mini-m3-mir --output mini-m3.gguf --type q8_0\n"
                  "  metainfer convert --to gguf --model mini-m3-w4a8 --output mini-m3-q4_0.gguf --type q4_0\n"
                  "  metainfer convert --to hf --model mini-m3-mir --output mini-m3-bf16\n"
                  "  metainfer convert --to compressed-tensors --model mini-m3-w8a8 --output mini-m3-int8\n"
                  "  metainfer convert --to compressed-tensors --model mini-m3-w4a8 --output mini-m3-w4a16",
                  fmt::join(tools::gguf::known_families(), ", ")));
  return {app, [f]() { return run(*f); }};
}

}  // namespace mi::cli
