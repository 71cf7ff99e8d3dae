#include "base/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/place.h"
#include "base/util.h"

namespace mi {
namespace {

constexpr size_t kWriteBuffer = size_t(1) << 20;

Error io_error(const Path& p, const char* doing, int err) {
  if (err == ENOSPC || err == EDQUOT) return disk_full(p);
  if (err == EFBIG) return too_large(p);
  const bool environment = err == ENOMEM || err == EMFILE || err == ENFILE || err == EIO || err == EROFS;
  return fail(environment ? ErrorCode::kEnvironment : ErrorCode::kBadInput, "{}: cannot {}: {}", p.string(), doing, std::strerror(err));
}

// Only regular files: a FIFO would wait for ever, a directory cannot be read. O_NONBLOCK so that the open itself returns.
Result<int> open_regular(const Path& p, struct stat* st) {
  const int fd = ::open(p.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return errno == ENOENT ? bad_input("{}: no such file", p.string()) : io_error(p, "open", errno);
  if (fstat(fd, st) != 0 || !S_ISREG(st->st_mode)) {
    ::close(fd);
    return bad_input("{}: is not a regular file", p.string());
  }
  return fd;
}

}  // namespace

Result<std::string> read_file(const Path& p, size_t max_bytes) {
  struct stat st {};
  MI_TRY(const int fd, open_regular(p, &st));
  if (size_t(st.st_size) > max_bytes) {
    ::close(fd);
    return bad_input("{}: {} bytes, more than the limit of {}", p.string(), st.st_size, max_bytes);
  }
  // Read to the end and not to st_size: /proc files claim to be empty, others may grow.
  std::string text;
  size_t at = 0;
  for (ssize_t n = 1; n != 0;) {
    if (at == text.size()) text.resize(std::max(size_t(st.st_size) + 1, at + at / 2 + 4096));
    n = ::read(fd, text.data() + at, text.size() - at);
    if (n < 0 && errno == EINTR) continue;
    const int err = errno;
    if (n > 0) at += size_t(n);
    if (n < 0 || at > max_bytes) {
      ::close(fd);
      return n < 0 ? io_error(p, "read", err) : bad_input("{}: more than the limit of {} bytes", p.string(), max_bytes);
    }
  }
  ::close(fd);
  text.resize(at);
  return text;
}

Result<FileReader> FileReader::open(const Path& p) {
  struct stat st {};
  FileReader f;
  MI_TRY(f.fd_, open_regular(p, &st));
  f.size_ = size_t(st.st_size);
  f.path_ = p;
  return f;
}

FileReader::FileReader(FileReader&& o) noexcept : fd_(std::exchange(o.fd_, -1)), size_(o.size_), path_(std::move(o.path_)) {}
FileReader::~FileReader() {
  if (fd_ >= 0) ::close(fd_);
}

Status FileReader::read_at(size_t offset, std::span<std::byte> to) const {
  while (!to.empty()) {
    const ssize_t n = ::pread(fd_, to.data(), to.size(), off_t(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return io_error(path_, "read", errno);
    if (n == 0) return bad_input("{}: ends at byte {}; it was cut short after it was opened", path_.string(), offset);
    offset += size_t(n);
    to = to.subspan(size_t(n));
  }
  return {};
}

Result<MappedFile> MappedFile::open(const Path& p) {
  struct stat st {};
  MI_TRY(const int fd, open_regular(p, &st));
  MappedFile m;
  m.path_ = p;
  m.size_ = size_t(st.st_size);
  if (m.size_ > 0) {
    void* at = mmap(nullptr, m.size_, PROT_READ, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) {
      const int err = errno;
      ::close(fd);
      return io_error(p, "map", err);
    }
    m.data_ = static_cast<const std::byte*>(at);
  }
  ::close(fd);
  return m;
}
MappedFile::MappedFile(MappedFile&& o) noexcept : data_(o.data_), size_(o.size_), path_(std::move(o.path_)) { o.data_ = nullptr; o.size_ = 0; }
MappedFile& MappedFile::operator=(MappedFile&& o) noexcept {
  std::swap(data_, o.data_);
  std::swap(size_, o.size_);
  std::swap(path_, o.path_);
  return *this;
}
MappedFile::~MappedFile() {
  if (data_) munmap(const_cast<std::byte*>(data_), size_);
}
namespace {
void advise(const std::byte* data, size_t size, size_t offset, size_t len, int advice) {
  const size_t page = size_t(sysconf(_SC_PAGESIZE));
  // All touched pages; a neighbour's page dropped too early is only read again.
  const size_t begin = offset / page * page, end = offset < size ? offset + std::min(len, size - offset) : 0;
  if (data && begin < end) madvise(const_cast<std::byte*>(data) + begin, end - begin, advice);
}
}  // namespace
void MappedFile::drop(size_t offset, size_t len) const { advise(data_, size_, offset, len, MADV_DONTNEED); }
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22   // of Linux 5.14
#endif
void MappedFile::populate(size_t offset, size_t len) const { advise(data_, size_, offset, len, MADV_POPULATE_READ); }
void MappedFile::will_need(size_t offset, size_t len) const { advise(data_, size_, offset, len, MADV_WILLNEED); }

Result<FileWriter> FileWriter::create(const Path& p) {
  FileWriter w;
  w.path_ = p;
  w.fd_ = ::open(p.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (w.fd_ < 0) return io_error(p, "create", errno);
  return w;
}
FileWriter::FileWriter(FileWriter&& o) noexcept : fd_(o.fd_), offset_(o.offset_), path_(std::move(o.path_)), buffer_(std::move(o.buffer_)) {
  o.fd_ = -1;
  o.buffer_.clear();
}
FileWriter& FileWriter::operator=(FileWriter&& o) noexcept {
  std::swap(fd_, o.fd_);
  std::swap(offset_, o.offset_);
  std::swap(path_, o.path_);
  std::swap(buffer_, o.buffer_);
  return *this;
}
FileWriter::~FileWriter() {
  if (fd_ >= 0) ::close(fd_);
}

namespace {
Status write_all(int fd, const char* data, size_t size, const Path& p) {
  while (size > 0) {
    const ssize_t n = ::write(fd, data, size);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return io_error(p, "write", errno);
    data += n;
    size -= size_t(n);
  }
  return {};
}
}  // namespace

Status FileWriter::flush() {
  MI_TRY_VOID(write_all(fd_, buffer_.data(), buffer_.size(), path_));
  buffer_.clear();
  return {};
}
Status FileWriter::write(std::span<const std::byte> b) { return write(std::string_view(reinterpret_cast<const char*>(b.data()), b.size())); }
Status FileWriter::write(std::string_view text) {
  MI_CHECK(fd_ >= 0, "write after finish");
  offset_ += text.size();
  if (buffer_.size() + text.size() < kWriteBuffer) {
    buffer_.append(text);
    return {};
  }
  MI_TRY_VOID(flush());
  return write_all(fd_, text.data(), text.size(), path_);
}
Status FileWriter::write_at(size_t offset, std::span<const std::byte> b) {
  MI_CHECK(fd_ >= 0, "write_at after finish");
  MI_TRY_VOID(flush());
  size_t done = 0;
  while (done < b.size()) {
    const ssize_t n = ::pwrite(fd_, b.data() + done, b.size() - done, off_t(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return io_error(path_, "write", errno);
    done += size_t(n);
  }
  return {};
}
Status FileWriter::pad_to(size_t alignment) {
  static const std::string zeros(size_t(64) << 10, '\0');
  size_t n = (alignment - offset_ % alignment) % alignment;
  while (n > 0) {
    const size_t part = std::min(n, zeros.size());
    MI_TRY_VOID(write(std::string_view(zeros.data(), part)));
    n -= part;
  }
  return {};
}
Status FileWriter::finish(Keep keep) {
  MI_CHECK(fd_ >= 0, "finish() twice");
  MI_TRY_VOID(flush());
  const int fd = std::exchange(fd_, -1);
  const int synced = keep == Keep::kSafe ? fsync(fd) : 0, err = errno;
  if (::close(fd) != 0 && synced == 0) return io_error(path_, "close", errno);
  // Some file systems (FUSE, pipes behind them) know no fsync; that is not a failed write.
  if (synced != 0 && err != EINVAL && err != ENOTSUP) return io_error(path_, "write", err);
  return {};
}

Status write_file(const Path& p, std::string_view text) {
  MI_TRY(FileWriter w, FileWriter::create(p));
  MI_TRY_VOID(w.write(text));
  return w.finish();
}

Result<uint64_t> free_bytes(const Path& p) {
  Path at = p.empty() ? Path(".") : p;
  std::error_code ec;
  while (!std::filesystem::exists(at, ec) && at.has_parent_path() && at != at.parent_path()) at = at.parent_path();
  if (!std::filesystem::exists(at, ec)) at = ".";
  struct statvfs s {};
  if (statvfs(at.c_str(), &s) != 0) return io_error(p, "ask for free space", errno);
  return uint64_t(s.f_bavail) * s.f_frsize;
}

}  // namespace mi
