#include "runtime/generate.h"

#include <condition_variable>
#include <mutex>

namespace mi::runtime {

namespace {

// What the sinks write and the caller waits for.
struct Collector {
  std::mutex mu;
  std::condition_variable changed;
  size_t finished = 0;
};

void collect(Event& event, bool scores, Completion* out) {
  if (auto* p = std::get_if<PromptEvent>(&event)) {
    out->prompt = std::move(p->prompt);
  } else if (auto* v = std::get_if<EmbeddingEvent>(&event)) {
    out->embedding = std::move(v->values);
  } else if (auto* t = std::get_if<TokenEvent>(&event)) {
    out->tokens.push_back(t->token);
    out->text += t->text;
    if (scores) out->scores.push_back({t->token, t->logprob, std::move(t->top)});
  } else {
    out->finish = std::move(std::get<FinishEvent>(event));
    out->text += out->finish.text;
  }
}

}  // namespace

Result<std::vector<Completion>> generate(EngineLoop& loop, std::vector<Request> requests,
                                         const std::function<void(size_t index, const Event&)>& on_event) {
  std::vector<Completion> out(requests.size());
  std::vector<uint64_t> ids;
  Collector state;
  auto wait_for = [&state](size_t finished) {
    std::unique_lock lock(state.mu);
    state.changed.wait(lock, [&] { return state.finished >= finished; });
  };

  for (size_t i = 0; i < requests.size(); ++i) {
    const bool scores = requests[i].sampling.logprobs >= 0;
    auto sink = [&state, &on_event, completion = &out[i], i, scores](Event&& e) {
      if (on_event) on_event(i, e);
      const bool last = std::holds_alternative<FinishEvent>(e);
      collect(e, scores, completion);
      if (!last) return;
      std::lock_guard lock(state.mu);  // held through notify: the waiter may destroy `state` right after
      ++state.finished;
      state.changed.notify_one();
    };
    Admission a = loop.submit(std::move(requests[i]), sink);
    if (!a.ok()) {
      for (uint64_t id : ids) loop.cancel(id);
      wait_for(ids.size());
      return fail(ErrorCode::kUsage, "{}{}", requests.size() > 1 ? fmt::format("prompt {}: ", i) : "", a.message);
    }
    ids.push_back(a.id);
  }
  wait_for(requests.size());
  return out;
}

}  // namespace mi::runtime
