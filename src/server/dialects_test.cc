// A model that says what a test tells it to, behind the real server: what a client of each dialect gets, streamed and
// whole, for the spellings of several templates.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>

#include "runtime/testing.h"
#include "server/http/listener.h"
#include "server/server.h"

namespace mi::server {
namespace {

using testing::HasSubstr;

// Whatever the prompt, the answer is the script and then the end token.
class ScriptedStepper : public runtime::Stepper {
 public:
  ScriptedStepper(int64_t vocab, std::vector<int32_t> script) : vocab_(vocab), script_(std::move(script)) {}
  int64_t vocab() const override { return vocab_; }
  int64_t kv_pages() const override { return 256; }
  int64_t max_tokens_per_step() const override { return 2048; }
  std::span<const float> run(const exec::Batch& b) override {
    logits_.clear();
    for (const exec::Chunk& c : b.chunks) {
      // The sequence that holds these pages began with a prompt of so many tokens (one chunk: the budget is large).
      int64_t& prompt = prompts_[c.pages[0]];
      if (c.start == 0) prompt = int64_t(c.tokens.size());
      for (int64_t i = c.logits_from; i < int64_t(c.tokens.size()); ++i) {
        const size_t at = size_t(std::max<int64_t>(0, c.start + i + 1 - prompt));
        const size_t row = logits_.size();
        logits_.resize(row + size_t(vocab_), 0.0f);
        logits_[row + size_t(at < script_.size() ? script_[at] : 0)] = 20.0f;
      }
    }
    return logits_;
  }

 private:
  int64_t vocab_;
  std::vector<int32_t> script_;
  std::map<int32_t, int64_t> prompts_;
  std::vector<float> logits_;
};

struct Answer {
  int status = 0;
  std::string body;
  Json json() const { return parse_json(body, "answer").value(); }
  // Of a stream: the data of each event.
  std::vector<Json> events() const {
    std::vector<Json> all;
    for (size_t at = body.find("data: "); at != std::string::npos; at = body.find("data: ", at + 1)) {
      const std::string data = body.substr(at + 6, body.find('\n', at) - at - 6);
      if (data != "[DONE]") all.push_back(parse_json(data, "event").value());
    }
    return all;
  }
};

// The printable ASCII characters, one token each, and marks that are special tokens.
class World {
 public:
  World(const std::string& template_marks, const std::vector<std::string>& specials, const std::string& said,
        const std::string& prompt_end = "", const std::function<void(ServeOptions*)>& set = {}) {
    std::vector<std::string> pieces;
    for (char c = ' '; c <= '~'; ++c) pieces.emplace_back(1, c);
    pieces.emplace_back("\n");
    tokenizer_ = runtime::testing::make_tokenizer(pieces, specials);
    text::ModelText t;
    t.tokenizer = tokenizer_;
    t.chat_source = "{# " + template_marks + " #}{% for m in messages %}{{ m.content }}{% endfor %}";
    if (!prompt_end.empty()) t.chat_source += "{{ '" + prompt_end + "' }}";
    t.chat = text::ChatTemplate::compile(t.chat_source, {}).value();
    const int64_t vocab = tokenizer_->vocab();
    loop_ = std::make_unique<runtime::EngineLoop>(
        std::make_unique<ScriptedStepper>(vocab, tokenizer_->encode(said, true).value()), tokenizer_,
        runtime::LoopOptions{.prefill_tokens = 2048, .prefill_tokens_beside_decodes = 2048, .eos_ids = {0}});
    ServeOptions o;
    o.port = 0;
    o.model_names = {"m"};
    o.vocab = vocab;
    o.eos_ids = {0};
    o.max_seq_len = 4096;
    if (set) set(&o);
    server_ = ApiServer::start(*loop_, std::move(t), o).value();
  }
  ~World() { server_->stop(0); }

  Answer post(const std::string& path, const Json& body) const { return ask("POST", path, dump_json(body)); }
  Answer get(const std::string& path) const { return ask("GET", path, ""); }

 private:
  Answer ask(const char* method, const std::string& path, const std::string& text) const {
    const std::string url = server_->url();
    const int s = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(uint16_t(std::stoi(url.substr(url.rfind(':') + 1))));
    ::inet_pton(AF_INET, "127.0.0.1", &to.sin_addr);
    MI_CHECK(::connect(s, reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0);
    // HTTP/1.0: the end of the connection is the end of the body.
    const std::string request =
        fmt::format("{} {} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{}", method, path,
                    text.size(), text);
    MI_CHECK(::send(s, request.data(), request.size(), 0) == ssize_t(request.size()));
    std::string all;
    char buffer[4096];
    for (ssize_t n; (n = ::recv(s, buffer, sizeof(buffer), 0)) > 0;) all.append(buffer, size_t(n));
    ::close(s);
    Answer a;
    a.status = std::stoi(all.substr(9, 3));
    a.body = all.substr(all.find("\r\n\r\n") + 4);
    return a;
  }

  std::shared_ptr<const text::Tokenizer> tokenizer_;
  std::unique_ptr<runtime::EngineLoop> loop_;
  std::unique_ptr<ApiServer> server_;
};

const Json kParameters =
    Json{{"type", "object"}, {"properties", {{"city", {{"type", "string"}}}, {"days", {{"type", "integer"}}}}}};

// What all dialects say of one answer, in one form: reasoning, content, calls as "name(arguments)".
struct Said {
  std::string reasoning, content, end;
  std::vector<std::string> calls;
  bool operator==(const Said&) const = default;
};
std::ostream& operator<<(std::ostream& o, const Said& s) {
  o << "{" << s.reasoning << "}{" << s.content << "}";
  for (const std::string& c : s.calls) o << c;
  return o << s.end;
}

Said chat_whole(const World& w, Json more = Json::object()) {
  Json body{{"model", "m"},
            {"temperature", 0},
            {"messages", {{{"role", "user"}, {"content", "x"}}}},
            {"tools",
             {{{"type", "function"}, {"function", {{"name", "weather"}, {"parameters", kParameters}}}},
              {{"type", "function"}, {"function", {{"name", "ping"}}}}}}};
  body.update(more);
  const Answer a = w.post("/v1/chat/completions", body);
  EXPECT_EQ(a.status, 200) << a.body;
  const Json choice = a.json()["choices"][0], m = choice["message"];
  Said s;
  s.reasoning = m.value("reasoning_content", "");
  s.content = m["content"].is_null() ? "" : m["content"].get<std::string>();
  s.end = choice["finish_reason"];
  if (m.contains("tool_calls"))
    for (const Json& c : m["tool_calls"])
      s.calls.push_back(c["function"]["name"].get<std::string>() + "(" + c["function"]["arguments"].get<std::string>() +
                        ")");
  return s;
}
Said chat_stream(const World& w, Json more = Json::object()) {
  Json body{{"model", "m"},
            {"temperature", 0},
            {"stream", true},
            {"messages", {{{"role", "user"}, {"content", "x"}}}},
            {"tools",
             {{{"type", "function"}, {"function", {{"name", "weather"}, {"parameters", kParameters}}}},
              {{"type", "function"}, {"function", {{"name", "ping"}}}}}}};
  body.update(more);
  Said s;
  for (const Json& e : w.post("/v1/chat/completions", body).events()) {
    const Json& choice = e["choices"][0];
    if (!choice["finish_reason"].is_null()) s.end = choice["finish_reason"];
    const Json& d = choice["delta"];
    s.reasoning += d.value("reasoning_content", "");
    s.content += d.value("content", "");
    if (!d.contains("tool_calls")) continue;
    const Json& c = d["tool_calls"][0];
    const size_t index = c["index"];
    if (c["function"].contains("name")) {
      EXPECT_EQ(index, s.calls.size());
      s.calls.push_back(c["function"]["name"].get<std::string>() + "(");
    }
    s.calls.at(index) += c["function"]["arguments"].get<std::string>();
  }
  for (std::string& c : s.calls) c += ")";
  return s;
}

std::string compact(const std::string& arguments) {
  auto j = parse_json(arguments, "a");
  return j.ok() ? dump_json(*j) : arguments;
}
// JSON of arguments without blanks, where it is whole: the dialects give it as text or as a value.
Said compacted(Said s) {
  for (std::string& c : s.calls) {
    const size_t open = c.find('(');
    c = c.substr(0, open + 1) + compact(c.substr(open + 1, c.size() - open - 2)) + ")";
  }
  return s;
}

Said message(const World& w, bool stream) {
  const Json body{{"model", "m"},
                  {"temperature", 0},
                  {"max_tokens", 900},
                  {"stream", stream},
                  {"messages", {{{"role", "user"}, {"content", "x"}}}},
                  {"tools",
                   {{{"name", "weather"}, {"input_schema", kParameters}},
                    {{"name", "ping"}, {"input_schema", {{"type", "object"}}}}}}};
  const Answer a = w.post("/v1/messages", body);
  EXPECT_EQ(a.status, 200) << a.body;
  Said s;
  if (!stream) {
    const Json m = a.json();
    s.end = m["stop_reason"];
    for (const Json& b : m["content"]) {
      if (b["type"] == "thinking") s.reasoning += b["thinking"].get<std::string>();
      if (b["type"] == "text") s.content += b["text"].get<std::string>();
      if (b["type"] == "tool_use") s.calls.push_back(b["name"].get<std::string>() + "(" + dump_json(b["input"]) + ")");
    }
    return s;
  }
  int open = -1, next = 0;
  for (const Json& e : a.events()) {
    const std::string type = e["type"];
    if (type == "content_block_start") {
      EXPECT_EQ(open, -1);
      open = e["index"];
      EXPECT_EQ(open, next++);
      if (e["content_block"]["type"] == "tool_use")
        s.calls.push_back(e["content_block"]["name"].get<std::string>() + "(");
    } else if (type == "content_block_delta") {
      EXPECT_EQ(e["index"], open);
      const Json& d = e["delta"];
      s.reasoning += d.value("thinking", "");
      s.content += d.value("text", "");
      if (d.contains("partial_json")) s.calls.back() += d["partial_json"].get<std::string>();
    } else if (type == "content_block_stop") {
      EXPECT_EQ(e["index"], open);
      open = -1;
    } else if (type == "message_delta") {
      s.end = e["delta"]["stop_reason"];
    }
  }
  EXPECT_EQ(open, -1);
  for (std::string& c : s.calls) c += ")";
  return compacted(s);
}

Said response(const World& w, bool stream) {
  const Json body{{"model", "m"},
                  {"temperature", 0},
                  {"stream", stream},
                  {"input", "x"},
                  {"tools",
                   {{{"type", "function"}, {"name", "weather"}, {"parameters", kParameters}},
                    {{"type", "function"}, {"name", "ping"}}}}};
  const Answer a = w.post("/v1/responses", body);
  EXPECT_EQ(a.status, 200) << a.body;
  Said s, streamed;
  const auto items = [](const Json& r) {
    Said of;
    of.end = r["status"];
    for (const Json& i : r["output"]) {
      if (i["type"] == "reasoning") of.reasoning += i["content"][0]["text"].get<std::string>();
      if (i["type"] == "message") of.content += i["content"][0]["text"].get<std::string>();
      if (i["type"] == "function_call")
        of.calls.push_back(i["name"].get<std::string>() + "(" + i["arguments"].get<std::string>() + ")");
    }
    return compacted(of);
  };
  if (!stream) return items(a.json());
  int64_t number = 0;
  for (const Json& e : a.events()) {
    EXPECT_EQ(e["sequence_number"], number++);
    const std::string type = e["type"];
    if (type == "response.output_item.added" && e["item"]["type"] == "function_call")
      streamed.calls.push_back(e["item"]["name"].get<std::string>() + "(");
    if (type == "response.output_text.delta") streamed.content += e["delta"].get<std::string>();
    if (type == "response.reasoning_text.delta") streamed.reasoning += e["delta"].get<std::string>();
    if (type == "response.function_call_arguments.delta") streamed.calls.back() += e["delta"].get<std::string>();
    if (type == "response.completed" || type == "response.incomplete") s = items(e["response"]);
  }
  for (std::string& c : streamed.calls) c += ")";
  streamed = compacted(streamed);
  streamed.end = s.end;
  EXPECT_EQ(streamed, s);  // the deltas are the whole
  return s;
}

void all_dialects(const World& w, Said expected) {
  const bool calls = !expected.calls.empty();
  expected.end = calls ? "tool_calls" : "stop";
  const Said whole = chat_whole(w);
  EXPECT_EQ(whole, expected);
  EXPECT_EQ(chat_stream(w), expected);
  Said e = compacted(expected);
  e.end = calls ? "tool_use" : "end_turn";
  EXPECT_EQ(message(w, false), e);
  EXPECT_EQ(message(w, true), e);
  e.end = "completed";
  EXPECT_EQ(response(w, false), e);
  EXPECT_EQ(response(w, true), e);
}

TEST(Dialects, HarmonyWhoseMarksAreSpecialTokens) {
  const std::vector<std::string> marks = {"<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>"};
  const World calls(
      "<|channel|> <|message|>", marks,
      "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
      "<|constrain|>json<|message|>{\"city\": \"Oslo\"}");
  all_dialects(calls, {"Look it up.", "", "", {"weather({\"city\": \"Oslo\"})"}});
  const World text(
      "<|channel|> <|message|>", marks,
      "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>It is 4 < 5.");
  all_dialects(text, {"Easy.", "It is 4 < 5.", "", {}});
}

TEST(Dialects, TwoTaggedCallsAfterReasoningThatThePromptOpened) {
  const World w("<think> </think> <tool_call> <function=x> <parameter=y>", {"<tool_call>", "</tool_call>"},
                "I must\ncall.\n</think>\n\nOne moment.\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo "
                "\"N\"\n</parameter>\n"
                "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=ping>\n</"
                "function>\n</tool_call>",
                "<think>");
  all_dialects(
      w, {"I must\ncall.", "One moment.\n", "", {"weather({\"city\": \"Oslo \\\"N\\\"\", \"days\": 3})", "ping({})"}});
  const Json single{{"parallel_tool_calls", false}};
  EXPECT_EQ(chat_whole(w, single).calls.size(), 1u);
  EXPECT_EQ(chat_stream(w, single), chat_whole(w, single));
  // Without tools the marks are text; reasoning is still taken off.
  const Said none = chat_whole(w, {{"tool_choice", "none"}});
  EXPECT_TRUE(none.calls.empty());
  EXPECT_EQ(none.reasoning, "I must\ncall.");
  EXPECT_THAT(none.content, HasSubstr("<function=weather>"));
}

TEST(Dialects, ACallThatIsCutOffIsABeginning) {
  const std::string said = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>";
  const World w("<tool_call> </tool_call>", {}, said);
  const std::string whole = chat_whole(w).calls.at(0);
  for (int n = 1; n < int(said.size()); ++n) {
    const Json more{{"max_tokens", n}};
    const Said s = chat_whole(w, more);
    EXPECT_EQ(chat_stream(w, more), s) << n;
    EXPECT_EQ(s.end, "length");
    if (s.calls.empty()) continue;
    EXPECT_EQ(whole.compare(0, s.calls[0].size() - 1, s.calls[0], 0, s.calls[0].size() - 1), 0) << n;
  }
}

TEST(Dialects, LogprobsAreOfEveryTokenWhateverItBecomes) {
  const std::string said = "<think>hm</think>Yes.";
  const World w("<think> </think>", {"<think>", "</think>"}, said);
  Json body{{"model", "m"}, {"logprobs", true}, {"messages", {{{"role", "user"}, {"content", "x"}}}}};
  const Json whole = w.post("/v1/chat/completions", body).json();
  EXPECT_EQ(whole["choices"][0]["logprobs"]["content"].size(), 8u);  // two marks and six letters
  EXPECT_EQ(whole["usage"]["completion_tokens_details"]["reasoning_tokens"],
            3);  // two letters and the mark that ends it
  body["stream"] = true;
  std::string tokens;
  for (const Json& e : w.post("/v1/chat/completions", body).events())
    if (!e["choices"][0]["logprobs"].is_null())
      for (const Json& t : e["choices"][0]["logprobs"]["content"]) tokens += t["token"].get<std::string>();
  EXPECT_EQ(tokens, said);
}

TEST(Dialects, AForcedAnswerClosesReasoningThatThePromptOpened) {
  const World w("<think> </think>", {"<think>", "</think>"}, "yes", "<think>");
  const Json a = w.post("/v1/chat/completions", {{"model", "m"},
                                                 {"messages", {{{"role", "user"}, {"content", "x"}}}},
                                                 {"response_format", {{"type", "regex"}, {"regex", "yes|no"}}}})
                     .json();
  EXPECT_EQ(a["choices"][0]["message"]["content"], "yes");
  EXPECT_EQ(a["usage"]["prompt_tokens"], 1 + 1 + 1 + 1 + 2);  // x, <think>, a line end, </think>, two more
}

// Beyond the limits of its parser from the second letter on: legal, as far as can be seen before.
std::string grammar_that_fails() {
  std::string ways, rules;
  for (int i = 0; i < 3000; ++i) {
    ways += (i ? " | r" : "r") + std::to_string(i);
    rules += "r" + std::to_string(i) + ": \"b\" \"" + std::to_string(i) + "\"\n";
  }
  return "start: \"a\" rest\nrest: " + ways + "\n" + rules;
}

// The same as a JSON schema, for the dialects that have no grammars.
Json schema_that_fails() {
  Json ways = Json::array();
  for (int i = 0; i < 3000; ++i)
    ways.push_back(
        {{"type", "object"},
         {"properties", {{"b", {{"const", "c" + std::to_string(i)}}}, {"n" + std::to_string(i), {{"type", "null"}}}}},
         {"required", {"b"}},
         {"additionalProperties", false}});
  return {{"type", "object"}, {"properties", {{"a", {{"anyOf", ways}}}}}, {"required", {"a"}}};
}

TEST(Dialects, AGrammarThatFailsWhileDecodingIsTheRequestsFault) {
  const World w("plain", {}, "ab1");
  const Json format{{"type", "grammar"}, {"grammar", grammar_that_fails()}};
  Json chat{{"model", "m"}, {"messages", {{{"role", "user"}, {"content", "x"}}}}, {"response_format", format}};
  Json completion{{"model", "m"}, {"prompt", "x"}, {"response_format", format}};
  for (auto& [path, body] :
       {std::pair<std::string, Json&>{"/v1/chat/completions", chat}, {"/v1/completions", completion}}) {
    const Answer whole = w.post(path, body);
    EXPECT_EQ(whole.status, 400) << whole.body;
    const Json error = whole.json()["error"];
    EXPECT_EQ(error["param"], "response_format");
    EXPECT_EQ(error["type"], "invalid_request_error");
    EXPECT_THAT(error["message"].get<std::string>(), HasSubstr("response_format: "));
    body["stream"] = true;
    const Answer stream = w.post(path, body);
    EXPECT_EQ(stream.status, 200);
    EXPECT_EQ(stream.events().back()["error"], error);
    EXPECT_TRUE(stream.body.ends_with("data: [DONE]\n\n"));
  }
  const std::string metrics = w.get("/metrics").body;
  for (const char* endpoint : {"chat_completions", "completions"}) {
    const std::string name = fmt::format("metainfer:api_requests_total{{endpoint=\"{}\",status=", endpoint);
    EXPECT_THAT(metrics, HasSubstr(name + "\"400\",model_name=\"m\"} 2"));
    EXPECT_THAT(metrics, testing::Not(HasSubstr(name + "\"500\"")));
    EXPECT_THAT(metrics, testing::Not(HasSubstr(name + "\"200\"")));
  }
}

TEST(Dialects, AFailedGrammarNamesTheFieldOfItsDialect) {
  const World w("plain", {}, R"({"a": {"b": "c1"}})");
  const Json schema = schema_that_fails();
  Answer a =
      w.post("/v1/responses", {{"model", "m"},
                               {"input", "x"},
                               {"text", {{"format", {{"type", "json_schema"}, {"name", "n"}, {"schema", schema}}}}}});
  EXPECT_EQ(a.status, 400) << a.body;
  EXPECT_EQ(a.json()["error"]["param"], "text");
  a = w.post("/v1/messages", {{"model", "m"},
                              {"max_tokens", 50},
                              {"messages", {{{"role", "user"}, {"content", "x"}}}},
                              {"output_config", {{"format", {{"type", "json_schema"}, {"schema", schema}}}}}});
  EXPECT_EQ(a.status, 400) << a.body;
  EXPECT_THAT(a.json()["error"]["message"].get<std::string>(), HasSubstr("output_config: "));
  a = w.post("/v1/chat/completions",
             {{"model", "m"},
              {"messages", {{{"role", "user"}, {"content", "x"}}}},
              {"tool_choice", "required"},
              {"tools", {{{"type", "function"}, {"function", {{"name", "f"}, {"parameters", schema}}}}}}});
  EXPECT_EQ(a.status, 400) << a.body;
  EXPECT_EQ(a.json()["error"]["param"], "tools");
}

TEST(Readiness, NobodyHearsOfItBeforeTheServerIsSetUp) {
  const std::string path = fmt::format("{}mi-ready-{}", testing::TempDir(), ::getpid());
  const int notified = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK, 0);
  sockaddr_un at{};
  at.sun_family = AF_UNIX;
  ASSERT_LT(path.size(), sizeof(at.sun_path));
  std::memcpy(at.sun_path, path.data(), path.size());
  ASSERT_EQ(::bind(notified, reinterpret_cast<sockaddr*>(&at), sizeof(at)), 0);
  ::setenv("NOTIFY_SOCKET", path.c_str(), 1);
  char message[64];
  int called = 0, port = 0;
  const World w("plain", {}, "x", "", [&](ServeOptions* o) {
    o->listener = bind_listener("127.0.0.1", 0).value();
    port = bound_address(o->listener).port;
    o->before_ready = [&] {
      ++called;
      EXPECT_LT(::recv(notified, message, sizeof(message), 0), 0);
      const int client = ::socket(AF_INET, SOCK_STREAM, 0);
      sockaddr_in to{};
      to.sin_family = AF_INET;
      to.sin_port = htons(uint16_t(port));
      to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      EXPECT_NE(::connect(client, reinterpret_cast<sockaddr*>(&to), sizeof(to)), 0);
      ::close(client);
    };
  });
  EXPECT_EQ(called, 1);
  ASSERT_EQ(::recv(notified, message, sizeof(message), 0), ssize_t(std::strlen("READY=1")));
  EXPECT_EQ(std::string(message, std::strlen("READY=1")), "READY=1");
  EXPECT_EQ(w.get("/ready").status, 200);
  ::close(notified);
  ::unlink(path.c_str());
}

TEST(Dialects, EmbeddingsOfAModelWithoutHiddenStatesAreRefused) {
  const World w("plain", {}, "x");
  const Answer a = w.post("/v1/embeddings", {{"model", "m"}, {"input", "x"}});
  EXPECT_EQ(a.status, 400);
  EXPECT_THAT(a.body, HasSubstr("makes no embeddings"));
}

}  // namespace
}  // namespace mi::server
