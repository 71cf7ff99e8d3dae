#include "tools/bench/history.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>

#include "base/counted.h"
#include "base/html.h"
#include "base/util.h"
#include "tools/plot.h"
#include "tools/stats.h"

namespace mi::tools {
namespace {

std::string row_name(const BenchRow& r) { return fmt::format("{} {}", r.metric, r.n); }

// Runs that may be compared with each other have the same.
std::string series_name(const BenchRecord& r) {
  return fmt::format("{}, {}, {}; {} ({}), KV {}", r.machine.cpu, counted(r.machine.threads, "thread"), r.machine.isa,
                     r.engine.name, r.engine.precision, r.settings.kv_type);
}

std::string run_title(const BenchRecord& r) { return fmt::format("{}, {}", r.when, r.version); }

// One plot of a figure: value(record) is its rounds, empty where a record has none.
template <typename Values>
std::string figure_plot(const std::vector<BenchRecord>& all, const std::string& label, Values values) {
  std::vector<PlotLine> lines;
  for (size_t i = 0; i < all.size(); ++i) {
    const std::vector<double> v = values(all[i]);
    if (v.empty()) continue;
    const std::string name = series_name(all[i]);
    auto line = std::find_if(lines.begin(), lines.end(), [&](const PlotLine& l) { return l.name == name; });
    if (line == lines.end()) line = lines.insert(lines.end(), {name, {}});
    const auto [low, high] = std::minmax_element(v.begin(), v.end());
    line->points.push_back(
        {double(i), median(v), *low, *high,
         fmt::format("{}: {:.4g} [{:.4g} - {:.4g}], {}; {}", label, median(v), *low, *high, run_title(all[i]), name)});
  }
  if (lines.empty()) return {};
  return fmt::format("<h2>{}</h2>\n{}", html::escape(label), line_plot(lines, double(all.size() - 1), label));
}

// Whether the text behind the last end of a line is the beginning of a record, which a killed run left.
bool is_cut_record(std::string_view tail) {
  const std::string begin = record_beginning();
  const size_t n = std::min(tail.size(), begin.size());
  return n > 0 && tail.substr(0, n) == begin.substr(0, n) && !parse_json(tail, "tail").ok();
}

// Owns the open file, which is locked against other runs that append to it.
class Appender {
 public:
  explicit Appender(const Path& p) : path_(p) {}
  ~Appender() {
    if (fd_ >= 0) close(fd_);
  }
  Appender(const Appender&) = delete;

  Status append(const std::string& line) {
    fd_ = open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (fd_ < 0) return cannot("opened to append to");
    (void)!flock(fd_, LOCK_EX);  // where there are no locks, runs at the same time are on their own
    // A line that an earlier run could not finish is given up, a whole one without an end gets it.
    MI_TRY(const std::string text, read_file(path_));
    const size_t last = text.rfind('\n') + 1;  // npos + 1: 0
    const bool cut = is_cut_record(std::string_view(text).substr(last));
    const auto keep = off_t(cut ? last : text.size());
    if (cut && ftruncate(fd_, keep) != 0) return cannot("shortened by a line that was cut");
    const std::string all = (cut || last == text.size() ? "" : "\n") + line + "\n";
    errno = ENOSPC;  // of a write that falls short
    if (write(fd_, all.data(), all.size()) == ssize_t(all.size()) && fsync(fd_) == 0) return {};
    const Error failed = cannot("appended to");
    (void)!ftruncate(fd_, keep);
    return failed;
  }

 private:
  Error cannot(const char* what) const {
    return fail(ErrorCode::kEnvironment, "{}: cannot be {}: {}", path_.string(), what, std::strerror(errno));
  }
  const Path path_;
  int fd_ = -1;
};

}  // namespace

Result<std::vector<BenchRecord>> read_history(const Path& p) {
  MI_TRY(const std::string text, read_file(p));
  std::vector<BenchRecord> all;
  std::string_view rest = text;
  for (int64_t number = 1; !rest.empty(); ++number) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    if (end == rest.size() && is_cut_record(rest)) break;
    const std::string_view line = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const std::string what = fmt::format("{}, line {}", p.string(), number);
    MI_TRY(const Json j, parse_json(line, what));
    MI_TRY(BenchRecord r, parse_record(j, what));
    all.push_back(std::move(r));
  }
  return all;
}

Status check_history(const Path& p) {
  std::error_code ec;
  if (!std::filesystem::exists(std::filesystem::symlink_status(p, ec))) {
    MI_TRY(const OutputFile beside, OutputFile::create(p, false));  // whether a file can be made there
    static_cast<void>(beside);
    return {};
  }
  MI_TRY(const auto all, read_history(p));
  static_cast<void>(all);
  const int fd = open(p.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
  if (fd < 0)
    return fail(ErrorCode::kEnvironment, "{}: cannot be opened to append to: {}", p.string(), std::strerror(errno));
  close(fd);
  return {};
}

Status append_history(const Path& p, const BenchRecord& r) { return Appender(p).append(dump_json(record_json(r))); }

std::string history_text(const std::vector<BenchRecord>& all, size_t last) {
  std::vector<std::string> names;
  const size_t from = all.size() > last ? all.size() - last : 0;
  for (size_t i = from; i < all.size(); ++i)
    for (const BenchRow& r : all[i].rows)
      if (std::find(names.begin(), names.end(), row_name(r)) == names.end()) names.push_back(row_name(r));
  std::string s = fmt::format("{:<21} {:<18}", "tok/s", "");
  for (const std::string& n : names) s += fmt::format(" {:>14}", n);
  s += fmt::format(" {:>12}\n", "memory peak");
  std::string before;
  for (size_t i = from; i < all.size(); ++i) {
    if (series_name(all[i]) != before) s += fmt::format("{}\n", series_name(all[i]));
    before = series_name(all[i]);
    s += fmt::format("{:<21} {:<18}", all[i].when, all[i].version);
    for (const std::string& n : names) {
      const auto row =
          std::find_if(all[i].rows.begin(), all[i].rows.end(), [&](const BenchRow& r) { return row_name(r) == n; });
      s += fmt::format(" {:>14}",
                       row == all[i].rows.end() ? "-" : fmt::format("{:.1f}", row->middle(&BenchRound::tok_s)));
    }
    s += fmt::format(" {:>12}\n", all[i].peak_bytes ? human_bytes(double(*all[i].peak_bytes)) : "-");
  }
  return s;
}

std::string history_html(const std::vector<BenchRecord>& all, const std::string& title) {
  std::vector<std::pair<std::string, int64_t>> rows;
  std::vector<std::string> series;
  for (const BenchRecord& r : all) {
    for (const BenchRow& row : r.rows)
      if (std::find(rows.begin(), rows.end(), std::pair(row.metric, row.n)) == rows.end())
        rows.emplace_back(row.metric, row.n);
    if (std::find(series.begin(), series.end(), series_name(r)) == series.end()) series.push_back(series_name(r));
  }
  std::string body = fmt::format(
      "<p>{}, oldest left. Lines are medians, bands the spread of the rounds; runs on one line may be "
      "compared.</p>\n<ul>\n",
      counted(int64_t(all.size()), "run"));
  for (const std::string& s : series)
    body += fmt::format("<li><span style=\"color:{}\">&#9632;</span> {}</li>\n", plot_color(s), html::escape(s));
  body += "</ul>\n";
  const auto row_values = [](const std::string& metric, int64_t n, double BenchRound::*field) {
    return [=](const BenchRecord& r) {
      for (const BenchRow& row : r.rows)
        if (row.metric == metric && row.n == n) return row.values(field);
      return std::vector<double>{};
    };
  };
  for (const auto& [metric, n] : rows) {
    body += figure_plot(all, fmt::format("{} {}, tok/s", metric, n), row_values(metric, n, &BenchRound::tok_s));
    body += figure_plot(all, fmt::format("{} {}, seconds to the first token", metric, n),
                        row_values(metric, n, &BenchRound::ttft_s));
    body +=
        figure_plot(all, fmt::format("{} {}, share of the limit in %", metric, n),
                    [&, metric = metric, n = n](const BenchRecord& r) {
                      for (size_t i = 0; i < r.shares.size(); ++i)
                        if (r.rows[i].metric == metric && r.rows[i].n == n && r.shares[i].limit.bound != Bound::kNone)
                          return std::vector<double>{100 * r.shares[i].limit.share};
                      return std::vector<double>{};
                    });
  }
  body += figure_plot(all, "memory peak, MB", [](const BenchRecord& r) {
    return r.peak_bytes ? std::vector<double>{double(*r.peak_bytes) / 1e6} : std::vector<double>{};
  });
  std::vector<std::vector<std::string>> table{{"when", "version", "machine and engine", "load", "read bandwidth"}};
  for (const BenchRecord& r : all)
    table.push_back({r.when, r.version, series_name(r), human_seconds(r.load_s),
                     r.machine.limits ? fmt::format("{:.1f} GB/s", r.machine.limits->read_gbs.all) : "-"});
  return html::page(title, body + "<h2>Runs</h2>\n" + html::table(table));
}

}  // namespace mi::tools
