#include "tools/convert.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>

#include "base/place.h"
#include "base/space.h"
#include "base/util.h"
#include "ir/mir_dir.h"
#include "model/weight_writer.h"
#include "tensor/finite.h"
#include "tensor/int4.h"
#include "tools/gguf/arch.h"

namespace mi::tools {
namespace {

using gguf::FileTensor;
using model::GgufTensor;
using model::GgufType;

constexpr int64_t kChunkValues = int64_t(1) << 21;  // held in memory at once
constexpr int64_t kTaskValues = int64_t(1) << 16;   // handed to one thread

uint32_t file_type(GgufType t) {
  switch (t) {
    case GgufType::kF32:
      return 0;
    case GgufType::kF16:
      return 1;
    case GgufType::kQ4_0:
      return 2;
    case GgufType::kQ8_0:
      return 7;
    case GgufType::kBF16:
      return 32;
  }
  MI_CHECK(false, "GGUF type {}", uint32_t(t));
}

bool has_odd_rows(const FileTensor& t, GgufType wanted) {
  return !t.keep_f32 && model::in_blocks(wanted) && t.shape.back() % model::kGgufBlock != 0;
}

// The types of the file's tensors. With Q4_0, what deserves more bits gets Q8_0: the embedding and the head (llama.cpp's
// own files have Q6_K there), int8 weights, and all that a MIR with int4 weights keeps in float.
std::vector<GgufType> types_of(const std::vector<FileTensor>& tensors, GgufType wanted) {
  const bool quantized = std::any_of(tensors.begin(), tensors.end(),
                                     [](const FileTensor& t) { return t.format != ir::WeightFormat::kFloat; });
  std::vector<GgufType> types;
  for (const FileTensor& t : tensors) {
    const bool end = t.name == "token_embd.weight" || t.name == "output.weight";
    const bool four_bits = t.format == ir::WeightFormat::kW4A8 || (!quantized && !end);
    if (t.keep_f32 || has_odd_rows(t, wanted))
      types.push_back(GgufType::kF32);
    else
      types.push_back(wanted == GgufType::kQ4_0 && !four_bits ? GgufType::kQ8_0 : wanted);
  }
  return types;
}

// Writes one tensor, row by row.
class RowWriter {
 public:
  RowWriter(const ir::MirDir& m, const FileTensor& t, GgufType type) : t_(t), type_(type) {
    if (t.weight.empty()) return;
    view_ = m.weight(t.weight);
    if (t.format != ir::WeightFormat::kFloat) scale_ = to_f32_vector(m.weight(t.weight + "_scale"));
    name_ = fmt::format("{}: tensor {}", m.dir.string(), t.weight);
  }

  // A vector whose elements are reordered like rows is a matrix of one column here.
  int64_t cols() const { return t_.pair_heads > 0 && t_.shape.size() == 1 ? 1 : t_.shape.back(); }
  int64_t rows() const { return *shape_count(t_.shape) / cols(); }
  size_t row_bytes() const { return model::gguf_row_bytes(type_, cols()); }

  // Rows [first, first + n) of the file; false when a number does not fit.
  bool write(int64_t first, int64_t n, std::byte* out) const {
    std::vector<float> wide(static_cast<size_t>(cols()));
    bool fits = true;
    for (int64_t r = first; r < first + n; ++r, out += row_bytes()) fits &= row(source_row(r), wide.data(), out);
    return fits;
  }

  // The bytes of the MIR behind rows [first, first + n); not known for reordered ones, whose heads are read whole.
  std::pair<size_t, size_t> source_bytes(int64_t first, int64_t n) const {
    return {size_t(first) * source_row_bytes(), size_t(n) * source_row_bytes()};
  }
  const TensorView& view() const { return view_; }
  const std::string& name() const { return name_; }

 private:
  size_t source_row_bytes() const {
    return t_.format == ir::WeightFormat::kW4A8 ? size_t(int4_row_bytes(cols())) : size_t(cols()) * dtype_bytes(view_.dtype);
  }
  int64_t source_row(int64_t r) const {
    if (t_.pair_heads == 0) return r;
    const int64_t head = rows() / t_.pair_heads, half = head / 2, within = r % head;
    return r - within + within % 2 * half + within / 2;
  }

  bool row(int64_t r, float* wide, std::byte* out) const {
    const int64_t n = cols();
    if (t_.weight.empty()) {
      std::memcpy(wide, t_.numbers.data() + r * n, size_t(n) * 4);
    } else {
      const std::byte* from = view_.data + size_t(r) * source_row_bytes();
      if (t_.format == ir::WeightFormat::kW4A8) return int4_row(reinterpret_cast<const uint8_t*>(from), r, wide, out);
      const bool int8 = t_.format == ir::WeightFormat::kW8A8;
      if (int8 && type_ == GgufType::kQ8_0)
        return model::pack_q8_0(reinterpret_cast<const int8_t*>(from), scale_[size_t(r)], n, out);
      if (model::scan_floats(from, view_.dtype, 1, n).bad >= 0) return false;
      convert_to_f32(from, view_.dtype, wide, size_t(n));
      if (int8)
        for (int64_t i = 0; i < n; ++i) wide[i] *= scale_[size_t(r)];
    }
    if (t_.add_one)
      for (int64_t i = 0; i < n; ++i) wide[i] += 1.0f;
    return store(wide, n, out);
  }

  // A block lies within one group, so its scale is the group's.
  bool int4_row(const uint8_t* from, int64_t r, float* wide, std::byte* out) const {
    const int64_t n = cols();
    const float* scale = scale_.data() + r * int4_groups(n, t_.group);
    if (!model::in_blocks(type_)) {
      for (int64_t i = 0; i < n; ++i) wide[i] = float(int4_at(from, i)) * scale[i / t_.group];
      return store(wide, n, out);
    }
    constexpr int64_t kBlock = model::kGgufBlock;
    bool fits = true;
    for (int64_t at = 0; at < n; at += kBlock, out += model::gguf_row_bytes(type_, kBlock)) {
      int8_t q[kBlock];
      for (int64_t i = 0; i < kBlock; ++i) q[i] = int4_at(from, at + i);
      fits &= type_ == GgufType::kQ4_0 ? model::pack_q4_0(q, scale[at / t_.group], kBlock, out)
                                       : model::pack_q8_0(q, scale[at / t_.group], kBlock, out);
    }
    return fits;
  }

  bool store(const float* x, int64_t n, std::byte* out) const {
    switch (type_) {
      case GgufType::kF32:
        std::memcpy(out, x, size_t(n) * 4);
        return true;
      case GgufType::kQ4_0:
        return model::round_q4_0(x, n, out);
      case GgufType::kQ8_0:
        return model::round_q8_0(x, n, out);
      case GgufType::kBF16:
        return store_half(x, n, out, [](float f) { return to_bf16(f); });
      case GgufType::kF16:
        return store_half(x, n, out, [](float f) { return to_f16(f); });
    }
    return false;
  }
  template <typename F>
  static bool store_half(const float* x, int64_t n, std::byte* out, F round) {
    bool fits = true;
    for (int64_t i = 0; i < n; ++i) {
      const auto h = round(x[i]);
      fits &= std::isfinite(to_f32(h));
      std::memcpy(out + i * 2, &h.bits, 2);
    }
    return fits;
  }

  const FileTensor& t_;
  GgufType type_;
  TensorView view_;
  std::vector<float> scale_;  // of int8 rows, of groups of int4 rows
  std::string name_;
};

Status write_tensor(const ir::MirDir& m, const FileTensor& t, GgufType type, model::GgufWriter* out,
                    hw::ThreadPool& pool, Progress* progress) {
  const RowWriter w(m, t, type);
  const int64_t rows = w.rows(), step = std::max<int64_t>(1, kChunkValues / w.cols());
  const int64_t task_rows = std::max<int64_t>(1, kTaskValues / w.cols());
  std::vector<std::byte> buffer(size_t(std::min(step, rows)) * w.row_bytes());
  const MappedFile* file = nullptr;
  size_t base = 0;
  if (!t.weight.empty()) {
    const auto& [number, entry] = m.index.find(t.weight)->second;
    file = &m.files[size_t(number)]->file();
    base = entry->begin;
  }
  for (int64_t first = 0; first < rows; first += step) {
    const int64_t n = std::min(step, rows - first);
    const auto [at, bytes] = w.source_bytes(first, n);
    if (file) file->will_need(base + at, 2 * bytes);
    std::atomic<bool> fits = true;
    pool.run((n + task_rows - 1) / task_rows, [&](int64_t task, int) {
      const int64_t begin = task * task_rows;
      if (!w.write(first + begin, std::min(task_rows, n - begin), buffer.data() + size_t(begin) * w.row_bytes()))
        fits = false;
    });
    if (!fits && type != GgufType::kF32) {
      const TensorView v = w.view();
      if (const int64_t bad = first_not_finite(v.data, v.dtype, v.count()); bad >= 0)
        return bad_input("{} of shape {} holds {}: the model is damaged; export it again from an intact checkpoint", w.name(), shape_text(v.shape),
                         not_finite_text(v, bad));
    }
    if (!fits)
      return bad_input("{} holds numbers that are not finite as {}; {}", w.name(), model::gguf_type_name(type),
                       type == GgufType::kF32 ? "the MIR is damaged, export it again"
                                              : "try another --type (f32 holds everything finite)");
    MI_TRY_VOID(out->write({buffer.data(), size_t(n) * w.row_bytes()}));
    progress->advance(uint64_t(n) * w.row_bytes(), t.name);
    // Reordered rows of a head may lie before and after the chunk; they are dropped with the next chunk, or with the
    // tensor.
    if (file && t.pair_heads == 0) file->drop(base + at, bytes);
  }
  if (file && t.pair_heads != 0) file->drop(base, w.view().bytes);
  return {};
}

void put_general(const ir::ModelInfo& info, const std::string& arch, GgufType type, model::GgufKeys* keys) {
  keys->put("general.architecture", arch);
  keys->put("general.type", "model");
  keys->put("general.name", info.name);
  keys->put("general.file_type", file_type(type));
  keys->put("general.quantization_version", uint32_t(2));
}

}  // namespace

Result<ConvertReport> convert_to_gguf(const ConvertOptions& o, hw::ThreadPool& pool) {
  const auto start = std::chrono::steady_clock::now();
  MI_TRY_VOID(check_outside(o.model, o.output));
  MI_TRY(const ir::MirDir m, ir::MirDir::open(o.model));
  ConvertReport r;
  r.name = m.graph.info.name;
  model::GgufKeys keys;
  MI_TRY(gguf::FilePlan plan, gguf::plan_file(m));
  put_general(m.graph.info, plan.arch, o.type, &keys);
  keys.append(plan.keys);
  r.arch = plan.arch;
  r.notes = std::move(plan.notes);
  MI_TRY_VOID(gguf::put_vocab(o.model / "tokenizer", m.graph.info, o.vocab, &keys, &r.notes));

  std::vector<GgufTensor> tensors;
  int64_t odd = 0;
  uint64_t data = 0;
  std::map<std::string, int64_t> types;
  const std::vector<GgufType> chosen = types_of(plan.tensors, o.type);
  if (o.type == GgufType::kQ4_0 && std::find(chosen.begin(), chosen.end(), o.type) == chosen.end())
    return bad_input(
        "{}: no weight would be Q4_0: int8 weights are not rounded a second time, and rows of Q4_0 are multiples of {}; use "
        "--type q8_0, or convert the MIR from before quantize",
        o.model.string(), model::kGgufBlock);
  for (size_t i = 0; i < chosen.size(); ++i) {
    const FileTensor& t = plan.tensors[i];
    odd += has_odd_rows(t, o.type);
    tensors.push_back({t.name, chosen[i], t.shape});
    data += tensors.back().bytes();
    ++types[std::string(model::gguf_type_name(chosen[i]))];
  }
  r.tensors = int64_t(tensors.size());
  r.types.assign(types.begin(), types.end());
  if (odd > 0)
    r.notes.push_back(
        fmt::format("{} matrices have rows of no multiple of {} values and stay F32", odd, model::kGgufBlock));
  r.bytes = model::gguf_file_bytes(keys, tensors);

  MI_TRY(OutputFile out, OutputFile::create(o.output, o.force));
  MI_TRY_VOID(check_space(o.output, r.bytes));
  MI_TRY(model::GgufWriter writer, model::GgufWriter::begin(&out.writer(), keys, std::move(tensors)));
  Progress progress("convert", data, true);
  for (size_t i = 0; i < plan.tensors.size(); ++i)
    MI_TRY_VOID(write_tensor(m, plan.tensors[i], writer.tensors()[i].type, &writer, pool, &progress));
  progress.done();
  writer.finish();
  MI_CHECK_EQ(out.writer().offset(), r.bytes);
  MI_TRY_VOID(out.commit());
  r.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return r;
}

std::string report_text(const ConvertReport& r) {
  std::string s = fmt::format("model         {}, {} {}\n", r.name,
                              r.format == "gguf" ? "llama.cpp architecture" : "model type", r.arch);
  std::string types;
  for (const auto& [name, n] : r.types) types += fmt::format("{}{} {}", types.empty() ? "" : ", ", n, name);
  s += fmt::format("tensors       {} ({})\n", r.tensors, types);
  s += fmt::format("{:<14}{}\n", r.format == "gguf" ? "file" : "weights", human_bytes(double(r.bytes)));
  for (const std::string& n : r.notes) s += "note          " + n + "\n";
  s += fmt::format("time          {}, {}/s\n", human_seconds(r.seconds),
                   human_bytes(double(r.bytes) / std::max(r.seconds, 1e-3)));
  return s;
}

Json report_json(const ConvertReport& r) {
  Json types = Json::object();
  for (const auto& [name, n] : r.types) types[name] = n;
  return {{"format", r.format}, {"name", r.name},   {"architecture", r.arch}, {"tensors", r.tensors},
          {"types", types},     {"bytes", r.bytes}, {"notes", r.notes},       {"seconds", r.seconds}};
}

}  // namespace mi::tools
