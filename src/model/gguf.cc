#include "model/gguf.h"

#include <algorithm>
#include <cstring>
#include <unordered_set>

#include "model/formats/gguf_blocks.h"
#include "model/gguf_values.h"

namespace mi::model {
namespace {

// Bytes of a fixed-size value; 0 for strings, arrays and unknown types.
size_t value_bytes(uint32_t type) {
  constexpr size_t kBytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
  return type < std::size(kBytes) ? kBytes[type] : 0;
}

// Arrays of tokens are the longest there are; a longer one is no model's.
constexpr uint64_t kMaxArray = uint64_t(1) << 24;

using namespace gguf_values;

class Reader {
 public:
  Reader(std::span<const std::byte> b, const std::string& what) : b_(b), what_(what) {}

  Result<GgufHeader> run() {
    GgufHeader s;
    if (b_.size() < 24) return bad_input("{}: {} bytes are too few for a GGUF file", what_, b_.size());
    if (std::memcmp(b_.data(), "GGUF", 4) != 0)
      return bad_input("{}: does not begin with GGUF: it is no GGUF file", what_);
    at_ = 4;
    s.version = take<uint32_t>();
    if (s.version != 2 && s.version != 3)
      return bad_input("{}: GGUF version {} is unknown; versions 2 and 3 are", what_, s.version);
    const uint64_t tensor_count = take<uint64_t>(), key_count = take<uint64_t>();
    // The shortest tensor entry (empty name, no dimensions) has 24 bytes, the shortest key 13.
    if (tensor_count > left() / 24)
      return bad_input("{}: says it holds {} tensors, more than fit into its {} bytes", what_, tensor_count, b_.size());
    if (key_count > left() / 13)
      return bad_input("{}: says it holds {} keys, more than fit into its {} bytes", what_, key_count, b_.size());
    for (uint64_t i = 0; i < key_count; ++i) MI_TRY_VOID(key(&s));
    MI_TRY_VOID(tensors(tensor_count, &s));
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

  // A value of fixed size. Precondition: its bytes are left.
  Json number(uint32_t type) {
    switch (type) {
      case kU8:
        return take<uint8_t>();
      case kI8:
        return take<int8_t>();
      case kU16:
        return take<uint16_t>();
      case kI16:
        return take<int16_t>();
      case kU32:
        return take<uint32_t>();
      case kI32:
        return take<int32_t>();
      case kF32:
        return take<float>();
      case kBool:
        return take<uint8_t>() != 0;
      case kU64:
        return take<uint64_t>();
      case kI64:
        return take<int64_t>();
      default:
        return take<double>();
    }
  }

  Result<Json> value(uint32_t type, int depth) {
    if (type == kString) {
      MI_TRY(std::string s, string("a value"));
      return Json(std::move(s));
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
      array_values_ += n;
      if (array_values_ > kMaxArray)
        return bad_input("{}: its arrays hold more than the limit of {} values", what_, kMaxArray);
      Json list = Json::array();
      for (uint64_t i = 0; i < n; ++i) {
        MI_TRY(Json v, bytes > 0 ? Result<Json>(number(element)) : value(element, depth + 1));
        list.push_back(std::move(v));
      }
      return list;
    }
    const size_t bytes = value_bytes(type);
    if (bytes == 0) return bad_input("{}: unknown value type {}", what_, type);
    if (left() < bytes) return truncated();
    return number(type);
  }

  Status key(GgufHeader* s) {
    MI_TRY(const std::string name, string("a key"));
    if (left() < 4) return truncated();
    const uint32_t type = take<uint32_t>();
    MI_TRY(Json v, value(type, 0));
    if (name == "general.alignment") {
      const uint64_t a = type == kU32 ? v.get<uint64_t>() : 0;
      if (a == 0 || (a & (a - 1)) != 0) return bad_input("{}: general.alignment has to be a power of two", what_);
      alignment_ = a;
    }
    if (!s->keys.emplace(name, std::move(v)).second) return bad_input("{}: key '{}' occurs twice", what_, name);
    return {};
  }

  Status tensors(uint64_t count, GgufHeader* s) {
    std::unordered_set<std::string> names;
    for (uint64_t i = 0; i < count; ++i) {
      GgufHeader::Tensor t;
      MI_TRY(t.name, string("a tensor name"));
      if (!names.insert(t.name).second) return bad_input("{}: tensor '{}' occurs twice", what_, t.name);
      if (left() < 4) return truncated();
      const uint32_t dims = take<uint32_t>();
      if (dims > 4) return bad_input("{}: tensor '{}' has {} dimensions", what_, t.name, dims);
      if (left() < dims * 8 + 12) return truncated();
      uint64_t values = 1;
      for (uint32_t d = 0; d < dims; ++d) {
        const uint64_t n = take<uint64_t>();
        if (__builtin_mul_overflow(values, n, &values) || values > (uint64_t(1) << 60) || n > (uint64_t(1) << 60))
          return bad_input("{}: the shape of tensor '{}' overflows", what_, t.name);
        t.shape.insert(t.shape.begin(), int64_t(n));
      }
      t.type = take<uint32_t>();
      t.begin = take<uint64_t>();
      const formats::GgufBlock* block = formats::find_gguf_block(t.type);
      if (!block) return bad_input("{}: tensor '{}' has the unknown type {}", what_, t.name, t.type);
      const uint64_t row = t.shape.empty() ? 1 : uint64_t(t.shape.back()), per_block = uint64_t(block->values);
      if (row % per_block != 0)
        return bad_input("{}: tensor '{}': rows of {} values are no multiple of its block of {}", what_, t.name, row,
                         per_block);
      if (t.begin % alignment_ != 0)
        return bad_input("{}: tensor '{}' begins at {}, no multiple of the alignment {}", what_, t.name, t.begin,
                         alignment_);
      if (__builtin_mul_overflow(values / per_block, uint64_t(block->bytes), &t.bytes))
        return bad_input("{}: the shape of tensor '{}' overflows", what_, t.name);
      s->tensors.push_back(std::move(t));
    }
    // A file may end before the padding; a tensor without values then begins at its end.
    const uint64_t data = std::min<uint64_t>((at_ + alignment_ - 1) / alignment_ * alignment_, b_.size());
    const uint64_t room = b_.size() - data;
    for (GgufHeader::Tensor& t : s->tensors) {
      if (t.begin > room || t.bytes > room - t.begin)
        return bad_input(
            "{}: the data of tensor '{}' ends behind the end of the file ({} bytes): it is truncated; fetch it again",
            what_, t.name, b_.size());
      t.begin += data;
    }
    return {};
  }

  std::span<const std::byte> b_;
  const std::string& what_;
  uint64_t at_ = 0, alignment_ = 32, array_values_ = 0;
};

}  // namespace

std::string GgufHeader::architecture() const {
  const auto it = keys.find("general.architecture");
  return it != keys.end() && it->second.is_string() ? it->second.get<std::string>() : "";
}

Result<GgufHeader> read_gguf_bytes(std::span<const std::byte> bytes, const std::string& what) {
  return Reader(bytes, what).run();
}

Result<GgufHeader> read_gguf(const Path& file) {
  MI_TRY(const MappedFile f, MappedFile::open(file));
  return read_gguf_bytes(f.bytes(), file.string());
}

}  // namespace mi::model
