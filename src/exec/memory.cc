#include "exec/memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/util.h"

namespace mi::exec {

Result<Region> Region::map(int64_t bytes, const std::string& what) {
  Region r;
  if (bytes == 0) return r;
  void* p = mmap(nullptr, size_t(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return fail(ErrorCode::kEnvironment, "no memory for {} ({}): {}", what, human_bytes(double(bytes)), std::strerror(errno));
  madvise(p, size_t(bytes), MADV_HUGEPAGE);   // advice: a kernel without it is fine
  r.data_ = static_cast<std::byte*>(p);
  r.bytes_ = bytes;
  return r;
}

Region::Region(Region&& o) noexcept : data_(std::exchange(o.data_, nullptr)), bytes_(std::exchange(o.bytes_, 0)) {}
Region& Region::operator=(Region&& o) noexcept {
  std::swap(data_, o.data_);
  std::swap(bytes_, o.bytes_);
  return *this;
}
Region::~Region() {
  if (data_) munmap(data_, size_t(bytes_));
}

}  // namespace mi::exec
