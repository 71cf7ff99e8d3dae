#include "model/gguf.h"

#include <cstring>
#include <unordered_set>
#include <vector>

namespace mi::model {
namespace {

enum ValueType : uint32_t { kU8, kI8, kU16, kI16, kU32, kI32, kF32, kBool, kString, kArray, kU64, kI64, kF64 };

// Bytes of a fixed-size value; 0 for strings, arrays and unknown types.
size_t value_bytes(uint32_t type) {
  constexpr size_t kBytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
  return type < std::size(kBytes) ? kBytes[type] : 0;
}

struct Block {
  uint32_t type;
  uint64_t values, bytes;
};
// Tensor types: values per block and bytes per block.
constexpr Block kBlocks[] = {
    {0, 1, 4},      {1, 1, 2},     {2, 32, 18},    {3, 32, 20},    {6, 32, 22},    {7, 32, 24},    {8, 32, 34},
    {9, 32, 36},    {10, 256, 84}, {11, 256, 110}, {12, 256, 144}, {13, 256, 176}, {14, 256, 210}, {15, 256, 292},
    {16, 256, 66},  {17, 256, 74}, {18, 256, 98},  {19, 256, 50},  {20, 32, 18},   {21, 256, 110}, {22, 256, 82},
    {23, 256, 136}, {24, 1, 1},    {25, 1, 2},     {26, 1, 4},     {27, 1, 8},     {28, 1, 8},     {29, 256, 56},
    {30, 1, 2},     {34, 256, 54}, {35, 256, 66},  {39, 32, 17}};

class Reader {
 public:
  Reader(std::span<const std::byte> b, const std::string& what) : b_(b), what_(what) {}

  Result<GgufSummary> run() {
    GgufSummary s;
    if (b_.size() < 24) return bad_input("{}: {} bytes are too few for a GGUF file", what_, b_.size());
    if (std::memcmp(b_.data(), "GGUF", 4) != 0)
      return bad_input("{}: does not begin with GGUF: it is no GGUF file", what_);
    at_ = 4;
    s.version = take<uint32_t>();
    if (s.version != 2 && s.version != 3)
      return bad_input("{}: GGUF version {} is unknown; versions 2 and 3 are", what_, s.version);
    s.tensors = take<uint64_t>();
    s.keys = take<uint64_t>();
    // The shortest tensor entry (empty name, no dimensions) has 24 bytes, the shortest key 13.
    if (s.tensors > left() / 24)
      return bad_input("{}: says it holds {} tensors, more than fit into its {} bytes", what_, s.tensors, b_.size());
    if (s.keys > left() / 13)
      return bad_input("{}: says it holds {} keys, more than fit into its {} bytes", what_, s.keys, b_.size());
    for (uint64_t i = 0; i < s.keys; ++i) MI_TRY_VOID(key(&s));
    MI_TRY_VOID(tensors(s.tensors));
    return s;
  }

 private:
  uint64_t left() const { return b_.size() - at_; }
  template <typename T>
  T take() {
    T v{};
    std::memcpy(&v, b_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return v;
  }
  Error truncated() const {
    return bad_input("{}: ends inside its header: it is truncated or damaged; fetch it again", what_);
  }

  Result<std::string> string(const char* of) {
    if (left() < 8) return truncated();
    const uint64_t n = take<uint64_t>();
    if (n > left()) return bad_input("{}: {} should have {} bytes, but only {} follow", what_, of, n, left());
    if (n > 65535 && std::strcmp(of, "a value") != 0)
      return bad_input("{}: {} of {} bytes is longer than the limit of 65535", what_, of, n);
    std::string s(reinterpret_cast<const char*>(b_.data() + at_), n);
    at_ += n;
    return s;
  }

  Status value(uint32_t type, int depth, std::string* text) {
    if (type == kString) {
      MI_TRY(std::string s, string("a value"));
      if (text) *text = std::move(s);
      return {};
    }
    if (type == kArray) {
      if (depth > 2) return bad_input("{}: arrays nested too deep", what_);
      if (left() < 12) return truncated();
      const uint32_t element = take<uint32_t>();
      const uint64_t n = take<uint64_t>();
      const size_t bytes = value_bytes(element);
      if (bytes == 0 && element != kString && element != kArray)
        return bad_input("{}: unknown value type {}", what_, element);
      if (n > left() / (bytes > 0 ? bytes : 8))
        return bad_input("{}: an array of {} values does not fit into the file", what_, n);
      if (bytes > 0)
        at_ += n * bytes;
      else
        for (uint64_t i = 0; i < n; ++i) MI_TRY_VOID(value(element, depth + 1, nullptr));
      return {};
    }
    const size_t bytes = value_bytes(type);
    if (bytes == 0) return bad_input("{}: unknown value type {}", what_, type);
    if (left() < bytes) return truncated();
    if (type == kU32)
      alignment_candidate_ = take<uint32_t>();
    else
      at_ += bytes;
    return {};
  }

  Status key(GgufSummary* s) {
    MI_TRY(const std::string name, string("a key"));
    if (left() < 4) return truncated();
    const uint32_t type = take<uint32_t>();
    std::string text;
    alignment_candidate_ = 0;
    MI_TRY_VOID(value(type, 0, &text));
    if (name == "general.architecture") s->architecture = text;
    if (name == "general.alignment") {
      if (type != kU32 || alignment_candidate_ == 0 || (alignment_candidate_ & (alignment_candidate_ - 1)) != 0)
        return bad_input("{}: general.alignment has to be a power of two", what_);
      alignment_ = alignment_candidate_;
    }
    return {};
  }

  Status tensors(uint64_t count) {
    struct Range {
      std::string name;
      uint64_t begin, bytes;
    };
    std::vector<Range> ranges;
    std::unordered_set<std::string> names;
    for (uint64_t i = 0; i < count; ++i) {
      MI_TRY(std::string name, string("a tensor name"));
      if (!names.insert(name).second) return bad_input("{}: tensor '{}' occurs twice", what_, name);
      if (left() < 4) return truncated();
      const uint32_t dims = take<uint32_t>();
      if (dims > 4) return bad_input("{}: tensor '{}' has {} dimensions", what_, name, dims);
      if (left() < dims * 8 + 12) return truncated();
      uint64_t values = 1, first = 1;
      for (uint32_t d = 0; d < dims; ++d) {
        const uint64_t n = take<uint64_t>();
        if (d == 0) first = n;
        if (__builtin_mul_overflow(values, n, &values) || values > (uint64_t(1) << 60))
          return bad_input("{}: the shape of tensor '{}' overflows", what_, name);
      }
      const uint32_t type = take<uint32_t>();
      const uint64_t offset = take<uint64_t>();
      const Block* block = nullptr;
      for (const Block& b : kBlocks)
        if (b.type == type) block = &b;
      if (!block) return bad_input("{}: tensor '{}' has the unknown type {}", what_, name, type);
      if (first % block->values != 0)
        return bad_input("{}: tensor '{}': rows of {} values are no multiple of its block of {}", what_, name, first,
                         block->values);
      if (offset % alignment_ != 0)
        return bad_input("{}: tensor '{}' begins at {}, no multiple of the alignment {}", what_, name, offset,
                         alignment_);
      ranges.push_back({std::move(name), offset, values / block->values * block->bytes});
    }
    const uint64_t data = (at_ + alignment_ - 1) / alignment_ * alignment_;
    const uint64_t room = data < b_.size() ? b_.size() - data : 0;
    for (const Range& r : ranges)
      if (r.begin > room || r.bytes > room - r.begin)
        return bad_input(
            "{}: the data of tensor '{}' ends at byte {}, behind the end of the file ({}): it is truncated; fetch it "
            "again",
            what_, r.name, data + r.begin + r.bytes, b_.size());
    return {};
  }

  std::span<const std::byte> b_;
  const std::string& what_;
  uint64_t at_ = 0, alignment_ = 32;
  uint32_t alignment_candidate_ = 0;
};

}  // namespace

Result<GgufSummary> check_gguf_bytes(std::span<const std::byte> bytes, const std::string& what) {
  return Reader(bytes, what).run();
}

Result<GgufSummary> check_gguf(const Path& file) {
  MI_TRY(const MappedFile f, MappedFile::open(file));
  return check_gguf_bytes(f.bytes(), file.string());
}

}  // namespace mi::model
