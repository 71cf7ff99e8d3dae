#pragma once
// What survives a quantize run that is killed: finished weight files, beside the output as ".NAME.kept", with a key that
// says what they are part of. The same command goes on from there; another one starts anew.

#include <string>

#include "base/file.h"
#include "base/result.h"

namespace mi::quant {

class KeptFiles {
 public:
  // output: the final name. key: equal for runs that write the same bytes. Another run that uses the folder now is an
  // error. A file system without locks: nothing is kept (path() is empty).
  static Result<KeptFiles> open(const Path& output, const std::string& key);
  KeptFiles() = default;
  KeptFiles(KeptFiles&& o) noexcept;
  KeptFiles& operator=(KeptFiles&& o) noexcept;
  ~KeptFiles();  // leaves the files: this run may have failed

  const Path& path() const { return path_; }
  void remove();  // the output is complete, or there is one already

 private:
  Path path_;
  int lock_ = -1;
};

}  // namespace mi::quant
