#include "exec/memory.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/util.h"

namespace mi::exec {
namespace {
constexpr int64_t kHugePage = 2 << 20;
}

Result<Region> Region::map(int64_t bytes, const std::string& what, bool huge) {
  Region r;
  if (bytes == 0) return r;
  // From a multiple of the huge page's size, else the first and last part could not be huge.
  const size_t slack = huge && bytes >= kHugePage ? size_t(kHugePage) : 0;
  void* p = mmap(nullptr, size_t(bytes) + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p != MAP_FAILED && slack > 0) {
    char* const all = static_cast<char*>(p);
    char* const from = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(all) + slack - 1) / slack * slack);
    char* const end = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(from) + size_t(bytes) + 4095) / 4096 * 4096);
    if (from > all) munmap(all, size_t(from - all));
    if (char* const last = all + (size_t(bytes) + slack + 4095) / 4096 * 4096; last > end) munmap(end, size_t(last - end));
    p = from;
  }
  if (p == MAP_FAILED) return fail(ErrorCode::kEnvironment, "no memory for {} ({}): {}", what, human_bytes(double(bytes)), std::strerror(errno));
  madvise(p, size_t(bytes), huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);   // advice: a kernel without it is fine
  r.data_ = static_cast<std::byte*>(p);
  r.bytes_ = bytes;
  return r;
}

void Region::forget(std::byte* p, int64_t bytes) {
  constexpr uintptr_t kPage = 4096;
  const uintptr_t from = (reinterpret_cast<uintptr_t>(p) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(p) + size_t(bytes)) / kPage * kPage;
  if (from < end) madvise(reinterpret_cast<void*>(from), end - from, MADV_DONTNEED);
}

void Region::commit(hw::ThreadPool& pool) {
  pool.run((bytes_ + kHugePage - 1) / kHugePage, [&](int64_t i, int) {
    const int64_t end = std::min(bytes_, (i + 1) * kHugePage);
    for (int64_t at = i * kHugePage; at < end; at += 4096) data_[at] = std::byte{0};
  });
}

bool Region::place_on(const std::vector<int>& nodes, int64_t from, int64_t bytes) {
  constexpr int kPreferred = 1, kInterleave = 3, kMaxNode = 1024;  // of <linux/mempolicy.h>
  unsigned long mask[kMaxNode / (8 * sizeof(unsigned long))] = {};
  for (int n : nodes) {
    if (n < 0 || n >= kMaxNode) return false;
    mask[size_t(n) / (8 * sizeof *mask)] |= 1ul << (size_t(n) % (8 * sizeof *mask));
  }
  if (nodes.empty() || bytes == 0) return true;
  return syscall(SYS_mbind, data_ + from, size_t(bytes), nodes.size() == 1 ? kPreferred : kInterleave, mask, kMaxNode, 0) == 0;
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
