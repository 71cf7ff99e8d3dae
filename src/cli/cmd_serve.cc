#include <fmt/format.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <functional>
#include <mutex>
#include <thread>

#include "base/util.h"
#include "cli/command.h"
#include "compiler/kernel_fallbacks.h"
#include "hw/cpu.h"
#include "runtime/kv/store.h"
#include "server/http/listener.h"
#include "server/keys.h"
#include "server/line_log.h"
#include "server/say.h"
#include "server/server.h"
#include "server/supervisor.h"
#include "tools/session.h"

namespace mi::cli {
namespace {

using server::say;

struct Flags {
  EngineFlags engine;
  std::string host = "127.0.0.1", model, key_file, tls_cert, tls_key, access_log, record_traffic;
  std::vector<std::string> cors_origins;
  int port = 8000;
  int64_t step = 0;
  runtime::LoopOptions loop{.max_waiting = 1024, .max_queue_seconds = 10};
  double step_ms = -1, timeout = 0, kv_fraction = 0.6;
  int64_t kv_tokens = 0, kv_floor = 512, kv_growth = 1024;
  bool no_prefix_cache = false;
  std::string kv_disk;
  uint64_t kv_disk_bytes = uint64_t(8) << 30;
  double drain = 30, stuck = 120;
  bool watchdog = false, no_ui = false, expert_metrics = false;
  server::HttpLimits http;
};

// SIGINT and SIGTERM go to one thread: before the server is ready they end the program at once, for nobody waits for an
// answer; then the first asks for a graceful end and the second ends it. SIGHUP reloads, where there is something to
// reload; else it ends the program as it always does.
class Signals {
 public:
  // reloads: there will be something to read again, so a SIGHUP before that is no end.
  explicit Signals(bool reloads) : reloads_(reloads) {
    sigemptyset(&set_);
    for (int s : {SIGINT, SIGTERM, SIGHUP}) sigaddset(&set_, s);
    pthread_sigmask(SIG_BLOCK, &set_, nullptr);  // inherited by every thread made from here on
    std::thread([this] {
      while (true) {
        int signal = 0;
        if (sigwait(&set_, &signal) != 0) continue;
        if (signal == SIGHUP && hang_up()) continue;
        if (!serving_) _exit(signal == SIGHUP ? 128 + signal : 0);
        if (asked_.exchange(true)) _exit(128 + signal);
        asked_.notify_all();
      }
    }).detach();
  }
  // Before anyone is told that the server is there.
  void serving() { serving_ = true; }
  // What SIGHUP does from now on, and at once if one has come already.
  void on_reload(std::function<void()> reload) {
    std::lock_guard lock(mutex_);
    reload_ = std::move(reload);
    if (reload_ && std::exchange(missed_, false)) reload_();
  }
  void wait() { asked_.wait(false); }
  void ending() {
    std::lock_guard lock(mutex_);
    reload_ = [] {};  // what it would reload is being taken down
  }

 private:
  bool hang_up() {
    std::lock_guard lock(mutex_);
    if (!reload_ && reloads_) return missed_ = true;
    if (reload_) reload_();
    return bool(reload_);
  }
  const bool reloads_;
  bool missed_ = false;
  sigset_t set_;
  std::mutex mutex_;
  std::function<void()> reload_;
  std::atomic<bool> serving_{false}, asked_{false};
};

std::string with(std::string s, char from, char to) {
  std::replace(s.begin(), s.end(), from, to);
  return s;
}

// Each connection is a descriptor; the usual soft limit of 1024 would be the limit of connections.
void allow_many_descriptors() {
  rlimit r{};
  if (getrlimit(RLIMIT_NOFILE, &r) != 0) return;
  r.rlim_cur = r.rlim_max;
  setrlimit(RLIMIT_NOFILE, &r);
}

Result<int> run(const Flags& f) {
  if (f.tls_cert.empty() != f.tls_key.empty())
    return fail(ErrorCode::kUsage, "--tls-cert and --tls-key belong together: {} is missing",
                f.tls_cert.empty() ? "--tls-cert" : "--tls-key");
  if (!f.kv_disk.empty() && (f.no_prefix_cache || !f.engine.memory_pool))
    return fail(ErrorCode::kUsage,
                "--kv-disk keeps what the prefix cache gives up, and {} turns that off: leave one out",
                f.no_prefix_cache ? "--no-prefix-cache" : "--memory-pool false");
  MI_TRY(const server::Cors cors, server::Cors::make(f.cors_origins));
  allow_many_descriptors();
  signal(SIGPIPE, SIG_IGN);  // also in the watchdog's parent, which writes to the same log
  const auto is_file = [](const std::string& log) { return !log.empty() && log != "-"; };
  const bool reloads =
      !f.key_file.empty() || !f.tls_cert.empty() || is_file(f.access_log) || is_file(f.record_traffic);
  MI_TRY(int listener, server::inherited_listener());
  if (f.watchdog && !server::is_supervised()) {
    if (listener < 0) {
      MI_TRY(listener, server::open_listener(f.host, f.port));
    }
    return server::supervise(listener, f.stuck, reloads);
  }
  // Lives as long as the process: its thread is detached.
  static Signals* signals = new Signals(reloads);
  server::ServeOptions o;
  o.host = f.host;
  o.port = f.port;
  o.listener = listener;
  o.api_key_file = f.key_file;
  o.tls_cert = f.tls_cert;
  o.tls_key = f.tls_key;
  o.access_log = f.access_log;
  o.record_traffic = f.record_traffic;
  o.ui = !f.no_ui;
  o.cors = cors;
  o.stuck_seconds = f.stuck;
  o.http = f.http;
  // What can be wrong with the flags shows before the model is loaded.
  if (o.listener < 0) {
    MI_TRY(o.listener, server::bind_listener(f.host, f.port));
  }
  if (!f.key_file.empty()) MI_TRY_VOID(server::KeyRing::read(f.key_file));
  if (!f.tls_cert.empty()) MI_TRY_VOID(server::read_tls(f.tls_cert, f.tls_key));
  if (!f.access_log.empty()) MI_TRY_VOID(server::LineLog::check("--access-log", f.access_log));
  if (!f.record_traffic.empty()) MI_TRY_VOID(server::LineLog::check("--record-traffic", f.record_traffic));
  if (!f.kv_disk.empty()) MI_TRY_VOID(runtime::kv::Store::check(f.kv_disk));

  const hw::ThreadAdvice advice = hw::advise_threads();
  tools::SessionOptions so = session_options(f.engine);
  so.threads = f.engine.threads > 0 ? f.engine.threads : advice.threads;
  so.max_tokens_per_step = f.step;
  so.kv_tokens = f.kv_tokens;
  so.kv_fraction = f.kv_fraction;
  MI_TRY(const tools::Session s, tools::open_session(so));
  const artifact::ModelFacts& m = s.engine->manifest().model;
  say("model       {} ({}, {}), {} layers, {:.2f} million parameters, {:.2f} million active\n", m.name, m.model_type,
      m.precision, m.layers, double(m.total_params) / 1e6, double(m.active_params) / 1e6);
  say("cpu         {}: {}\n", hw::cpu_model_name(), hw::describe(hw::cpu()));
  say("threads     {} ({})\n", so.threads, f.engine.threads > 0 ? "--threads" : advice.reason);
  say("weights     {}\n", s.engine->weights_place());
  say("memory      {}\n", s.numa);
  for (const std::string& line : s.engine->kernel_choices()) say("kernel      {}\n", line);
  say("kv cache    {} pages of {} tokens, {}: {}\n", s.engine->kv_pages(), artifact::kKvPageTokens,
      human_bytes(double(s.engine->kv_pages()) * double(s.engine->kv_page_bytes())), s.kv);
  const exec::MemoryPlan& plan = s.memory;
  say("plan        {} at most: weights {}, KV cache {}, activations {}, workspace {}, runtime {}\n", human_bytes(double(s.total_bytes())),
      plan.expert_cache > 0 ? fmt::format("{} and experts {}", human_bytes(double(plan.weights)), human_bytes(double(plan.expert_cache)))
                            : human_bytes(double(plan.weights)),
      human_bytes(double(plan.kv)), human_bytes(double(plan.activations)), human_bytes(double(plan.workspace)), human_bytes(double(s.runtime_bytes)));
  const compiler::KernelFallbacks kernels = compiler::find_kernel_fallbacks(s.engine->manifest());
  const auto tell = [&o](const char* kind, const std::vector<artifact::Fallback>& list) {
    for (const artifact::Fallback& x : list) {
      say("fallback    {}: {} ({}; {})\n", x.where, x.what, x.why, x.fix);
      o.fallbacks.push_back({kind, x.where, x.why});
    }
  };
  tell("float", s.engine->manifest().fallbacks);
  tell("kernel", kernels.list);
  if (!o.fallbacks.empty()) say("fallbacks   {}\n", compiler::fallbacks_line(s.engine->manifest().fallbacks.size(), kernels));

  runtime::LoopOptions lo = f.loop;
  if (f.step_ms >= 0) lo.step_seconds = f.step_ms / 1000;
  lo.step_grows = f.step_ms < 0;
  lo.reuse_prefixes = !f.no_prefix_cache;
  o.timeout_seconds = f.timeout;
  lo.kv_floor_tokens = f.kv_floor;
  lo.kv_growth_tokens = f.kv_growth;
  if (!f.kv_disk.empty()) {
    MI_TRY(lo.kv_store, s.open_kv_store(f.kv_disk, int64_t(f.kv_disk_bytes),
                                        [](const std::string& line) { say("kv disk     {}\n", line); }));
    const runtime::kv::StoreStats d = lo.kv_store->stats();
    say("kv disk     {}: room for {} pages of {}, {} are there\n", f.kv_disk, d.capacity,
        human_bytes(double(lo.kv_store->page_bytes())), d.pages);
  }
  const auto experts = f.expert_metrics ? std::make_shared<runtime::ExpertLoad>(s.engine->manifest()) : nullptr;
  o.experts = experts;
  const auto loop = s.make_loop(lo, experts);
  const std::string name = f.model.empty() ? m.name : f.model;
  for (const std::string& n : {name, with(name, '-', '_'), with(name, '_', '-')})
    if (std::find(o.model_names.begin(), o.model_names.end(), n) == o.model_names.end()) o.model_names.push_back(n);
  o.vocab = m.vocab;
  o.eos_ids = m.eos_ids;
  o.max_seq_len = loop->limits().longest();
  o.model_facts = {{"name", m.name},
                   {"model_type", m.model_type},
                   {"precision", m.precision},
                   {"layers", m.layers},
                   {"vocab", m.vocab},
                   {"parameters", m.total_params},
                   {"active_parameters", m.active_params}};
  o.before_ready = [] { signals->serving(); };
  MI_TRY(const auto server, server::ApiServer::start(*loop, s.text, o));
  signals->on_reload(!server->can_reload() ? std::function<void()>() : [&server] {
    if (const Status s = server->reload(); s.ok())
      say("reloaded    keys, certificate and log, as far as they are used\n");
    else
      say("not reloaded: {}; what was read before stays in force\n", s.error().message());
  });
  say("listening on {}\n", server->url());
  signals->wait();
  signals->ending();
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
  app->add_option("--api-key-file", f->key_file, "file with keys, one a line; then every route but /health and /ready needs one");
  app->add_option("--tls-cert", f->tls_cert, "certificate chain (PEM): serve HTTPS; with --tls-key");
  app->add_option("--tls-key", f->tls_key, "the certificate's key (PEM, without password)");
  app->add_option("--access-log", f->access_log, "file for one JSON object per request; - is standard output");
  app->add_option("--record-traffic", f->record_traffic,
                  "file for the token ids of each prompt and its answer, one JSON object a line; for 'profile --experts --data', calibration and 'quantize --traffic'. It holds what users said");
  app->add_option("--cors-origin", f->cors_origins,
                  "a site whose pages may read the answers (https://chat.example.org), or * for all; may be repeated");
  app->add_flag("--no-ui", f->no_ui, "without the chat page at / and the plots at /dashboard");
  app->add_flag(
      "--expert-metrics", f->expert_metrics,
      "count the tokens of each expert: metainfer:expert_tokens_total in /metrics, one series for every layer "
      "and expert, and the heat map at /dashboard");
  app->add_flag("--watchdog", f->watchdog,
                "serve in a worker process that is replaced when it crashes or gets stuck; the socket stays open");
  app->add_option("--watchdog-seconds", f->stuck,
                  "without progress for so long the server counts as stuck: /health says 503, the watchdog replaces it")
      ->check(CLI::Range(0.5, 86400.0))
      ->capture_default_str();
  app->add_option("--max-body-bytes", f->http.body_bytes, "largest request body; more gets 413")
      ->check(CLI::Range(size_t(1024), size_t(1) << 30))
      ->capture_default_str();
  app->add_option("--max-connections", f->http.max_connections,
                  "requests at one time; more hear 503, and idle connections are closed for new ones")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app->add_option("--request-seconds", f->http.read_seconds, "time for a request to arrive whole; more gets 408")
      ->check(CLI::Range(1, 86400))
      ->capture_default_str();
  app->add_option("--idle-seconds", f->http.idle_seconds, "a connection without a request for so long is closed")
      ->check(CLI::Range(1, 86400))
      ->capture_default_str();
  app->add_option("--slow-reader-bytes", f->http.queued_bytes,
                  "output that a client may leave unread, behind the piece that it is taking, before it is cut off")
      ->check(CLI::Range(size_t(4096), size_t(1) << 30))
      ->capture_default_str();
  app->add_option("--keep-alive-seconds", f->http.keep_alive_seconds,
                  "a stream that is silent for so long gets a comment, so that proxies keep it open; 0: never")
      ->check(CLI::Range(0, 86400))
      ->capture_default_str();
  app->add_option("--max-tokens-per-step", f->step,
                  "most token rows in a step (prompt pieces and running answers together); 0: 512 to 2048, as long as activations "
                  "stay below 256 MB")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  app->add_option("--step-ms", f->step_ms,
                  "longest that a step with running answers should take: prompts are read in pieces that fit; 0: no limit (default: 100, "
                  "or twice what a step with 32 prompt tokens takes, where that is more)")
      ->check(CLI::Range(0.0, 60000.0));
  app->add_option("--prefill-beside-decodes", f->loop.prefill_tokens_beside_decodes,
                  "most prompt tokens in a step while answers are running, whatever the time")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app->add_option("--max-waiting", f->loop.max_waiting, "accepted requests that may wait; more get 429")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app->add_option("--max-queue-seconds", f->loop.max_queue_seconds,
                  "a request that would wait longer for its first step gets 429, with the time to come back in; 0: no limit")
      ->check(CLI::Range(0.0, 86400.0))
      ->capture_default_str();
  app->add_option("--kv-tokens", f->kv_tokens,
                  "tokens that the KV cache has room for (default: max-batch-size sequences of max-seq-len, as far as "
                  "--kv-fraction allows)")
      ->check(CLI::Range(int64_t(64), int64_t(1) << 40));
  app->add_option("--kv-fraction", f->kv_fraction, "most of the memory that weights and activations leave, for the KV cache")
      ->check(CLI::Range(0.01, 1.0))
      ->capture_default_str();
  app->add_option("--kv-floor-tokens", f->kv_floor, "room that a request has to find before it starts, at least")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  app->add_option("--kv-growth-tokens", f->kv_growth,
                  "room that stays free for each running answer when another request starts")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  app->add_flag("--no-prefix-cache", f->no_prefix_cache,
                "do not keep keys and values for requests that begin like an earlier one");
  CLI::Option* const kv_disk = app->add_option(
      "--kv-disk", f->kv_disk,
      "folder for keys and values that the memory has no room for; they are found again after a restart");
  app->add_option("--kv-disk-bytes", f->kv_disk_bytes, "most that --kv-disk may take; 500mb, 20gib and the like, too")
      ->transform(CLI::AsSizeValue(true))
      ->check(CLI::Range(uint64_t(1) << 20, uint64_t(1) << 50))
      ->needs(kv_disk)
      ->capture_default_str();
  app->add_option("--draft-tokens", f->loop.draft_tokens,
                  "tokens guessed ahead from what the text repeats; the answers stay the same. 0: none")
      ->check(CLI::Range(0, 16))
      ->capture_default_str();
  app->add_option("--timeout-seconds", f->timeout, "an answer that takes longer ends with an error; 0: no limit")
      ->check(CLI::Range(0.0, 86400.0))
      ->capture_default_str();
  app->add_option("--drain-seconds", f->drain, "time for running answers after SIGTERM")
      ->check(CLI::Range(0.0, 86400.0))
      ->capture_default_str();
  app->footer(
      "Prints 'listening on http://HOST:PORT' when it is ready. SIGTERM or Ctrl-C: ends gracefully; twice, or "
      "before it is ready: at once. SIGHUP: reads keys and certificate again, and opens the logs "
      "again.\nExample:\n"
      "  metainfer serve --engine mini-m3-engine --host 0.0.0.0 --port 8000 --max-batch-size 32 --max-seq-len 4096");
  return {app, [f]() { return run(*f); }};
}

}  // namespace mi::cli
