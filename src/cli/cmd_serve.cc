#include <fmt/format.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <thread>

#include "base/util.h"
#include "cli/command.h"
#include "hw/cpu.h"
#include "server/server.h"
#include "tools/session.h"

namespace mi::cli {
namespace {

struct Flags {
  EngineFlags engine;
  std::string host = "127.0.0.1", model, key_file;
  int port = 8000;
  int64_t step = 512, waiting = 1024, beside = 128;
  double drain = 30;
};

// SIGINT and SIGTERM go to one thread: before the server runs they end the program at once, then the first asks for a
// graceful end and the second ends it.
class Signals {
 public:
  Signals() {
    sigemptyset(&set_);
    sigaddset(&set_, SIGINT);
    sigaddset(&set_, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &set_, nullptr);  // inherited by every thread made from here on
    std::thread([this] {
      while (true) {
        int signal = 0;
        if (sigwait(&set_, &signal) != 0) continue;
        if (!serving_ || asked_.exchange(true)) _exit(128 + signal);
        asked_.notify_all();
      }
    }).detach();
  }
  void serving() { serving_ = true; }  // before anyone is told that the server is there
  void wait() { asked_.wait(false); }

 private:
  sigset_t set_;
  std::atomic<bool> serving_{false}, asked_{false};
};

std::string with(std::string s, char from, char to) {
  std::replace(s.begin(), s.end(), from, to);
  return s;
}

// A log that cannot be written (its disk is full, its reader has left) is no reason to stop serving.
template <typename... Args>
void say(fmt::format_string<Args...> f, Args&&... args) {
  std::fputs(fmt::format(f, std::forward<Args>(args)...).c_str(), stdout);
  std::fflush(stdout);
}

Result<int> run(const Flags& f) {
  // Lives as long as the process: its thread is detached.
  static Signals* signals = new Signals();
  signal(SIGPIPE, SIG_IGN);
  server::ServeOptions o;
  o.host = f.host;
  o.port = f.port;
  if (!f.key_file.empty()) {
    MI_TRY(o.api_keys, server::read_api_keys(f.key_file));
  }

  const hw::ThreadAdvice advice = hw::advise_threads();
  tools::SessionOptions so = session_options(f.engine);
  so.threads = f.engine.threads > 0 ? f.engine.threads : advice.threads;
  so.max_tokens_per_step = f.step;
  MI_TRY(const tools::Session s, tools::open_session(so));
  const artifact::ModelFacts& m = s.engine->manifest().model;
  say("model       {} ({}, {}), {} layers, {:.2f} million parameters, {:.2f} million active\n", m.name, m.model_type,
      m.precision, m.layers, double(m.total_params) / 1e6, double(m.active_params) / 1e6);
  say("cpu         {}: {}\n", hw::cpu_model_name(), hw::describe(hw::cpu()));
  say("threads     {} ({})\n", so.threads, f.engine.threads > 0 ? "--threads" : advice.reason);
  say("weights     {}\n", s.engine->weights_place());
  say("memory      {}\n", s.numa);
  for (const std::string& line : s.engine->kernel_choices()) say("kernel      {}\n", line);
  say("kv cache    {} pages of {} tokens, {}: {} sequences of {} tokens\n", s.engine->kv_pages(),
      artifact::kKvPageTokens, human_bytes(double(s.engine->kv_pages()) * double(s.engine->kv_page_bytes())),
      s.max_batch_size, s.max_seq_len);
  for (const artifact::Fallback& x : s.engine->manifest().fallbacks)
    say("fallback    {}: {} ({})\n", x.where, x.what, x.why);

  const auto loop = s.make_loop({.max_waiting = f.waiting, .prefill_tokens_beside_decodes = f.beside});
  const std::string name = f.model.empty() ? m.name : f.model;
  for (const std::string& n : {name, with(name, '-', '_'), with(name, '_', '-')})
    if (std::find(o.model_names.begin(), o.model_names.end(), n) == o.model_names.end()) o.model_names.push_back(n);
  o.vocab = m.vocab;
  o.eos_ids = m.eos_ids;
  o.max_seq_len = loop->limits().longest();
  o.max_in_flight = s.max_batch_size + f.waiting;
  o.model_facts = {{"name", m.name},
                   {"model_type", m.model_type},
                   {"precision", m.precision},
                   {"layers", m.layers},
                   {"vocab", m.vocab},
                   {"parameters", m.total_params},
                   {"active_parameters", m.active_params}};
  MI_TRY(const auto server, server::ApiServer::start(*loop, s.text, o));
  signals->serving();
  say("listening on {}\n", server->url());
  signals->wait();
  say("ending: no new requests; running answers have {:.0f} s\n", f.drain);
  server->stop(f.drain);
  return 0;
}

}  // namespace

Command add_serve(CLI::App& parent) {
  auto f = std::make_shared<Flags>();
  CLI::App* app = parent.add_subcommand("serve", "answer OpenAI-style requests over HTTP");
  add_engine_flags(*app, &f->engine);
  app->add_option("--host", f->host, "address to listen on; 0.0.0.0 for all")->capture_default_str();
  app->add_option("--port", f->port, "0 picks a free one")->check(CLI::Range(0, 65535))->capture_default_str();
  app->add_option("--model", f->model, "served model name (default: the engine's); - and _ are equal");
  app->add_option("--api-key-file", f->key_file, "file with keys, one a line; then every route but /health needs one");
  app->add_option("--max-tokens-per-step", f->step,
                  "most token rows in a step (prompt pieces and running answers together)")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app->add_option("--prefill-beside-decodes", f->beside,
                  "most prompt tokens in a step while answers are running: bounds the gap in their streams")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app->add_option("--max-waiting", f->waiting, "accepted requests that may wait; more get 429")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app->add_option("--drain-seconds", f->drain, "time for running answers after SIGTERM")
      ->check(CLI::Range(0.0, 86400.0))
      ->capture_default_str();
  app->footer(
      "Prints 'listening on http://HOST:PORT' when it is ready. SIGTERM or Ctrl-C: ends gracefully; twice: at "
      "once.\nExample:\n"
      "  metainfer serve --engine mini-m3-engine --host 0.0.0.0 --port 8000 --max-batch-size 32 --max-seq-len 4096");
  return {app, [f]() { return run(*f); }};
}

}  // namespace mi::cli
