#include "base/place.h"

#include <sys/statvfs.h>

#include <algorithm>
#include <cctype>

#include "base/util.h"

namespace mi {
namespace {

Path real(const Path& p) {
  std::error_code ec;
  const Path whole = std::filesystem::weakly_canonical(std::filesystem::absolute(p, ec), ec);
  return whole.has_filename() ? whole : whole.parent_path();
}

bool holds(const Path& outer, const Path& inner) {
  return std::mismatch(outer.begin(), outer.end(), inner.begin(), inner.end()).first == outer.end();
}

}  // namespace

Status check_outside(const Path& input, const Path& output) {
  if (input.empty() || output.empty()) return {};
  const Path in = real(input), out = real(output);
  if (holds(in, out))
    return fail(ErrorCode::kUsage, "{}: the output is in the model's own folder; choose another", output.string());
  if (holds(out, in))
    return fail(ErrorCode::kUsage, "{}: the model, {}, lies inside the output; choose another", output.string(), input.string());
  return {};
}

Path beside(const Path& output, std::string_view suffix) {
  Path p = output.has_filename() ? output : output.parent_path();
  return p.concat(suffix);
}

std::string lower_ending(const Path& file) {
  std::string s = file.extension().string();
  std::transform(s.begin(), s.end(), s.begin(), [](unsigned char c) { return char(std::tolower(c)); });
  return s;
}

Error disk_full(const Path& p) {
  struct statvfs st {};
  std::error_code ec;
  const Path at = std::filesystem::exists(p, ec) ? p : std::filesystem::absolute(p, ec).parent_path();
  if (statvfs(at.c_str(), &st) == 0 && st.f_files > 0 && st.f_favail == 0 && st.f_bavail > 0)
    return fail(ErrorCode::kEnvironment, "{}: the disk is full: it has room for bytes, but for no more files (inodes); remove some or write elsewhere", p.string());
  const auto free = free_bytes(p);
  return fail(ErrorCode::kEnvironment, "{}: the disk is full{}; free some space or write elsewhere", p.string(),
              free.ok() ? fmt::format(" ({} free)", human_bytes(double(*free))) : "");
}

Error too_large(const Path& p) {
  return fail(ErrorCode::kEnvironment, "{}: cannot write: File too large: a limit is reached (ulimit -f, or the file system's own); raise it or write elsewhere",
              p.string());
}

}  // namespace mi
