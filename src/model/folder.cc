#include "model/folder.h"

#include <algorithm>

namespace mi::model {
namespace {

namespace fs = std::filesystem;

bool is_inside(const Path& file, const Path& folder) {
  return std::mismatch(folder.begin(), folder.end(), file.begin(), file.end()).first == folder.end();
}

// Control characters as \xNN, so that a name cannot forge lines of the message.
std::string printable(const std::string& name) {
  std::string s;
  for (unsigned char c : name) s += c < 32 || c == 127 ? fmt::format("\\x{:02x}", c) : std::string(1, char(c));
  return s;
}

}  // namespace

Result<Path> file_in_folder(const Path& dir, const std::string& name, const std::string& origin) {
  const bool plain = !name.empty() && name != "." && name != ".." && name.size() < 256 && name.find('/') == name.npos &&
                     name.find('\0') == name.npos;
  if (!plain)
    return bad_input("{}: {}: '{}' is no plain file name; only files of the model's own folder are read", dir.string(),
                     origin, printable(name));
  const Path p = dir / name;
  std::error_code ec;
  if (!fs::exists(fs::symlink_status(p, ec)))
    return bad_input("{}: is missing ({} asks for it); fetch the checkpoint again", p.string(), origin);
  const Path folder = fs::canonical(dir, ec);
  if (ec) return bad_input("{}: {}", dir.string(), ec.message());
  const Path real = fs::canonical(p, ec);
  if (ec) return bad_input("{}: is a link that leads nowhere", p.string());
  const bool cached =
      folder.parent_path().filename() == "snapshots" && is_inside(real, folder.parent_path().parent_path() / "blobs");
  if (!is_inside(real, folder) && !cached)
    return bad_input("{}: is a link out of the folder, to {}; it is not read: copy the file itself into the folder",
                     p.string(), real.string());
  if (!fs::is_regular_file(fs::status(real, ec))) return bad_input("{}: is not a regular file", p.string());
  return p;
}

bool is_in_folder(const Path& dir, const std::string& name) {
  std::error_code ec;
  return fs::exists(fs::symlink_status(dir / name, ec));
}

}  // namespace mi::model
