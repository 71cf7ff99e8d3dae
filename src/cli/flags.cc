#include <fmt/format.h>

#include <cmath>

#include "cli/command.h"

namespace mi::cli {

void add_threads(CLI::App& app, int* threads, const char* of) {
  app.add_option("--threads", *threads, fmt::format("{}worker threads (default: what the CPU mask and quota allow)", of))
      ->check(CLI::Range(1, 1024));
}

void add_cache_flags(CLI::App& app, std::string* kv_type, std::string* order) {
  app.add_option("--kv-type", *kv_type, "storage of keys and values: f32, bf16 or int8 (default: the engine's)")
      ->check(CLI::IsMember({"f32", "bf16", "int8"}));
  app.add_option("--attention-order", *order,
                 "in which order sums over a bfloat16 cache are added: auto: tiles on CPUs with AMX-BF16, otherwise "
                 "pairs; choose one to get the same bits on every CPU. Other caches have one order")
      ->check(CLI::IsMember({"auto", "pairs", "tiles"}))
      ->capture_default_str();
}

void add_engine_flags(CLI::App& app, EngineFlags* f, bool sequences) {
  app.add_option("--engine", f->engine, "engine directory, from metainfer build")->required();
  add_threads(app, &f->threads);
  if (sequences) {
    app.add_option("--max-seq-len", f->max_seq_len,
                   "longest sequence, prompt and answer together (default: the model's, at most 4096)")
        ->check(CLI::Range(1, 1 << 24));
    app.add_option("--max-batch-size", f->max_batch_size, "sequences in a step")
        ->check(CLI::Range(1, 4096))
        ->capture_default_str();
  }
  add_cache_flags(app, &f->kv_type, &f->attention_order);
  CLI::Option* weights =
      app.add_option("--weights", f->weights,
                     "read the weights into huge pages, map the file, or auto: read when the memory is there")
          ->check(CLI::IsMember({"auto", "read", "map"}))
          ->capture_default_str();
  app.add_option("--expert-cache", f->expert_cache,
                 "for engines larger than memory: experts stay on disk and are read as they are chosen, into so much "
                 "memory; the other weights are read at start. 2gib, 500mb and the like, too")
      ->transform(CLI::AsSizeValue(true))
      ->check(CLI::Range(uint64_t(1), uint64_t(1) << 50))
      ->excludes(weights);
  app.add_option("--expert-profile", f->expert_profile,
                 "what 'metainfer profile --experts' wrote: with --expert-cache the experts that real traffic chooses most are read at "
                 "start and stay longer; with all weights in memory they are shared out over memory nodes, where there are several");
  app.add_option("--memory-pool", f->memory_pool,
                 "true: memory of keys and values, once used, is kept for the next request; false: the kernel gets it "
                 "back when a request ends")
      ->capture_default_str();
  app.add_flag("--no-numa", f->no_numa,
               "leave threads and weights to the kernel on a machine with several memory nodes");
  app.add_flag("--no-checksums", f->no_checksums, "trust weights.bin without reading it all first");
}

tools::SessionOptions session_options(const EngineFlags& f) {
  tools::SessionOptions o;
  o.engine = f.engine;
  o.threads = f.threads;
  o.max_seq_len = f.max_seq_len;
  o.max_batch_size = f.max_batch_size;
  o.kv_type = f.kv_type;
  o.attention_order = f.attention_order;
  o.weights = f.weights;
  o.expert_cache_bytes = int64_t(f.expert_cache);
  o.expert_profile = f.expert_profile;
  o.memory_pool = f.memory_pool;
  o.numa = !f.no_numa;
  o.verify_checksums = !f.no_checksums;
  return o;
}

CLI::Validator at_least_zero() {
  return CLI::Validator(
      [](std::string& s) {
        double v = 0;
        if (CLI::detail::lexical_cast(s, v) && v >= 0 && std::isfinite(v)) return std::string();
        return fmt::format("'{}': expected a number, 0 or more", s);
      },
      "0 or more");
}
CLI::Validator above_zero(double most) {
  return CLI::Validator(
      [most](std::string& s) {
        double v = 0;
        if (CLI::detail::lexical_cast(s, v) && v > 0 && v <= most) return std::string();
        return fmt::format("'{}': expected a number above 0, at most {}", s, most);
      },
      fmt::format("above 0, at most {}", most));
}

Status check_output(const std::string& path, bool force) {
  std::error_code ec;
  if (!force && std::filesystem::exists(path, ec)) return bad_input("{} exists already; --force replaces it", path);
  MI_TRY(const OutputFile out, OutputFile::create(path, force));
  static_cast<void>(out);
  return {};
}

Status write_output(const std::string& path, bool force, const std::string& text) {
  MI_TRY(OutputFile out, OutputFile::create(path, force));
  MI_TRY_VOID(out.writer().write(text));
  return out.commit();
}

}  // namespace mi::cli
