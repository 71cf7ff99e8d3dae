#include "model/gguf_writer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <unordered_set>

#include "model/gguf_values.h"

namespace mi::model {
namespace {

using namespace gguf_values;
constexpr uint64_t kAlignment = 32;

template <typename T>
void add(std::string* s, T v) {
  char raw[sizeof(T)];
  std::memcpy(raw, &v, sizeof(T));
  s->append(raw, sizeof(T));
}
void add_string(std::string* s, std::string_view v) {
  add<uint64_t>(s, v.size());
  s->append(v);
}

uint64_t aligned(uint64_t n) { return (n + kAlignment - 1) / kAlignment * kAlignment; }

std::string header(const GgufKeys& keys, const std::vector<GgufTensor>& tensors) {
  std::string h = "GGUF";
  add<uint32_t>(&h, 3);
  add<uint64_t>(&h, tensors.size());
  add<uint64_t>(&h, keys.count());
  h += keys.bytes();
  uint64_t offset = 0;
  for (const GgufTensor& t : tensors) {
    add_string(&h, t.name);
    add<uint32_t>(&h, uint32_t(t.shape.size()));
    for (auto n = t.shape.rbegin(); n != t.shape.rend(); ++n) add<uint64_t>(&h, uint64_t(*n));
    add<uint32_t>(&h, uint32_t(t.type));
    add<uint64_t>(&h, offset);
    offset += aligned(t.bytes());
  }
  return h;
}

bool put_scale(float d, std::byte* block) {
  const F16 h = to_f16(d);
  std::memcpy(block, &h.bits, 2);
  return std::isfinite(to_f32(h));
}

}  // namespace

std::string_view gguf_type_name(GgufType t) {
  switch (t) {
    case GgufType::kF32:
      return "F32";
    case GgufType::kF16:
      return "F16";
    case GgufType::kQ4_0:
      return "Q4_0";
    case GgufType::kQ8_0:
      return "Q8_0";
    case GgufType::kBF16:
      return "BF16";
  }
  MI_CHECK(false, "GGUF type {}", uint32_t(t));
}

size_t gguf_row_bytes(GgufType t, int64_t cols) {
  if (t == GgufType::kF32) return size_t(cols) * 4;
  if (!in_blocks(t)) return size_t(cols) * 2;
  MI_CHECK(cols % kGgufBlock == 0, "a row of {} values has no whole number of blocks", cols);
  return size_t(cols / kGgufBlock) * (t == GgufType::kQ8_0 ? kQ8BlockBytes : kQ4BlockBytes);
}

void GgufKeys::begin(std::string_view key, uint32_t type) {
  MI_CHECK(std::find(names_.begin(), names_.end(), key) == names_.end(), "key {} twice", key);
  names_.emplace_back(key);
  add_string(&bytes_, key);
  add<uint32_t>(&bytes_, type);
}
void GgufKeys::put(std::string_view key, uint32_t v) {
  begin(key, kU32);
  add(&bytes_, v);
}
void GgufKeys::put(std::string_view key, float v) {
  begin(key, kF32);
  add(&bytes_, v);
}
void GgufKeys::put(std::string_view key, bool v) {
  begin(key, kBool);
  add<uint8_t>(&bytes_, v ? 1 : 0);
}
void GgufKeys::put(std::string_view key, std::string_view v) {
  begin(key, kString);
  add_string(&bytes_, v);
}
void GgufKeys::put(std::string_view key, const std::vector<std::string>& v) {
  begin(key, kArray);
  add<uint32_t>(&bytes_, kString);
  add<uint64_t>(&bytes_, v.size());
  for (const std::string& s : v) add_string(&bytes_, s);
}
void GgufKeys::put(std::string_view key, const std::vector<int32_t>& v) {
  begin(key, kArray);
  add<uint32_t>(&bytes_, kI32);
  add<uint64_t>(&bytes_, v.size());
  for (int32_t i : v) add(&bytes_, i);
}

void GgufKeys::append(const GgufKeys& others) {
  for (const std::string& n : others.names_)
    MI_CHECK(std::find(names_.begin(), names_.end(), n) == names_.end(), "key {} twice", n);
  names_.insert(names_.end(), others.names_.begin(), others.names_.end());
  bytes_ += others.bytes_;
}

uint64_t GgufTensor::bytes() const {
  uint64_t rows = 1;
  for (size_t i = 0; i + 1 < shape.size(); ++i) rows *= uint64_t(shape[i]);
  return rows * gguf_row_bytes(type, shape.back());
}

uint64_t gguf_file_bytes(const GgufKeys& keys, const std::vector<GgufTensor>& tensors) {
  uint64_t n = aligned(header(keys, tensors).size());
  for (const GgufTensor& t : tensors) n += aligned(t.bytes());
  return n;
}

Result<GgufWriter> GgufWriter::begin(FileWriter* out, const GgufKeys& keys, std::vector<GgufTensor> tensors) {
  MI_CHECK_EQ(out->offset(), size_t(0));
  std::unordered_set<std::string_view> names;
  for (const GgufTensor& t : tensors) {
    MI_CHECK(names.insert(t.name).second, "tensor {} twice", t.name);
    MI_CHECK(!t.shape.empty() && t.shape.size() <= 4, "{} {}", t.name, shape_text(t.shape));
  }
  MI_TRY_VOID(out->write(header(keys, tensors)));
  MI_TRY_VOID(out->pad_to(kAlignment));
  return GgufWriter(out, std::move(tensors));
}

Status GgufWriter::write(std::span<const std::byte> bytes) {
  MI_CHECK(current_ < tensors_.size(), "more bytes than the declared tensors hold");
  const GgufTensor& t = tensors_[current_];
  MI_CHECK(written_ + bytes.size() <= t.bytes(), "{}: {} bytes are too many", t.name, written_ + bytes.size());
  MI_TRY_VOID(out_->write(bytes));
  written_ += bytes.size();
  if (written_ < t.bytes()) return {};
  ++current_;
  written_ = 0;
  return out_->pad_to(kAlignment);
}

void GgufWriter::finish() const { MI_CHECK_EQ(current_, tensors_.size()); }

bool round_q8_0(const float* x, int64_t n, std::byte* out) {
  bool fits = true;
  for (int64_t at = 0; at < n; at += kGgufBlock, out += kQ8BlockBytes) {
    float most = 0;
    for (int64_t i = 0; i < kGgufBlock; ++i) most = std::max(most, std::fabs(x[at + i]));
    const float d = most / 127.0f;
    const float inverse = d >= std::numeric_limits<float>::min() ? 1.0f / d : 0.0f;  // of a subnormal d it is infinite
    fits &= put_scale(d, out);
    int8_t q[kGgufBlock];
    for (int64_t i = 0; i < kGgufBlock; ++i) {
      // Truncation and a step away from zero where the rest is a half or more: what roundf does, without its calls.
      const float v = x[at + i] * inverse;
      const int32_t whole = int32_t(v);
      const float rest = v - float(whole);
      q[i] = int8_t(whole + (rest >= 0.5f) - (rest <= -0.5f));
    }
    std::memcpy(out + 2, q, kGgufBlock);
  }
  return fits;
}

bool pack_q8_0(const int8_t* q, float scale, int64_t n, std::byte* out) {
  bool fits = true;
  for (int64_t at = 0; at < n; at += kGgufBlock, out += kQ8BlockBytes) {
    fits &= put_scale(scale, out);
    std::memcpy(out + 2, q + at, kGgufBlock);
  }
  return fits;
}

namespace {

// halves: a number + 8 each.
void store_q4_0(const uint8_t* halves, std::byte* out) {
  for (int64_t j = 0; j < kGgufBlock / 2; ++j) out[j] = std::byte(halves[j] | halves[j + kGgufBlock / 2] << 4);
}

}  // namespace

bool round_q4_0(const float* x, int64_t n, std::byte* out) {
  bool fits = true;
  for (int64_t at = 0; at < n; at += kGgufBlock, out += kQ4BlockBytes) {
    float top = 0;
    for (int64_t i = 0; i < kGgufBlock; ++i)
      if (std::fabs(x[at + i]) > std::fabs(top)) top = x[at + i];
    const float d = top / -8.0f;
    const float inverse = std::fabs(d) >= std::numeric_limits<float>::min() ? 1.0f / d : 0.0f;
    fits &= put_scale(d, out);
    uint8_t halves[kGgufBlock];
    for (int64_t i = 0; i < kGgufBlock; ++i)
      halves[i] = uint8_t(std::min(x[at + i] * inverse + 8.5f, 15.0f));
    store_q4_0(halves, out + 2);
  }
  return fits;
}

bool pack_q4_0(const int8_t* q, float scale, int64_t n, std::byte* out) {
  bool fits = true;
  for (int64_t at = 0; at < n; at += kGgufBlock, out += kQ4BlockBytes) {
    fits &= put_scale(scale, out);
    uint8_t halves[kGgufBlock];
    for (int64_t i = 0; i < kGgufBlock; ++i) halves[i] = uint8_t(q[at + i] + 8);
    store_q4_0(halves, out + 2);
  }
  return fits;
}

}  // namespace mi::model
