#include "server/metrics.h"

#include <prometheus/metric_family.h>
#include <prometheus/text_serializer.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <sstream>

#include "base/version.h"
#include "server/http/http_server.h"
#include "server/line_log.h"

namespace mi::server {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Labels = std::vector<ClientMetric::Label>;

class Families {
 public:
  explicit Families(std::string model) : model_(std::move(model)) {}

  void gauge(const char* name, const char* help, double v, Labels labels = {}) {
    ClientMetric m = labelled(std::move(labels));
    m.gauge.value = v;
    family(name, help, MetricType::Gauge).metric.push_back(std::move(m));
  }
  void counter(const char* name, const char* help, double v, Labels labels = {}) {
    ClientMetric m = labelled(std::move(labels));
    m.counter.value = v;
    family(name, help, MetricType::Counter).metric.push_back(std::move(m));
  }
  void histogram(const char* name, const char* help, const runtime::Histogram& h) {
    ClientMetric m = labelled({});
    m.histogram.sample_count = h.count;
    m.histogram.sample_sum = h.sum;
    uint64_t below = 0;
    for (size_t i = 0; i < h.counts.size(); ++i) {
      below += h.counts[i];
      const double bound = i < runtime::Histogram::kBounds.size() ? runtime::Histogram::kBounds[i]
                                                                  : std::numeric_limits<double>::infinity();
      m.histogram.bucket.push_back({below, bound});
    }
    family(name, help, MetricType::Histogram).metric.push_back(std::move(m));
  }
  std::string text() const {
    std::ostringstream out;
    prometheus::TextSerializer().Serialize(out, families_);
    return out.str();
  }

 private:
  ClientMetric labelled(Labels labels) const {
    ClientMetric m;
    m.label = std::move(labels);
    m.label.push_back({"model_name", model_});
    return m;
  }
  MetricFamily& family(const char* name, const char* help, MetricType type) {
    if (!families_.empty() && families_.back().name == name) return families_.back();
    families_.push_back({name, help, type, {}});
    return families_.back();
  }
  std::string model_;
  std::vector<MetricFamily> families_;
};

// 0 where /proc does not tell.
double resident_bytes() {
  long pages = 0;
  if (std::FILE* f = std::fopen("/proc/self/statm", "re")) {
    if (std::fscanf(f, "%*s %ld", &pages) != 1) pages = 0;
    std::fclose(f);
  }
  return double(pages) * double(sysconf(_SC_PAGESIZE));
}
double cpu_seconds() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return double(t.tv_sec) + double(t.tv_nsec) / 1e9;
}

void add_http(Families& f, const HttpCounters& c) {
  const auto count = [&](const char* name, const char* help, const std::atomic<uint64_t>& n) {
    f.counter(name, help, double(n.load()));
  };
  f.gauge("metainfer:http_open_connections", "Client connections.", double(c.open.load()));
  f.gauge("metainfer:http_open_answers", "Requests that are being answered, this one included.",
          double(c.answering.load()));
  count("metainfer:http_connections_total", "Connections accepted.", c.accepted);
  count("metainfer:http_evicted_connections_total", "Connections without a whole request closed to make room.",
        c.evicted);
  count("metainfer:http_turned_away_total", "Connections closed unheard, every place being busy.", c.turned_away);
  count("metainfer:http_crowded_total", "Requests answered by 503, every place being taken.", c.crowded);
  count("metainfer:http_slow_readers_total", "Answers cut off because the client did not read.", c.slow_readers);
  count("metainfer:http_clients_gone_total", "Clients that left before the end of their answer.", c.clients_gone);
  count("metainfer:http_timeouts_total", "Requests that did not arrive in time.", c.timeouts);
  count("metainfer:http_malformed_total", "Requests that were no HTTP or beyond its limits.", c.malformed);
  count("metainfer:tls_failed_handshakes_total", "TLS handshakes that failed.", c.failed_handshakes);
}

void add_fallbacks(Families& f, const std::vector<Fallback>& all) {
  for (const char* kind : {"float", "kernel"})
    f.gauge("metainfer:fallbacks", "Products outside the fast path: float in an int8 model, or on a slower kernel.",
            double(std::count_if(all.begin(), all.end(), [&](const Fallback& x) { return x.kind == kind; })),
            {{"kind", kind}});
  for (const Fallback& x : all)
    f.gauge("metainfer:fallback_info", "Always 1; one for each product outside the fast path.", 1,
            {{"kind", x.kind}, {"where", x.where}, {"reason", x.why}});
}

void add_kv_disk(Families& f, const runtime::kv::StoreStats& d) {
  f.gauge("metainfer:kv_disk_capacity_pages", "KV pages that --kv-disk has room for; 0 without it.",
          double(d.capacity));
  f.gauge("metainfer:kv_disk_pages", "KV pages on disk.", double(d.pages));
  f.gauge("metainfer:kv_disk_bytes", "What they take there.", double(d.bytes));
  f.gauge("metainfer:kv_disk_quiet", "1 after a failed write: nothing is written, or added, for a while.", d.quiet);
  f.counter("metainfer:kv_disk_hits_total", "KV pages read from disk instead of computed.", double(d.hits));
  f.counter("metainfer:kv_disk_misses_total", "KV pages of prompts that neither memory nor disk had.",
            double(d.misses));
  f.counter("metainfer:kv_disk_written_total", "KV pages written to disk.", double(d.written));
  f.counter("metainfer:kv_disk_replaced_total", "KV pages on disk that made room for others.", double(d.replaced));
  f.counter("metainfer:kv_disk_dropped_total", "KV pages given up before they were on disk.", double(d.dropped));
  f.counter("metainfer:kv_disk_errors_total", "KV pages that could not be written or read back.",
            double(d.write_errors), {{"operation", "write"}});
  f.counter("metainfer:kv_disk_errors_total", "KV pages that could not be written or read back.", double(d.read_errors),
            {{"operation", "read"}});
}

void add_expert_stream(Families& f, const exec::StreamStats& s) {
  f.gauge("metainfer:experts_held", "Experts that --expert-cache has room for; 0 without it.", double(s.held));
  f.counter("metainfer:expert_cache_hits_total", "Experts that a step wanted and memory had.", double(s.hits));
  f.counter("metainfer:expert_cache_misses_total", "Experts that a step wanted and had to wait for.", double(s.misses));
  f.counter("metainfer:expert_prefetches_total", "Experts read before a step wanted them.", double(s.prefetched));
  f.counter("metainfer:expert_prefetches_used_total", "Those that a step then wanted.", double(s.prefetch_used));
  f.counter("metainfer:expert_read_bytes_total", "Bytes of experts read from disk.", double(s.bytes_read));
  f.counter("metainfer:expert_wait_seconds_total", "Time that steps had nothing to do but wait for experts.",
            double(s.waited_ns) / 1e9);
}

}  // namespace

std::string metrics_text(ServerContext& c) {
  const runtime::Stats s = c.loop->stats();
  Families f(c.model_names.front());
  f.gauge("vllm:num_requests_running", "Sequences in the batch.", double(s.running));
  f.gauge("vllm:num_requests_waiting", "Sequences accepted and not in the batch.", double(s.waiting));
  const double kv_share = s.kv_pages_total ? double(s.kv_pages_used) / double(s.kv_pages_total) : 0;
  f.gauge("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", kv_share);
  f.gauge("vllm:gpu_cache_usage_perc", "The same under its older name.", kv_share);
  f.gauge("metainfer:kv_pages_total", "KV pages of 64 tokens.", double(s.kv_pages_total));
  f.gauge("metainfer:expected_queue_seconds", "Seconds that a request which comes now would wait for its first step.",
          s.expected_wait);
  f.gauge("metainfer:step_limit_seconds", "Longest that a step with running answers should take; 0: no limit.", s.step_limit);
  f.gauge("metainfer:seconds_since_progress", "Seconds since a step ended or the loop was idle.",
          s.seconds_since_progress);
  f.counter("vllm:prompt_tokens_total", "Prompt tokens of started sequences.", double(s.prompt_tokens));
  f.counter("vllm:generation_tokens_total", "Generated tokens.", double(s.generated_tokens));
  f.counter("vllm:prefix_cache_queries_total", "Prompt tokens that were looked for in the KV cache.",
            double(s.prompt_tokens));
  f.counter("vllm:prefix_cache_hits_total", "Prompt tokens that were found there instead of computed.",
            double(s.reused_tokens));
  f.gauge("metainfer:kv_pages_reusable", "KV pages that nobody holds and that a prompt may begin with.",
          double(s.kv_pages_reusable));
  f.counter("metainfer:kv_pages_given_up_total", "Reusable KV pages that made room for others.",
            double(s.kv_pages_given_up));
  add_kv_disk(f, s.kv_disk);
  add_expert_stream(f, s.experts);
  f.counter("vllm:spec_decode_num_draft_tokens_total", "Tokens guessed ahead.", double(s.draft_tokens));
  f.counter("vllm:spec_decode_num_accepted_tokens_total", "Guesses that were right.", double(s.accepted_draft_tokens));
  f.counter("vllm:num_preemptions_total", "Sequences put back for lack of KV pages.", double(s.preemptions));
  f.counter("metainfer:steps_total", "Steps of the model.", double(s.steps));
  f.counter("metainfer:computed_tokens_total", "Token rows run through the model, recomputation included.",
            double(s.computed_tokens));
  f.counter("metainfer:model_seconds_total", "Seconds inside the model.", s.step_seconds);
  f.counter("metainfer:host_seconds_total", "Seconds between steps: planning, sampling, text, delivery.",
            s.host_seconds);
  for (int i = 0; i < runtime::kFinishReasons; ++i)
    f.counter("vllm:request_success_total", "Sequences that ended, by reason.", double(s.finished[size_t(i)]),
              {{"finished_reason", runtime::finish_reason_name(runtime::FinishReason(i))}});
  {
    std::lock_guard lock(c.count_mutex);
    for (const auto& [key, n] : c.api_requests)
      f.counter("metainfer:api_requests_total", "API requests answered, by endpoint and status.", double(n),
                {{"endpoint", key.first}, {"status", std::to_string(key.second)}});
  }
  if (c.experts)
    for (const runtime::ExpertLoad::Route& r : c.experts->routes())
      for (int64_t e = 0; e < r.experts; ++e)
        f.counter("metainfer:expert_tokens_total", "Tokens that the router gave to an expert.",
                  double(c.experts->tokens(r, e)), {{"layer", std::to_string(r.layer)}, {"expert", std::to_string(e)}});
  add_fallbacks(f, c.fallbacks);
  if (const HttpCounters* h = c.http) add_http(f, *h);
  if (c.access_log)
    f.counter("metainfer:access_log_dropped_total", "Lines that the access log could not take.",
              double(c.access_log->dropped()));
  if (c.traffic)
    f.counter("metainfer:traffic_dropped_total", "Requests that --record-traffic could not take.",
              double(c.traffic->dropped()));
  f.gauge("metainfer:worker_restarts", "Workers that the watchdog replaced before this one.", double(c.restarts));
  f.gauge("metainfer:build_info", "Always 1; the version is a label.", 1, {{"version", version()}});
  f.gauge("process_start_time_seconds", "Start of the server since the epoch.", double(c.created));
  f.gauge("process_resident_memory_bytes", "Memory in use.", resident_bytes());
  f.counter("process_cpu_seconds_total", "Processor time used.", cpu_seconds());
  f.histogram("vllm:request_queue_time_seconds", "Arrival to first step.", s.queue);
  f.histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", s.ttft);
  f.histogram("vllm:time_per_output_token_seconds", "Between tokens of one sequence.", s.inter_token);
  f.histogram("vllm:e2e_request_latency_seconds", "Arrival to end.", s.e2e);
  f.histogram("metainfer:decode_step_seconds", "Inside the model, of steps that only continue answers.", s.decode_step);
  f.histogram("metainfer:step_gap_seconds", "Before such a step, since the step before it left the model.", s.step_gap);
  return f.text();
}

}  // namespace mi::server
