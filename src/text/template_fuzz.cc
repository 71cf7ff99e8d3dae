// libFuzzer: chat templates that nobody wrote, given conversations that nobody had. An input is a template, its
// messages, its tools and further variables, with a record separator (0x1e) between them; what is no JSON becomes the
// text of one message. -timeout and -rss_limit_mb hold the renderer to its limits.
//
// The renderer is Rust, which is not instrumented here: what it answers stands in for the coverage (kCounters), and the
// mutator writes Jinja more often than bytes do by chance.
#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/json.h"
#include "base/utf8.h"
#include "text/chat_template.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace {

constexpr size_t kCounters = 4096;
__attribute__((section("__libfuzzer_extra_counters"))) std::array<uint8_t, kCounters> counters;

constexpr char kSeparator = '\x1e';

// Answers that differ in numbers alone are one.
void count(std::string_view kind, std::string_view answer) {
  uint32_t hash = 2166136261u;
  const auto add = [&](char c) { hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u; };
  for (char c : kind) add(c);
  for (char c : answer.substr(0, 200))
    if (c < '0' || c > '9') add(c);
  counters[hash % kCounters] = 1;
}

std::vector<std::string> parts_of(std::string_view input) {
  std::vector<std::string> parts(1);
  for (char c : input) {
    if (c == kSeparator && parts.size() < 4)
      parts.emplace_back();
    else
      parts.back() += c;
  }
  parts.resize(4);
  return parts;
}

bool is_json(const std::string& text, bool object) {
  mi::JsonLimits limits;
  limits.max_depth = 64;  // what the server reads
  const auto parsed = mi::parse_json(text, "x", limits);
  return parsed.ok() && (object ? parsed->is_object() : parsed->is_array());
}

const std::vector<std::string>& words() {
  static const std::vector<std::string> all = {
      "{{ ",
      " }}",
      "{% ",
      " %}",
      "{%- ",
      " -%}",
      "{# ",
      " #}",
      "{% for m in messages %}",
      "{% endfor %}",
      "{% if ",
      "{% elif ",
      "{% else %}",
      "{% endif %}",
      "{% set x = ",
      "{% set ns = namespace(a=",
      "{% set ns.a = ",
      "{% macro f(a, b=1) %}",
      "{% endmacro %}",
      "{{ f(",
      "{% call f(1) %}",
      "{% endcall %}",
      "{{ caller() }}",
      "{% filter upper %}",
      "{% endfilter %}",
      "{% with a = 1 %}",
      "{% endwith %}",
      "{% generation %}",
      "{% endgeneration %}",
      "{% break %}",
      "{% continue %}",
      "{% raw %}",
      "{% endraw %}",
      "{% set y %}",
      "{% endset %}",
      "m.content",
      "m['role']",
      "messages",
      "messages[0]",
      "messages[::-1]",
      "messages[1:]",
      "tools",
      "loop.index0",
      "loop.last",
      "loop.previtem",
      "loop.cycle(1, 2)",
      "range(",
      "range(30)",
      "x",
      "ns.a",
      "'text'",
      "\"\\u00e9\"",
      "1",
      "-1",
      "1.5e308",
      "9223372036854775807",
      "true",
      "none",
      "[1, 'a']",
      "{'k': 1}",
      "(1, 2)",
      " + ",
      " ~ ",
      " * ",
      " ** ",
      " // ",
      " % ",
      " in ",
      " not in ",
      " is defined",
      " is mapping",
      " is string",
      " and ",
      " or ",
      " not ",
      " == ",
      " < ",
      " if x else y",
      "|tojson",
      "|tojson(indent=2)",
      "|trim",
      "|replace('a', 'b')",
      "|join(', ')",
      "|map(attribute='role')",
      "|selectattr('role', 'equalto', 'user')",
      "|list",
      "|length",
      "|upper",
      "|title",
      "|items",
      "|first",
      "|last",
      "|default('d')",
      "|string",
      "|int",
      "|round",
      "|indent(4)",
      "|dictsort",
      "|groupby('role')",
      "|batch(2)",
      "|slice(2)",
      "|sort",
      "|unique",
      "|reverse",
      "|min",
      "|sum",
      "|wordcount",
      "|format(1)",
      "|escape",
      "|safe",
      ".split('a')",
      ".strip()",
      ".startswith('a')",
      ".items()",
      ".get('k')",
      ".upper()",
      ".format(1)",
      ".join(['a', 'b'])",
      ".replace('a', 'b', 1)",
      ".rstrip('x')",
      ".find('a')",
      ".count('a')",
      ".splitlines()",
      ".partition('a')",
      ".removeprefix('a')",
      "raise_exception('no')",
      "strftime_now('%Y-%m-%d')",
      "strftime_now(",
      "dict(a=1)",
      "cycler(1)",
      "joiner(',')",
      "bos_token",
      "eos_token",
      "add_generation_prompt",
      "\n",
      "    ",
      std::string(1, kSeparator),
      R"([{"role": "user", "content": "x"}])",
      R"([{"role": "assistant", "content": "<think>a</think>b", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}])",
      R"({"enable_thinking": false})",
      "\xef\xb7\x90",
      "\xf0\x9f\x98\x80",
      "<|im_start|>"};
  return all;
}

}  // namespace

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned int seed) {
  if (seed % 3 == 0) return LLVMFuzzerMutate(data, size, max_size);
  std::string text(reinterpret_cast<const char*>(data), size);
  const auto draw = [&](size_t below) {
    seed = seed * 1664525u + 1013904223u;
    return below == 0 ? size_t(0) : size_t(seed >> 8) % below;
  };
  for (size_t n = 1 + draw(4); n > 0; --n) {
    const std::string& word = words()[draw(words().size())];
    const size_t at = draw(text.size() + 1);
    const size_t gone = draw(2) ? std::min(draw(12), text.size() - at) : 0;
    text.replace(at, gone, word);
  }
  text.resize(std::min(text.size(), max_size));
  std::copy(text.begin(), text.end(), data);
  return text.size();
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  auto [source, messages, tools, extra] = [&] {
    auto p = parts_of({reinterpret_cast<const char*>(data), size});
    return std::array{std::move(p[0]), std::move(p[1]), std::move(p[2]), std::move(p[3])};
  }();
  if (!is_json(messages, false))
    messages = mi::dump_json(mi::Json::array({{{"role", "user"}, {"content", mi::clean_utf8(messages)}}}));
  if (!is_json(tools, false)) tools.clear();
  if (!is_json(extra, true)) extra.clear();
  const auto compiled = mi::text::ChatTemplate::compile(source, {"<s>", "</s>", "", ""});
  if (!compiled.ok()) {
    MI_CHECK(!compiled.error().message().empty());
    count("compile", compiled.error().message());
    return 0;
  }
  const auto r = (*compiled)->render(messages, tools, extra, size % 2 == 0);
  if (!r.ok()) {
    MI_CHECK(!r.error().message().empty());
    // A panic's message begins so; what a template raises may contain anything.
    MI_CHECK(!r.error().message().starts_with("internal error"), "{}", r.error().message());
    count("render", r.error().message());
    return 0;
  }
  MI_CHECK(mi::clean_utf8(r->text) == r->text, "the text is not UTF-8");
  size_t end = 0;
  for (const auto& range : r->user) {
    MI_CHECK(size_t(range.begin) >= end && range.begin <= range.end && size_t(range.end) <= r->text.size(),
             "the user's text at {} to {}, after {}, of {}", range.begin, range.end, end, r->text.size());
    end = size_t(range.end);
    for (size_t at : {size_t(range.begin), end})
      MI_CHECK(at == r->text.size() || (static_cast<unsigned char>(r->text[at]) & 0xc0) != 0x80,
               "the user's text ends within a character, at {}", at);
  }
  count("text", r->text);
  return 0;
}
