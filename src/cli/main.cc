// metainfer: one program, one subcommand per step.
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <system_error>

#include "base/file.h"
#include "base/json.h"
#include "base/utf8.h"
#include "base/util.h"
#include "base/version.h"
#include "cli/command.h"
#include "compiler/kernel_fallbacks.h"
#include "cli/number_list.h"
#include "hw/cpu.h"

namespace {

using mi::cli::Command;

// Without these a file that is written next would get the number of a closed stream, and all that is printed.
void open_standard_streams() {
  for (int fd = 0; fd < 3; ++fd)
    if (fcntl(fd, F_GETFD) < 0 && errno == EBADF && ::open("/dev/null", O_RDWR) != fd) _exit(3);
}

// Messages may quote bytes of broken files: only text reaches the terminal, on one line. (fmt::print throws where
// nothing can be written.)
int print_error(const mi::Error& e) {
  std::string text = mi::clean_utf8(e.message());
  for (char& c : text)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
  std::fputs(("error: " + text + "\n").c_str(), stderr);
  return int(e.code());
}

constexpr const char* kOutOfMemory = "out of memory; free some, or raise the limit that this process has (ulimit -v, a container's)";
constexpr const char* kNoThread =
    "no thread could be started: is memory (ulimit -v) or the number of threads (ulimit -u, a control group) limited?";

// What a thread threw and nobody caught. Without memory there is none for a message either: it is written as it stands.
[[noreturn]] void end_uncaught() {
  const auto say = [](const char* text) {
    for (const char* part : {"error: ", text, "\n"}) (void)!write(STDERR_FILENO, part, std::strlen(part));
    _exit(int(mi::ErrorCode::kEnvironment));
  };
  try {
    if (const std::exception_ptr e = std::current_exception()) std::rethrow_exception(e);
  } catch (const std::bad_alloc&) {
    say(kOutOfMemory);
  } catch (const std::system_error& e) {
    if (e.code() == std::errc::resource_unavailable_try_again) say(kNoThread);
    std::fprintf(stderr, "%s\n", e.what());
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
  } catch (...) {
  }
  std::abort();
}

int output_error() {
  return print_error(mi::fail(mi::ErrorCode::kEnvironment, "the standard output cannot be written: is its disk full?"));
}

// An answer or a report that did not arrive is no success.
int flush_output(int code) {
  return code != 0 || (std::fflush(stdout) == 0 && !std::ferror(stdout)) ? code : output_error();
}

// What CLI11 lets pass: an empty value (an unset shell variable: '--baseline "$BASE"' would compare with nothing),
// numbers that no comparison can fail (nan), and integers that it bends into range.
mi::Status check_values(const CLI::App& app) {
  for (const CLI::Option* o : app.get_options()) {
    const std::string type = o->get_type_name();
    for (const std::string& value : o->results()) {
      const char* why = nullptr;
      errno = 0;
      if (value.empty() && o->get_items_expected_max() > 0 && type != mi::cli::kNumberList)
        why = "the value is empty; leave the flag out instead";
      else if (type.starts_with("FLOAT") && !std::isfinite(std::strtod(value.c_str(), nullptr)))
        why = "expected a finite number";
      else if (type.starts_with("UINT") && value.find('-') != std::string::npos)
        why = "expected a number from 0 on";
      else if (type.starts_with("UINT") && (std::strtoull(value.c_str(), nullptr, 0), errno == ERANGE))
        why = "the number is too large";
      else if (type.starts_with("INT") && (std::strtoll(value.c_str(), nullptr, 0), errno == ERANGE))
        why = "the number is too large";
      if (why) return mi::fail(mi::ErrorCode::kUsage, "{} '{}': {}", o->get_name(), value, why);
    }
  }
  for (const CLI::App* sub : app.get_subcommands()) MI_TRY_VOID(check_values(*sub));
  return {};
}

// "unknown flag --modle (did you mean --model?)": CLI11 names only the flag.
int usage_error(const CLI::App& app, const CLI::ParseError& e) {
  const CLI::App* at = &app;
  for (const CLI::App* sub : app.get_subcommands()) at = sub;
  // Flags first: what follows an unknown flag is left over too.
  std::vector<std::string> extras = app.remaining(true);
  std::stable_partition(extras.begin(), extras.end(), [](const std::string& x) { return x.rfind("-", 0) == 0; });
  std::string message = e.what();
  if (!extras.empty()) {
    const bool flag = extras.front().rfind("-", 0) == 0;
    std::vector<std::string> known;
    if (flag) {
      for (const CLI::Option* o : at->get_options()) known.push_back("--" + o->get_single_name());
    } else {
      for (const CLI::App* level : {&app, at})
        for (const CLI::App* sub : level->get_subcommands([](const CLI::App*) { return true; }))
          known.push_back(sub->get_name());
    }
    const std::string near = mi::nearest_name(extras.front(), known);
    message = fmt::format("unknown {} {}{}", flag ? "flag" : "argument", extras.front(),
                          near.empty() ? "" : fmt::format(" (did you mean {}?)", near));
  }
  print_error(mi::fail(mi::ErrorCode::kUsage, "{}", message));
  std::fputs(fmt::format("see: metainfer {}--help\n", at == &app ? "" : at->get_name() + " ").c_str(), stderr);
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
      "  metainfer quantize --model mini-m3-mir --config scripts/quant_w8a8.yaml --output mini-m3-w8a8\n"
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
  if (mi::Status s = check_values(app); !s.ok()) return print_error(s.error());
  mi::Progress::set_quiet(quiet);
  if (mi::Status s = mi::hw::check_force_env(); !s.ok()) return print_error(s.error());
  if (mi::Status s = mi::compiler::check_left_out_kernels(); !s.ok()) return print_error(s.error());
  // serve ends gracefully on its own; everything else only has to leave nothing behind.
  const bool serve = app.got_subcommand("serve");
  if (!serve) mi::remove_outputs_on_signal();
  signal(SIGXFSZ, SIG_IGN);  // a limit on file sizes is an error of the write
  for (const Command& c : commands) {
    if (!c.app->parsed()) continue;
    const mi::Result<int> r = c.run();
    if (!r.ok()) return print_error(r.error());
    return serve ? *r : flush_output(*r);  // a server does not depend on its log
  }
  return int(mi::ErrorCode::kUsage);
}

}  // namespace

int main(int argc, char** argv) {
  open_standard_streams();
  std::set_terminate(end_uncaught);
  try {
    return run(argc, argv);
  } catch (const std::bad_alloc&) {
    return print_error(mi::fail(mi::ErrorCode::kEnvironment, "{}", kOutOfMemory));
  } catch (const std::system_error& e) {  // fmt::print could not write, or no thread could be started
    if (std::ferror(stdout)) return output_error();
    const bool no_thread = e.code() == std::errc::resource_unavailable_try_again;
    return print_error(mi::fail(mi::ErrorCode::kEnvironment, "{}", no_thread ? kNoThread : e.what()));
  }
}
