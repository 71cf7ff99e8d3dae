// metainfer: one program, one subcommand per step.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "base/file.h"
#include "base/json.h"
#include "base/utf8.h"
#include "base/util.h"
#include "base/version.h"
#include "cli/command.h"
#include "hw/cpu.h"

namespace {

using mi::cli::Command;

// Messages may quote bytes of broken files: only text reaches the terminal, on one line.
int print_error(const mi::Error& e) {
  std::string text = mi::clean_utf8(e.message());
  for (char& c : text)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
  fmt::print(stderr, "error: {}\n", text);
  return int(e.code());
}

// "unknown flag --modle (did you mean --model?)": CLI11 names only the flag.
int usage_error(const CLI::App& app, const CLI::ParseError& e) {
  const CLI::App* at = &app;
  for (const CLI::App* sub : app.get_subcommands()) at = sub;
  // Flags first: what follows an unknown flag is left over too.
  std::vector<std::string> extras = app.remaining(true);
  std::stable_partition(extras.begin(), extras.end(), [](const std::string& x) { return x.rfind("-", 0) == 0; });
  if (extras.empty()) {
    fmt::print(stderr, "error: {}\n", mi::clean_utf8(e.what()));
  } else {
    const bool flag = extras.front().rfind("-", 0) == 0;
    std::vector<std::string> known;
    if (flag) {
      for (const CLI::Option* o : at->get_options()) known.push_back("--" + o->get_single_name());
    } else {
      for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; }))
        known.push_back(sub->get_name());
    }
    const std::string near = mi::nearest_name(extras.front(), known);
    fmt::print(stderr, "error: unknown {} {}{}\n", flag ? "flag" : "argument", mi::clean_utf8(extras.front()),
               near.empty() ? "" : fmt::format(" (did you mean {}?)", near));
  }
  fmt::print(stderr, "see: metainfer {}--help\n", at == &app ? "" : at->get_name() + " ");
  return int(mi::ErrorCode::kUsage);
}

int run(int argc, char** argv) {
  CLI::App app{"metainfer: compile a mixture-of-experts model once, serve it fast, and show that nothing broke",
               "metainfer"};
  app.set_version_flag("--version", std::string("metainfer ") + mi::version());
  app.require_subcommand(1);
  app.footer(
      "A model goes through export -> quantize -> build -> serve:\n"
      "  metainfer export   --model-dir models/mini-m3 --output mini-m3-mir\n"
      "  metainfer quantize --model mini-m3-mir --config quant_w8a8.yaml --output mini-m3-w8a8\n"
      "  metainfer build    --model mini-m3-w8a8 --target cpu --opt-level O2 --output mini-m3-engine\n"
      "  metainfer serve    --engine mini-m3-engine --port 8000\n"
      "\nExit codes: 0 ok, 1 the check failed, 2 usage, 3 environment (no memory, disk full), 4 bad input.");
  bool quiet = false;
  app.add_flag("-q,--quiet", quiet, "no progress lines");
  app.fallthrough();

  const Command commands[] = {mi::cli::add_export(app),  mi::cli::add_quantize(app), mi::cli::add_build(app),
                              mi::cli::add_serve(app),   mi::cli::add_generate(app), mi::cli::add_verify(app),
                              mi::cli::add_eval(app),    mi::cli::add_bench(app),    mi::cli::add_profile(app),
                              mi::cli::add_inspect(app), mi::cli::add_convert(app)};
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e);  // --help, --version
    return usage_error(app, e);
  }
  mi::Progress::set_quiet(quiet);
  if (mi::Status s = mi::hw::check_force_env(); !s.ok()) return print_error(s.error());
  // serve ends gracefully on its own; everything else only has to leave nothing behind.
  if (!app.got_subcommand("serve")) mi::remove_outputs_on_signal();
  for (const Command& c : commands) {
    if (!c.app->parsed()) continue;
    const mi::Result<int> r = c.run();
    return r.ok() ? *r : print_error(r.error());
  }
  return int(mi::ErrorCode::kUsage);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "error: out of memory\n");
    return int(mi::ErrorCode::kEnvironment);
  }
}
