#include "runtime/kv/store_file.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <utility>

#include "base/check.h"
#include "base/util.h"

namespace mi::runtime::kv {
namespace {

constexpr int64_t kHeadBytes = 4096, kEntryBytes = 512;
constexpr char kMagic[8] = {'M', 'I', 'K', 'V', 'P', 'A', 'G', 'E'};
constexpr uint32_t kVersion = 1;

// Little-endian, as the processors are that this program runs on.
struct Head {
  char magic[8];
  uint32_t version, page_tokens;
  int64_t page_bytes;
  char identity[32];
  uint8_t key[16];
  char checksum[32];
};
struct Entry {
  uint64_t epoch, count, parent_epoch, parent_count, order;
  uint8_t salt[32];
  int32_t tokens[kPageTokens];
  char page_checksum[32];  // of what stands before it, and the page
  char checksum[32];       // of what stands before it
};
static_assert(sizeof(Head) <= kHeadBytes && sizeof(Entry) <= kEntryBytes);

std::span<const std::byte> bytes_before(const auto& whole, const char* field) {
  const auto* begin = reinterpret_cast<const std::byte*>(&whole);
  return {begin, size_t(reinterpret_cast<const std::byte*>(field) - begin)};
}
void put(char (&to)[32], const std::string& text) {
  MI_CHECK_EQ(text.size(), sizeof to);
  std::memcpy(to, text.data(), sizeof to);
}
bool same(const char (&a)[32], const std::string& text) { return std::string_view(a, sizeof a) == text; }

std::string page_checksum(const Entry& e, std::span<const std::byte> page) {
  Xxh3 h;
  h.update(bytes_before(e, e.page_checksum));
  h.update(page);
  return h.digest();
}

Record record_of(const Entry& e) {
  Record r{{e.epoch, e.count}, {e.parent_epoch, e.parent_count}, e.order, {}, {}};
  std::copy(std::begin(e.salt), std::end(e.salt), r.salt.begin());
  std::copy(std::begin(e.tokens), std::end(e.tokens), r.tokens.begin());
  return r;
}
Entry entry_of(const Record& r) {
  Entry e{};
  e.epoch = r.id.epoch;
  e.count = r.id.count;
  e.parent_epoch = r.parent.epoch;
  e.parent_count = r.parent.count;
  e.order = r.order;
  std::copy(r.salt.begin(), r.salt.end(), e.salt);
  std::copy(r.tokens.begin(), r.tokens.end(), e.tokens);
  return e;
}
bool is_whole(const Entry& e) { return e.epoch != 0 && same(e.checksum, xxh3_hex(bytes_before(e, e.checksum))); }

// 0, or the errno.
int write_all(int fd, std::span<const std::byte> from, int64_t at) {
  while (!from.empty()) {
    const ssize_t n = ::pwrite(fd, from.data(), from.size(), at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 ? errno : EIO;
    from = from.subspan(size_t(n));
    at += n;
  }
  return 0;
}
bool read_all(int fd, std::span<std::byte> to, int64_t at) {
  while (!to.empty()) {
    const ssize_t n = ::pread(fd, to.data(), to.size(), at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    to = to.subspan(size_t(n));
    at += n;
  }
  return true;
}

Result<int> open_file(const Path& p) {
  const int fd = ::open(p.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0600);
  if (fd < 0) return fail(ErrorCode::kEnvironment, "{}: {}", p.string(), std::strerror(errno));
  struct stat s {};
  if (::fstat(fd, &s) == 0 && S_ISREG(s.st_mode)) return fd;
  ::close(fd);
  return bad_input("{} is not a regular file", p.string());
}
// A store is given up as a whole, so that nobody else's files may lie beside it.
Status check_alone(const Path& dir) {
  std::error_code ec;
  if (!std::filesystem::is_directory(dir, ec)) return bad_input("{} is not a folder", dir.string());
  for (const auto& e : std::filesystem::directory_iterator(dir, ec)) {
    const std::string name = e.path().filename().string();
    if (name != "lock" && name != "index" && name != "pages" && name != "lost+found")  // the last: of a whole disk
      return bad_input("{} holds other files ({}): give keys and values a folder of their own", dir.string(), name);
  }
  return {};
}
int64_t size_of(int fd) {
  struct stat s {};
  return ::fstat(fd, &s) == 0 ? int64_t(s.st_size) : 0;
}

}  // namespace

StoreFile::StoreFile(StoreFile&& o) noexcept
    : dir_(std::move(o.dir_)),
      lock_(std::exchange(o.lock_, -1)),
      index_(std::exchange(o.index_, -1)),
      pages_(std::exchange(o.pages_, -1)),
      slots_(o.slots_),
      slot_bytes_(o.slot_bytes_),
      page_bytes_(o.page_bytes_),
      used_slots_(o.used_slots_),
      identity_(std::move(o.identity_)),
      key_(o.key_),
      has_head_(o.has_head_),
      fault_(std::move(o.fault_)) {}

StoreFile::~StoreFile() {
  for (int fd : {pages_, index_, lock_})
    if (fd >= 0) ::close(fd);
}

namespace {
// The lock of the folder, which is made where there is none.
Result<int> take_folder(const Path& dir) {
  if (::mkdir(dir.c_str(), 0700) != 0 && errno != EEXIST)
    return fail(ErrorCode::kEnvironment, "{}: the folder can't be made: {}", dir.string(), std::strerror(errno));
  MI_TRY_VOID(check_alone(dir));
  MI_TRY(const int lock, open_file(dir / "lock"));
  if (::flock(lock, LOCK_EX | LOCK_NB) == 0) return lock;
  const int error = errno;
  ::close(lock);
  if (error == EWOULDBLOCK)
    return fail(ErrorCode::kEnvironment, "{} is in use by another process: give each server a folder of its own", dir.string());
  return fail(ErrorCode::kEnvironment, "{} can't be locked: {}", (dir / "lock").string(), std::strerror(error));
}
}  // namespace

Status StoreFile::check(const Path& dir) {
  MI_TRY(const int lock, take_folder(dir));
  ::close(lock);
  return {};
}

Result<StoreFile> StoreFile::open(const StoreFileOptions& o, std::vector<std::pair<int64_t, Record>>* found,
                                  std::string* note) {
  MI_CHECK(o.page_bytes > 0 && o.identity.size() == 32);
  StoreFile f;
  f.dir_ = o.dir;
  f.page_bytes_ = o.page_bytes;
  f.identity_ = o.identity;
  f.fault_ = o.fault;
  f.slot_bytes_ = (o.page_bytes + 4095) / 4096 * 4096;
  f.slots_ = std::max<int64_t>(o.bytes - kHeadBytes, 0) / (f.slot_bytes_ + kEntryBytes);
  f.slots_ = std::min<int64_t>(f.slots_, INT32_MAX);
  if (f.slots_ < 1)
    return fail(ErrorCode::kUsage, "{}: {} of disk are too little for one page of keys and values, which takes {}",
                o.dir.string(), human_bytes(double(o.bytes)), human_bytes(double(f.slot_bytes_)));
  MI_TRY(f.lock_, take_folder(o.dir));
  MI_TRY(f.index_, open_file(o.dir / "index"));
  MI_TRY(f.pages_, open_file(o.dir / "pages"));
  MI_TRY_VOID(f.start(o, found, note));
  return f;
}

Status StoreFile::start(const StoreFileOptions& o, std::vector<std::pair<int64_t, Record>>* found, std::string* note) {
  const auto failed = [&](const char* file) {
    return fail(ErrorCode::kEnvironment, "{}: {}", (o.dir / file).string(), std::strerror(errno));
  };
  const int64_t index_bytes = size_of(index_);
  Head h{};
  const auto head = std::as_writable_bytes(std::span(&h, 1));
  const size_t there = size_t(std::min(index_bytes, int64_t(head.size())));
  // Zeros: the machine failed before the kernel had written the head.
  const bool ours = read_all(index_, head.first(there), 0) &&
                    (std::equal(h.magic, h.magic + std::min(there, sizeof kMagic), kMagic) ||
                     std::ranges::all_of(head, [](std::byte b) { return b == std::byte(0); }));
  if (!ours || (index_bytes == 0 && size_of(pages_) > 0))
    return bad_input("{} holds files that are no store of keys and values: give another folder, or empty this one",
                     o.dir.string());
  const bool whole = index_bytes >= kHeadBytes && same(h.checksum, xxh3_hex(bytes_before(h, h.checksum)));
  has_head_ = whole && h.version == kVersion && h.page_tokens == kPageTokens && h.page_bytes == page_bytes_ &&
              same(h.identity, identity_);
  if (!has_head_) {
    if (index_bytes > 0)
      *note = whole ? "what it held was another engine's, or another version's, and is given up"
                    : "what it held is damaged at its beginning and is given up";
    // The pages first: an index without them describes nothing, pages without an index would be refused.
    if (::ftruncate(pages_, 0) != 0) return failed("pages");
    if (::ftruncate(index_, 0) != 0) return failed("index");
    std::random_device device;
    for (uint8_t& b : key_) b = uint8_t(device());
    return {};
  }
  std::copy(std::begin(h.key), std::end(h.key), key_.begin());
  if (index_bytes > kHeadBytes + slots_ * kEntryBytes && ::ftruncate(index_, kHeadBytes + slots_ * kEntryBytes) != 0)
    return failed("index");
  if (size_of(pages_) > slots_ * slot_bytes_ && ::ftruncate(pages_, slots_ * slot_bytes_) != 0) return failed("pages");
  used_slots_ = (size_of(pages_) + slot_bytes_ - page_bytes_) / slot_bytes_;  // the last has no padding

  constexpr int64_t kBlock = 2048;  // entries
  std::vector<std::byte> block;
  const int64_t entries = std::max<int64_t>(size_of(index_) - kHeadBytes, 0) / kEntryBytes;
  for (int64_t first = 0; first < entries; first += kBlock) {
    const int64_t n = std::min(kBlock, entries - first);
    block.resize(size_t(n * kEntryBytes));
    if (!read_all(index_, block, kHeadBytes + first * kEntryBytes)) continue;  // pages that are not found
    for (int64_t i = 0; i < n; ++i) {
      Entry e;
      std::memcpy(&e, block.data() + i * kEntryBytes, sizeof e);
      if (is_whole(e)) found->emplace_back(first + i, record_of(e));
    }
  }
  return {};
}

SaltDigest StoreFile::digest(std::string_view salt) const {
  std::string text(key_.begin(), key_.end());
  text += salt;
  SaltDigest d{};
  unsigned size = 0;
  MI_CHECK(EVP_Digest(text.data(), text.size(), d.data(), &size, EVP_sha256(), nullptr) == 1 && size == d.size());
  return d;
}

int StoreFile::write_head() {
  std::array<std::byte, kHeadBytes> block{};
  Head h{};
  std::copy(std::begin(kMagic), std::end(kMagic), h.magic);
  h.version = kVersion;
  h.page_tokens = uint32_t(kPageTokens);
  h.page_bytes = page_bytes_;
  put(h.identity, identity_);
  std::copy(key_.begin(), key_.end(), h.key);
  put(h.checksum, xxh3_hex(bytes_before(h, h.checksum)));
  std::memcpy(block.data(), &h, sizeof h);
  const int error = write_all(index_, block, 0);
  has_head_ = error == 0;
  return error;
}

int StoreFile::write(int64_t slot, const Record& r, std::span<const std::byte> page) {
  MI_CHECK(slot >= 0 && slot < slots_ && int64_t(page.size()) == page_bytes_);
  if (fault_)
    if (const int error = fault_(true)) return error;
  // Not when the files are made: a disk that is full then is as good a reason to go on as later.
  if (!has_head_)
    if (const int error = write_head()) return error;
  const int64_t at = kHeadBytes + slot * kEntryBytes;
  std::array<std::byte, kEntryBytes> block{};
  if (const int error = write_all(index_, block, at)) return error;
  if (const int error = write_all(pages_, page, slot * slot_bytes_)) return error;
  Entry e = entry_of(r);
  put(e.page_checksum, page_checksum(e, page));
  put(e.checksum, xxh3_hex(bytes_before(e, e.checksum)));
  std::memcpy(block.data(), &e, sizeof e);
  return write_all(index_, block, at);
}

bool StoreFile::read(int64_t slot, const Record& r, std::span<std::byte> to) {
  MI_CHECK(slot >= 0 && slot < slots_ && int64_t(to.size()) == page_bytes_);
  if (fault_ && fault_(false) != 0) return false;
  Entry e;
  return read_all(index_, std::as_writable_bytes(std::span(&e, 1)), kHeadBytes + slot * kEntryBytes) && is_whole(e) &&
         record_of(e) == r && read_all(pages_, to, slot * slot_bytes_) && same(e.page_checksum, page_checksum(e, to));
}

}  // namespace mi::runtime::kv
