#pragma once
// For tests: a folder of its own that goes away with the object.

#include <cstdlib>
#include <string>

#include "base/check.h"
#include "base/file.h"

namespace mi {

class TempDir {
 public:
  TempDir() {
    std::string name = (std::filesystem::temp_directory_path() / "mi-test-XXXXXX").string();
    MI_CHECK(mkdtemp(name.data()) != nullptr, "no folder {}", name);
    path_ = name;
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  const Path& path() const { return path_; }
  Path operator/(const Path& name) const { return path_ / name; }

 private:
  Path path_;
};

}  // namespace mi
