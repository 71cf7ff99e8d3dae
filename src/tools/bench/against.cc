#include "tools/bench/against.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/json.h"
#include "tools/stats.h"

extern char** environ;

namespace mi::tools {
namespace {

// Runs argv to its end and returns what it wrote to stdout; its stderr is ours.
Result<std::string> run_program(const std::vector<std::string>& argv) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0)
    return fail(ErrorCode::kEnvironment, "no pipe to run {} with: {}", argv[0], std::strerror(errno));
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  // This process waits for signals in a thread and blocks them elsewhere: the child must be able to get them.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  std::vector<char*> args;
  for (const std::string& a : argv) args.push_back(const_cast<char*>(a.c_str()));
  args.push_back(nullptr);
  pid_t pid = 0;
  const int error = posix_spawn(&pid, argv[0].c_str(), &actions, &attributes, args.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  close(ends[1]);
  std::string text;
  if (error == 0) {
    char part[4096];
    for (ssize_t n; (n = read(ends[0], part, sizeof part)) != 0;) {
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) break;
      text.append(part, size_t(n));
    }
  }
  close(ends[0]);
  if (error != 0) return fail(ErrorCode::kEnvironment, "{} cannot be run: {}", argv[0], std::strerror(error));
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFSIGNALED(status)) return fail(ErrorCode::kEnvironment, "{} was ended by signal {}", argv[0], WTERMSIG(status));
  if (WEXITSTATUS(status) != 0)
    return fail(ErrorCode::kEnvironment, "{} ended with exit code {}; its message is above", argv[0],
                WEXITSTATUS(status));
  return text;
}

void add_round(const std::vector<BenchRow>& round, std::vector<BenchRow>* all) {
  if (all->empty())
    for (const BenchRow& r : round) all->push_back({r.metric, r.n, {}});
  for (size_t i = 0; i < round.size(); ++i) (*all)[i].rounds.push_back(round[i].rounds[0]);
}

}  // namespace

Result<ChildRun> parse_bench_output(std::string_view text, const BenchCases& cases, const std::string& what) {
  ChildRun run;
  std::vector<BenchRow> found;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.empty() || line[0] != '{') continue;
    MI_TRY(const Json j, parse_json(line, what));
    if (j.contains("version")) {
      MI_TRY(run.version, json_get<std::string>(j, "version", what));
      MI_TRY(run.load_s, json_get_or<double>(j, "load_s", 0, what));
    }
    if (j.contains("memory") && j["memory"].is_object() && j["memory"].contains("peak_bytes") &&
        !j["memory"]["peak_bytes"].is_null()) {
      MI_TRY(run.peak_bytes, json_get<int64_t>(j["memory"], "peak_bytes", what));
    }
    if (!j.contains("metric")) continue;
    BenchRow row;
    BenchRound r;
    MI_TRY(row.metric, json_get<std::string>(j, "metric", what));
    MI_TRY(row.n, json_get<int64_t>(j, "n", what));
    MI_TRY(r.tok_s, json_get<double>(j, "tok_s", what));
    MI_TRY(r.ttft_s, json_get<double>(j, "ttft_s", what));
    MI_TRY(r.total_tok_s, json_get_or<double>(j, "total_tok_s", 0, what));
    if (!(r.tok_s > 0) || !(r.ttft_s > 0))
      return bad_input("{}: {} {}: a speed or time that is not positive", what, row.metric, row.n);
    row.rounds.push_back(r);
    found.push_back(std::move(row));
  }
  const std::pair<const char*, const std::vector<int64_t>*> lists[] = {
      {"prefill", &cases.prefill}, {"decode", &cases.decode}, {"batch", &cases.batch}};
  for (const auto& [metric, list] : lists)
    for (int64_t n : *list) {
      const auto row = std::find_if(found.begin(), found.end(), [n, name = metric](const BenchRow& r) {
        return r.metric == name && r.n == n;
      });
      if (row == found.end()) return bad_input("{} printed no figure for --{} {}", what, metric, n);
      run.rows.push_back(*row);
    }
  return run;
}

std::vector<std::string> session_flags(const SessionOptions& o) {
  const SessionOptions usual;
  std::vector<std::string> flags{"--threads", std::to_string(o.threads)};
  const auto name = [&](const char* flag, const std::string& value, const std::string& known) {
    if (value != known) flags.insert(flags.end(), {flag, value});
  };
  name("--kv-type", o.kv_type, usual.kv_type);
  name("--attention-order", o.attention_order, usual.attention_order);
  name("--weights", o.weights, usual.weights);
  if (!o.memory_pool) flags.insert(flags.end(), {"--memory-pool", "false"});
  if (!o.numa) flags.push_back("--no-numa");
  if (!o.verify_checksums) flags.push_back("--no-checksums");
  return flags;
}

Result<AgainstResult> run_against(const AgainstOptions& o, const std::function<void(int)>& after_round) {
  const auto round = [&](const Path& program, const Path& engine) -> Result<ChildRun> {
    // The limits are measured once, by this process.
    std::vector<std::string> argv{program.string(), "bench",    "--engine", engine.string(),
                                  "--json",         "--rounds", "1",        "--no-probe"};
    for (std::string& flag : session_flags(o.session)) argv.push_back(std::move(flag));
    // A list that is left out would be the default: every list is named, an empty one as such.
    argv.insert(argv.end(), {"--prefill", fmt::format("{}", fmt::join(o.cases.prefill, ",")), "--decode",
                             fmt::format("{}", fmt::join(o.cases.decode, ",")), "--batch",
                             fmt::format("{}", fmt::join(o.cases.batch, ","))});
    MI_TRY(const std::string text, run_program(argv));
    return parse_bench_output(text, o.cases, program.string());
  };
  AgainstResult all;
  std::vector<double> loads;
  for (int r = 0; r < o.rounds; ++r) {
    for (int half = 0; half < 2; ++half) {
      const bool ours = (half == 0) == (r % 2 == 0);  // who goes first changes every round
      MI_TRY(const ChildRun run, ours ? round(o.ours, o.session.engine) : round(o.theirs, o.their_engine));
      add_round(run.rows, ours ? &all.ours : &all.theirs);
      (ours ? all.our_version : all.their_version) = run.version;
      if (!ours) continue;
      loads.push_back(run.load_s);
      if (run.peak_bytes) all.peak_bytes = std::max(all.peak_bytes.value_or(0), *run.peak_bytes);
    }
    if (after_round) after_round(r + 1);
  }
  all.load_s = median(loads);
  return all;
}

}  // namespace mi::tools
