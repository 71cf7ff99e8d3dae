#pragma once
// The table of subcommands. A command is: flags -> options struct -> one library call -> print. It returns the exit
// code (0 ok, 1 the check it ran failed) or an Error, whose code is the exit code (2 usage, 3 environment, 4 bad
// input).

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

#include "base/result.h"
#include "tools/session.h"

namespace mi::cli {

using Action = std::function<Result<int>()>;

// Declares the command's flags on a new subcommand of app and returns what to do once they are parsed.
struct Command {
  CLI::App* app = nullptr;
  Action run;
};

Command add_export(CLI::App& app);
Command add_quantize(CLI::App& app);
Command add_build(CLI::App& app);
Command add_serve(CLI::App& app);
Command add_generate(CLI::App& app);
Command add_verify(CLI::App& app);
Command add_eval(CLI::App& app);
Command add_bench(CLI::App& app);
Command add_profile(CLI::App& app);
Command add_inspect(CLI::App& app);
Command add_convert(CLI::App& app);

// Flags that several commands share.
struct EngineFlags {
  std::string engine;
  int threads = 0;
  int64_t max_seq_len = 0;
  int64_t max_batch_size = 32;
  std::string kv_type;
  std::string attention_order = "auto";
  std::string weights = "auto";
  uint64_t expert_cache = 0;
  std::string expert_profile;
  bool memory_pool = true;
  bool no_numa = false;
  bool no_checksums = false;
};
// of: what they are for, before the text.
void add_threads(CLI::App& app, int* threads, const char* of = "");
// What is kept of keys and values, and in which order attention adds over it.
void add_cache_flags(CLI::App& app, std::string* kv_type, std::string* attention_order);
// sequences: also those that size the KV pool, which bench and profile do by themselves.
void add_engine_flags(CLI::App& app, EngineFlags* f, bool sequences = true);
tools::SessionOptions session_options(const EngineFlags& f);

// Checks of limits; their messages name no bound that nobody meets.
CLI::Validator at_least_zero();
CLI::Validator above_zero(double most);

// Refuses what write_output would refuse, to be asked before minutes of measuring; nothing stays.
Status check_output(const std::string& path, bool force);
// A page or table of its own, whole or not at all; force: an existing file may be replaced.
Status write_output(const std::string& path, bool force, const std::string& text);

}  // namespace mi::cli
