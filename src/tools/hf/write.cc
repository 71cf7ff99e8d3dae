#include "tools/hf/write.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "base/check.h"
#include "base/json.h"
#include "tensor/int4.h"

namespace mi::tools::hf {
namespace {

using ir::WeightFormat;

constexpr int64_t kChunkBytes = int64_t(4) << 20;

uint64_t bytes_of(const FileTensor& t) { return uint64_t(*shape_count(t.shape)) * dtype_bytes(t.dtype); }

// Numbers of one float type as another; false when one is not finite there.
bool convert(const std::byte* from, DType a, std::byte* to, DType b, int64_t n, bool* exact, std::vector<float>* wide) {
  if (a == b) {
    std::memcpy(to, from, size_t(n) * dtype_bytes(a));
    return true;
  }
  wide->resize(size_t(n));
  convert_to_f32(from, a, wide->data(), size_t(n));
  bool fits = true;
  for (int64_t i = 0; i < n; ++i) {
    const float x = (*wide)[size_t(i)];
    float back = x;
    if (b == DType::kF32) {
      std::memcpy(to + i * 4, &x, 4);
    } else {
      const uint16_t u = b == DType::kBF16 ? to_bf16(x).bits : to_f16(x).bits;
      std::memcpy(to + i * 2, &u, 2);
      back = b == DType::kBF16 ? to_f32(BF16{u}) : to_f32(F16{u});
    }
    fits &= std::isfinite(back);
    *exact &= back == x;
  }
  return fits;
}

// The numbers of a packed tensor's piece to where its view, inside of `base`, has them.
void scatter(const model::StridedView& v, const std::byte* from, std::byte* base) {
  const size_t size = dtype_bytes(v.dtype), rank = v.dim.size();
  const int64_t inner = v.dim.back(), step = v.stride.back() * int64_t(size);
  std::vector<int64_t> at(rank, 0);
  for (int64_t i = 0, n = v.count() / inner; i < n; ++i) {
    int64_t offset = v.data - base;
    for (size_t d = 0; d + 1 < rank; ++d) offset += at[d] * v.stride[d] * int64_t(size);
    for (int64_t c = 0; c < inner; ++c, from += size, offset += step) std::memcpy(base + offset, from, size);
    for (size_t d = rank - 1; d-- > 0;) {
      if (++at[d] < v.dim[d]) break;
      at[d] = 0;
    }
  }
}

// Operations that act on each matrix of a stack alike.
bool by_matrix(const std::vector<model::ViewOp>& ops) {
  using Kind = model::ViewOp::Kind;
  return std::none_of(ops.begin(), ops.end(),
                      [](const model::ViewOp& o) { return o.kind == Kind::kReshape || o.kind == Kind::kSqueeze; });
}

class Writer {
 public:
  Writer(const ir::MirDir& m, Progress* progress) : m_(m), progress_(progress) {}

  Status write(const FileTensor& t, SafetensorsWriter* out) {
    out_ = out;
    const Piece& p = t.pieces.front();
    bool exact = true;
    switch (t.content) {
      case Content::kShape:
        MI_TRY_VOID(shape(t));
        break;
      case Content::kScales:
        MI_TRY_VOID(p.decl->format == WeightFormat::kW8A8 ? plain(t, p.weight + "_scale", p, &exact) : int4_scales(t));
        break;
      case Content::kNumbers:
        if (p.decl->format == WeightFormat::kW4A8)
          MI_TRY_VOID(int4_numbers(t));
        else if (p.ops.empty())
          MI_TRY_VOID(plain(t, p.weight, p, &exact));
        else
          MI_TRY_VOID(packed(t, &exact));
    }
    done_.rounded += !exact;
    return {};
  }
  const Written& done() const { return done_; }

 private:
  // Elements [first, ..) of a weight's tensor in the MIR that belong to the piece.
  int64_t first_element(const Piece& p, int64_t rows_of_expert, int64_t cols) const {
    return ((p.expert < 0 ? 0 : p.expert * rows_of_expert) + p.first_row) * cols;
  }
  const MappedFile& file_of(const std::string& weight, size_t* begin) const {
    const auto& [number, entry] = m_.index.find(weight)->second;
    *begin = entry->begin;
    return m_.files[size_t(number)]->file();
  }
  Status emit(const std::byte* data, size_t n, const std::string& name) {
    MI_TRY_VOID(out_->write({data, n}));
    done_.bytes += n;
    progress_->advance(n, name);
    return {};
  }
  Error not_finite(const std::string& weight, DType type) const {
    return bad_input("{}: tensor {} holds numbers that are not finite as {}; {}", m_.dir.string(), weight,
                     dtype_name(type),
                     type == DType::kF32 ? "the MIR is damaged, export it again"
                                         : "try another --type (f32 holds everything finite)");
  }

  Status shape(const FileTensor& t) {
    const int64_t s[2] = {t.pieces[0].decl->shape[t.pieces[0].decl->shape.size() - 2], t.pieces[0].decl->shape.back()};
    return emit(reinterpret_cast<const std::byte*>(s), sizeof s, t.name);
  }

  // A tensor whose numbers lie in the MIR in the same order.
  Status plain(const FileTensor& t, const std::string& weight, const Piece& p, bool* exact) {
    const TensorView v = m_.weight(weight);
    const int64_t count = *shape_count(t.shape);
    // What one row of the weight is here: one scale, a row of numbers, an element of a vector.
    const int64_t cols = t.content == Content::kScales || p.is_vector() ? 1 : t.shape.back();
    const int64_t experts = p.expert < 0 ? 1 : v.shape[0];
    const int64_t first = first_element(p, v.count() / experts / cols, cols);
    const size_t element = dtype_bytes(v.dtype);
    size_t begin = 0;
    const MappedFile& file = file_of(weight, &begin);
    begin += size_t(first) * element;
    file.will_need(begin, size_t(count) * element);
    const int64_t step = kChunkBytes / int64_t(element);
    for (int64_t i = 0; i < count; i += step) {
      const int64_t n = std::min(step, count - i);
      const std::byte* from = v.data + size_t(first + i) * element;
      if (v.dtype == t.dtype) {
        MI_TRY_VOID(emit(from, size_t(n) * element, t.name));
        continue;
      }
      buffer_.resize(size_t(n) * dtype_bytes(t.dtype));
      if (!convert(from, v.dtype, buffer_.data(), t.dtype, n, exact, &wide_)) return not_finite(weight, t.dtype);
      MI_TRY_VOID(emit(buffer_.data(), buffer_.size(), t.name));
    }
    if (size_t(count) * element >= size_t(kChunkBytes)) file.drop(begin, size_t(count) * element);
    return {};
  }

  // Expert by expert, or whole where the shape changes.
  Status packed(const FileTensor& t, bool* exact) {
    const bool vectors = t.pieces[0].is_vector();
    const bool each = t.shape.size() == (vectors ? 2u : 3u) &&
                      std::all_of(t.pieces.begin(), t.pieces.end(), [](const Piece& p) { return by_matrix(p.ops); });
    const int64_t parts = each ? t.shape[0] : 1;
    const Shape part_shape(t.shape.begin() + (each ? 1 : 0), t.shape.end());
    buffer_.resize(size_t(*shape_count(part_shape)) * dtype_bytes(t.dtype));
    for (int64_t e = 0; e < parts; ++e) {
      for (const Piece& p : t.pieces) {
        const TensorView v = m_.weight(p.weight);
        const int64_t n = v.count() / parts;
        piece_.resize(size_t(n) * dtype_bytes(t.dtype));
        if (!convert(v.data + size_t(e * n) * dtype_bytes(v.dtype), v.dtype, piece_.data(), t.dtype, n, exact, &wide_))
          return not_finite(p.weight, t.dtype);
        const auto view =
            model::apply(p.ops, model::view_of({t.dtype, part_shape, buffer_.data(), buffer_.size()}), p.is_vector());
        MI_CHECK(view.ok() && view->count() == n, "{}", t.name);
        scatter(*view, piece_.data(), buffer_.data());
      }
      MI_TRY_VOID(emit(buffer_.data(), buffer_.size(), t.name));
    }
    return {};
  }

  // Rows of int4 numbers with their scales, signs settled; `take` gets both.
  template <class F>
  Status int4_rows(const FileTensor& t, const F& take) {
    const Piece& p = t.pieces[0];
    const ir::WeightDecl& d = *p.decl;
    const int64_t k = d.shape.back(), groups = k / d.group, rows = t.shape[0], half = k / 2;
    const int64_t of_expert = d.shape[d.shape.size() - 2];
    const std::byte* numbers = m_.weight(p.weight).data + first_element(p, of_expert, half);
    const std::byte* scales = m_.weight(p.weight + "_scale").data + first_element(p, of_expert, groups) * 4;
    const int64_t step = std::max<int64_t>(1, kChunkBytes / k);
    std::vector<float> scale;
    for (int64_t r = 0; r < rows; r += step) {
      const int64_t n = std::min(step, rows - r);
      halves_.resize(size_t(n * half));
      std::memcpy(halves_.data(), numbers + r * half, halves_.size());
      scale.resize(size_t(n * groups));
      std::memcpy(scale.data(), scales + r * groups * 4, scale.size() * 4);
      int64_t negative = 0;
      for (int64_t g = 0; g < n * groups; ++g)
        negative += !make_positive(halves_.data() + g * d.group / 2, d.group, &scale[size_t(g)]);
      MI_TRY_VOID(take(scale, negative));
    }
    return {};
  }
  Status int4_numbers(const FileTensor& t) {
    return int4_rows(t, [&](const std::vector<float>& scale, int64_t negative) {
      done_.groups += int64_t(scale.size());
      done_.negative += negative;
      // Lowest bits first in 32-bit words, each number + 8: little-endian, these are the same bytes.
      return emit(reinterpret_cast<const std::byte*>(halves_.data()), halves_.size(), t.name);
    });
  }
  Status int4_scales(const FileTensor& t) {
    return int4_rows(t, [&](const std::vector<float>& scale, int64_t) {
      buffer_.resize(scale.size() * dtype_bytes(t.dtype));
      bool exact = true;
      const bool fits = convert(reinterpret_cast<const std::byte*>(scale.data()), DType::kF32, buffer_.data(), t.dtype,
                                int64_t(scale.size()), &exact, &wide_);
      MI_CHECK(fits && exact, "{}", t.name);  // the plan chose the type by the scales
      return emit(buffer_.data(), buffer_.size(), t.name);
    });
  }

  const ir::MirDir& m_;
  Progress* progress_;
  SafetensorsWriter* out_ = nullptr;
  Written done_;
  std::vector<std::byte> buffer_, piece_;
  std::vector<uint8_t> halves_;
  std::vector<float> wide_;
};

}  // namespace

bool make_positive(uint8_t* halves, int64_t count, float* scale) {
  if (!(*scale < 0)) return true;
  for (int64_t i = 0; i < count / 2; ++i)
    if ((halves[i] & 15) == 0 || halves[i] >> 4 == 0) return false;
  // 8 + q becomes 8 - q in both halves; neither borrows from the other.
  for (int64_t i = 0; i < count / 2; ++i) halves[i] = uint8_t((16 - (halves[i] & 15)) | (16 - (halves[i] >> 4)) << 4);
  *scale = -*scale;
  return true;
}

uint64_t tensor_bytes(const FilePlan& plan) {
  uint64_t n = 0;
  for (const FileTensor& t : plan.tensors) n += bytes_of(t);
  return n;
}

Result<Written> write_files(const ir::MirDir& m, const FilePlan& plan, const Path& out, uint64_t shard_bytes,
                            Progress* progress) {
  std::vector<size_t> ends;  // shard s holds tensors [ends[s - 1], ends[s])
  uint64_t bytes = 0;
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    const uint64_t n = bytes_of(plan.tensors[i]);
    if (bytes > 0 && bytes + n > shard_bytes) {
      ends.push_back(i);
      bytes = 0;
    }
    bytes += n;
  }
  ends.push_back(plan.tensors.size());
  Writer w(m, progress);
  Json places = Json::object();
  size_t begin = 0;
  for (size_t s = 0; s < ends.size(); ++s) {
    const std::string name =
        ends.size() == 1 ? "model.safetensors" : fmt::format("model-{:05}-of-{:05}.safetensors", s + 1, ends.size());
    std::vector<SafetensorsWriter::Decl> decls;
    for (size_t i = begin; i < ends[s]; ++i) {
      const FileTensor& t = plan.tensors[i];
      decls.push_back({t.name, t.dtype, t.shape});
      places.get_ref<Json::object_t&>().emplace_back(t.name,
                                                     name);  // the plan's names differ; an ordered object searches
    }
    MI_TRY(SafetensorsWriter file, SafetensorsWriter::create(out / name, std::move(decls)));
    for (size_t i = begin; i < ends[s]; ++i) MI_TRY_VOID(w.write(plan.tensors[i], &file));
    MI_TRY_VOID(file.finish());
    begin = ends[s];
  }
  Written done = w.done();
  done.files = int64_t(ends.size());
  if (ends.size() > 1) {
    const Json index = {{"metadata", {{"total_size", done.bytes}}}, {"weight_map", std::move(places)}};
    MI_TRY_VOID(write_file(out / "model.safetensors.index.json", dump_json(index, 1) + "\n"));
  }
  return done;
}

}  // namespace mi::tools::hf
