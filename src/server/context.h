#pragma once
// What every handler needs, shared and read-only while the server runs.

// clang-format off
#include <utility>  // Boost.Asio 1.74 uses std::exchange without including it
// clang-format on

#include <atomic>
#include <boost/asio/thread_pool.hpp>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/expert_load.h"
#include "runtime/loop.h"
#include "server/fallback.h"
#include "server/openai/request.h"
#include "server/reply/reply.h"
#include "text/constraint.h"
#include "text/model_text.h"

namespace mi::server {

class LineLog;
struct HttpCounters;

struct ServerContext {
  runtime::EngineLoop* loop = nullptr;
  text::ModelText text;
  std::shared_ptr<const text::ConstraintFactory> constraints;  // null without a tokenizer
  ReplyFormat format;                                          // how the model spells reasoning and calls
  std::vector<int32_t> shown_special;                          // its marks among the special tokens
  Json model_facts;                                            // for /v1/models
  SamplingDefaults defaults;
  std::vector<std::string> model_names;  // the first is the one that is listed
  int64_t created = 0;                   // seconds since the epoch
  int64_t bos_id = -1;
  double timeout_seconds = 0;  // of a request, from its arrival; 0: none
  int64_t longest_token = 1;  // bytes: text of n bytes has at least n / longest_token tokens
  std::atomic<bool> draining{false};
  boost::asio::thread_pool* workers = nullptr;  // templates, tokenizing, rendering
  // For /metrics; null until the server listens, or where there is none.
  std::atomic<const HttpCounters*> http{nullptr};
  const LineLog* access_log = nullptr;
  LineLog* traffic = nullptr;  // token ids of what was asked and answered
  std::shared_ptr<const runtime::ExpertLoad> experts;
  std::vector<Fallback> fallbacks;
  int restarts = 0;  // by the watchdog
  // API requests by endpoint and status, counted when their answer ends; for /metrics.
  std::mutex count_mutex;
  std::vector<std::pair<std::pair<std::string, int>, uint64_t>> api_requests;
  void count(const std::string& endpoint, int status);
  bool serves(const std::string& model) const;
};

}  // namespace mi::server
