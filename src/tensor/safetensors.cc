#include "tensor/safetensors.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <tuple>

#include "base/json.h"

namespace mi {
namespace {

// The reference implementation refuses headers above 100 MB; real checkpoints with a million tensors exceed that.
constexpr uint64_t kMaxHeader = uint64_t(512) << 20;

std::optional<uint64_t> as_u64(const Json& j) {
  if (j.is_number_unsigned()) return j.get<uint64_t>();
  if (j.is_number_integer() && j.get<int64_t>() >= 0) return uint64_t(j.get<int64_t>());
  return std::nullopt;
}

Status read_metadata(const Json& j, const std::string& what, std::map<std::string, std::string>* metadata) {
  if (!j.is_object()) return bad_input("{}: __metadata__ must be an object of strings", what);
  for (const auto& [key, text] : j.items()) {
    if (!text.is_string()) return bad_input("{}: __metadata__: '{}' is not a string", what, key);
    if (metadata) (*metadata)[key] = text.get<std::string>();
  }
  return {};
}

Result<Safetensors::Entry> read_entry(std::string name, const Json& j, uint64_t data_bytes, const std::string& what) {
  const std::string at = fmt::format("{}: tensor '{}'", what, name);
  if (!j.is_object()) return bad_input("{}: expected an object with dtype, shape and data_offsets", at);
  MI_TRY_VOID(refuse_unknown_keys(j, {"dtype", "shape", "data_offsets"}, at));
  MI_TRY(const std::string dtype_text, json_get<std::string>(j, "dtype", at));
  const auto dtype = dtype_from_name(dtype_text);
  if (!dtype) return bad_input("{}: unknown dtype '{}'", at, dtype_text);

  Safetensors::Entry e{std::move(name), *dtype, {}, 0, 0};
  if (!j.contains("shape") || !j["shape"].is_array()) return bad_input("{}: shape must be a list of sizes", at);
  for (const Json& d : j["shape"]) {
    const auto size = as_u64(d);
    if (!size || *size > uint64_t(INT64_MAX)) return bad_input("{}: shape holds something that is no size: {}", at, dump_json(d));
    e.shape.push_back(int64_t(*size));
  }
  if (!j.contains("data_offsets") || !j["data_offsets"].is_array() || j["data_offsets"].size() != 2)
    return bad_input("{}: data_offsets must be two numbers", at);
  const auto begin = as_u64(j["data_offsets"][0]), end = as_u64(j["data_offsets"][1]);
  if (!begin || !end) return bad_input("{}: data_offsets must be two numbers", at);
  if (*begin > *end) return bad_input("{}: data_offsets end ({}) before they begin ({})", at, *end, *begin);
  if (*end > data_bytes)
    return bad_input("{}: its data ends at byte {}, but only {} bytes follow the header: the file is truncated or damaged; fetch it again", at, *end, data_bytes);
  const auto count = shape_count(e.shape);
  int64_t bytes = 0;
  if (!count || __builtin_mul_overflow(*count, int64_t(dtype_bytes(e.dtype)), &bytes))
    return bad_input("{}: the product of its shape {} overflows", at, shape_text(e.shape));
  if (uint64_t(bytes) != *end - *begin)
    return bad_input("{}: shape {} of {} needs {} bytes, data_offsets give {}", at, shape_text(e.shape), dtype_text, bytes, *end - *begin);
  e.begin = *begin;
  e.end = *end;
  return e;
}

}  // namespace

Result<std::vector<Safetensors::Entry>> Safetensors::parse_header(std::string_view header, uint64_t data_bytes, const std::string& what,
                                                                  std::map<std::string, std::string>* metadata) {
  JsonLimits limits;
  limits.max_depth = 8;
  std::vector<Entry> entries;
  // Member by member: the whole tree of a header with a million tensors would take a gigabyte.
  MI_TRY_VOID(parse_json_members(header, what + ": header", limits, [&](std::string name, Json value) -> Status {
    if (name == "__metadata__") return read_metadata(value, what, metadata);
    MI_TRY(Entry e, read_entry(std::move(name), value, data_bytes, what));
    entries.push_back(std::move(e));
    return {};
  }));
  // In order of bytes; empty tensors first among those that begin at one place.
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name); });
  uint64_t at = 0;
  const Entry* before = nullptr;
  for (const Entry& e : entries) {
    if (e.begin < at) return bad_input("{}: the tensors '{}' (up to byte {}) and '{}' (from byte {}) share bytes", what, before->name, at, e.name, e.begin);
    if (e.begin > at) return bad_input("{}: {} bytes before tensor '{}' belong to none", what, e.begin - at, e.name);
    at = e.end;
    before = &e;
  }
  if (at != data_bytes) return bad_input("{}: {} bytes at the end belong to no tensor: the file is damaged or something was appended", what, data_bytes - at);
  return entries;
}

Result<Safetensors> Safetensors::open(const Path& path) {
  Safetensors s;
  MI_TRY(s.file_, MappedFile::open(path));
  const std::span<const std::byte> b = s.file_.bytes();
  const std::string what = path.string();
  if (b.size() < 8) return bad_input("{}: {} bytes are too few for a safetensors file: it is {}; fetch it again", what, b.size(), b.empty() ? "empty" : "cut off");
  uint64_t header = 0;
  std::memcpy(&header, b.data(), 8);
  if (header > b.size() - 8)
    return bad_input("{}: its header should have {} bytes, but the file has {} in all: it is truncated, or no safetensors file", what, header, b.size());
  if (header > kMaxHeader) return bad_input("{}: its header has {} bytes, more than the limit of {}", what, header, kMaxHeader);
  const uint64_t data = 8 + header;
  MI_TRY(s.entries_, parse_header(std::string_view(reinterpret_cast<const char*>(b.data()) + 8, header), b.size() - data, what, &s.metadata_));
  for (size_t i = 0; i < s.entries_.size(); ++i) {
    s.entries_[i].begin += data;
    s.entries_[i].end += data;
    s.by_name_[s.entries_[i].name] = i;
  }
  return s;
}

const Safetensors::Entry* Safetensors::find(std::string_view name) const {
  const auto it = by_name_.find(name);
  return it == by_name_.end() ? nullptr : &entries_[it->second];
}

TensorView Safetensors::view(const Entry& e) const { return {e.dtype, e.shape, file_.bytes().data() + e.begin, e.end - e.begin}; }

Result<TensorView> Safetensors::tensor(std::string_view name) const {
  const Entry* e = find(name);
  if (!e) return bad_input("{}: holds no tensor '{}'", file_.path().string(), name);
  return view(*e);
}

Result<SafetensorsWriter> SafetensorsWriter::create(const Path& path, std::vector<Decl> decls) {
  MI_TRY(FileWriter f, FileWriter::create(path));
  SafetensorsWriter w(std::move(f));
  std::string text = R"({"__metadata__":{"format":"pt"})";
  std::set<std::string_view> names;
  for (const Decl& d : decls) {
    const auto count = shape_count(d.shape);
    MI_CHECK(count && names.insert(d.name).second, "{} {}", d.name, shape_text(d.shape));
    const size_t bytes = size_t(*count) * dtype_bytes(d.dtype);
    text += fmt::format(R"(,{}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", dump_json(d.name), dtype_name(d.dtype), fmt::join(d.shape, ","), w.expected_,
                        w.expected_ + bytes);
    w.expected_ += bytes;
  }
  text += "}";
  text.resize((text.size() + 7) / 8 * 8, ' ');      // data starts 8-byte aligned
  const uint64_t n = text.size();
  MI_TRY_VOID(w.file_.write(std::as_bytes(std::span(&n, 1))));
  MI_TRY_VOID(w.file_.write(text));
  return w;
}

Status SafetensorsWriter::write(std::span<const std::byte> bytes) {
  written_ += bytes.size();
  MI_CHECK_LE(written_, expected_);
  return file_.write(bytes);
}

Status SafetensorsWriter::finish() {
  MI_CHECK_EQ(written_, expected_);
  return file_.finish();
}

}  // namespace mi
