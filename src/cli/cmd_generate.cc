#include <fmt/format.h>

#include <cstdio>
#include <iostream>

#include "base/in_file.h"
#include "base/json.h"
#include "base/util.h"
#include "cli/command.h"
#include "runtime/generate.h"
#include "tools/session.h"

namespace mi::cli {
namespace {

struct Flags {
  EngineFlags engine;
  std::string prompt, chat, system, messages;
  int64_t max_tokens = 256, seed = -1, top_k = 0;
  double temperature = 0, top_p = 1, min_p = 0, repetition = 1, presence = 0, frequency = 0;
  std::vector<std::string> stop;
  bool json = false, stats = false;
};

// As a chat template takes them; "": the prompt is raw text.
Result<std::string> messages_of(const Flags& f) {
  if (!f.prompt.empty()) return std::string();
  if (!f.messages.empty()) return read_file(f.messages);
  Json m = Json::array();
  if (!f.system.empty()) m.push_back({{"role", "system"}, {"content", f.system}});
  m.push_back({{"role", "user"}, {"content", f.chat}});
  return dump_json(m);
}

Result<std::vector<int32_t>> prompt_ids(const Flags& f, const std::string& messages, const tools::Session& s) {
  if (!s.text.tokenizer)
    return bad_input("{}: this engine has no tokenizer: export the model with its tokenizer.json", f.engine.engine);
  if (!f.prompt.empty()) return s.text.tokenizer->encode(f.prompt, true);
  if (!s.text.chat) return bad_input("{}: this engine has no chat template; use --prompt", f.engine.engine);
  Result<text::Rendered> rendered = s.text.chat->render(messages, "", "", true);
  if (!f.messages.empty()) rendered = in_file(std::move(rendered), f.messages);
  MI_TRY(const text::Rendered r, std::move(rendered));
  return s.text.tokenizer->encode_mixed(r.text, r.user);
}

Result<int> run(const Flags& f) {
  if (int(!f.prompt.empty()) + int(!f.chat.empty()) + int(!f.messages.empty()) != 1)
    return fail(ErrorCode::kUsage, "give exactly one of --prompt, --chat, --messages");
  runtime::Request r;
  r.max_tokens = f.max_tokens;
  r.stop = f.stop;
  r.sampling.temperature = f.temperature;
  r.sampling.top_k = f.top_k;
  r.sampling.top_p = f.top_p;
  r.sampling.min_p = f.min_p;
  r.sampling.repetition_penalty = f.repetition;
  r.sampling.presence_penalty = f.presence;
  r.sampling.frequency_penalty = f.frequency;
  if (f.seed >= 0) r.sampling.seed = uint64_t(f.seed);
  // What is wrong with flags and files shows before the model is loaded.
  if (const runtime::Admission a = runtime::check_sampling(r.sampling, INT32_MAX); !a.ok())
    return fail(ErrorCode::kUsage, "{}", a.message);
  MI_TRY(const std::string messages, messages_of(f));
  tools::SessionOptions so = session_options(f.engine);
  so.max_batch_size = 1;
  MI_TRY(const tools::Session s, tools::open_session(so));
  MI_TRY(r.prompt, prompt_ids(f, messages, s));
  const auto loop = s.make_loop();
  std::vector<runtime::Request> one;
  one.push_back(std::move(r));
  const auto print = [&](size_t, const runtime::Event& e) {
    if (f.json) return;
    if (const auto* t = std::get_if<runtime::TokenEvent>(&e)) std::fputs(t->text.c_str(), stdout);
    if (const auto* end = std::get_if<runtime::FinishEvent>(&e)) std::fputs(end->text.c_str(), stdout);
    std::fflush(stdout);
  };
  MI_TRY(const std::vector<runtime::Completion> done, runtime::generate(*loop, std::move(one), print));
  const runtime::Completion& c = done.front();
  if (c.finish.reason == runtime::FinishReason::kInvalid) return fail(ErrorCode::kUsage, "{}", c.finish.message);
  if (c.finish.reason == runtime::FinishReason::kError) return fail(ErrorCode::kEnvironment, "{}", c.finish.message);
  const double after_first = c.finish.total_seconds - c.finish.ttft_seconds;
  const double speed =
      c.finish.completion_tokens > 1 && after_first > 0 ? double(c.finish.completion_tokens - 1) / after_first : 0;
  if (f.json) {
    fmt::print("{}\n", dump_json(Json{{"text", c.text},
                                      {"tokens", c.tokens},
                                      {"finish_reason", runtime::finish_reason_name(c.finish.reason)},
                                      {"prompt_tokens", c.finish.prompt_tokens},
                                      {"completion_tokens", c.finish.completion_tokens},
                                      {"ttft_s", c.finish.ttft_seconds},
                                      {"tok_s", speed}}));
  } else {
    std::fputs("\n", stdout);
    if (f.stats)
      fmt::print(stderr, "{} prompt tokens, {} generated ({}), first token {}, {:.1f} tok/s\n", c.finish.prompt_tokens,
                 c.finish.completion_tokens, runtime::finish_reason_name(c.finish.reason),
                 human_seconds(c.finish.ttft_seconds), speed);
    if (const auto stream = s.engine->stream_stats(); f.stats && stream) fmt::print(stderr, "{}\n", tools::stream_text(*stream));
  }
  return 0;
}

}  // namespace

Command add_generate(CLI::App& parent) {
  auto f = std::make_shared<Flags>();
  CLI::App* app = parent.add_subcommand("generate", "answer one prompt on the terminal");
  add_engine_flags(*app, &f->engine);
  app->add_option("--prompt", f->prompt, "raw text to continue; special tokens in it count");
  CLI::Option* const chat = app->add_option("--chat", f->chat, "one user message, through the model's chat template");
  app->add_option("--system", f->system, "system message for --chat")->needs(chat);
  app->add_option("--messages", f->messages, "file with a JSON array of messages");
  app->add_option("--max-tokens", f->max_tokens, "most tokens to generate")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  app->add_option("--temperature", f->temperature, "0: greedy")->capture_default_str();
  app->add_option("--top-k", f->top_k, "0: off")->capture_default_str();
  app->add_option("--top-p", f->top_p, "1: off")->capture_default_str();
  app->add_option("--min-p", f->min_p, "0: off")->capture_default_str();
  app->add_option("--seed", f->seed, "the same seed gives the same text")->check(CLI::NonNegativeNumber);
  app->add_option("--repetition-penalty", f->repetition, "1: off")->capture_default_str();
  app->add_option("--presence-penalty", f->presence, "0: off")->capture_default_str();
  app->add_option("--frequency-penalty", f->frequency, "0: off")->capture_default_str();
  app->add_option("--stop", f->stop, "end before this text; may be repeated");
  app->add_flag("--stats", f->stats, "print counts and speed afterwards");
  app->add_flag("--json", f->json, "print one JSON object instead of streaming");
  app->footer(
      "Examples:\n"
      "  metainfer generate --engine mini-m3-engine --chat \"What is 23 + 45?\"\n"
      "  metainfer generate --engine mini-m3-engine --prompt \"Once upon a time\" --temperature 0.8 --seed 1 --stats");
  return {app, [f]() { return run(*f); }};
}

}  // namespace mi::cli
