#include "model/formats/stored.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "model/formats/codes.h"

namespace mi::model::formats {
namespace {

using Tensor = Checkpoint::Tensor;

constexpr std::string_view kPacked = "_packed", kQWeight = "qweight", kBlocks = "_blocks", kWeight = ".weight";
constexpr int64_t kMaxRowsAtOnce = 64;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
std::string without(const std::string& s, std::string_view tail) { return s.substr(0, s.size() - tail.size()); }

class Finder {
 public:
  Finder(const Checkpoint& k, const Tensor& t, const Format& f) : k_(k), t_(t) {
    s_.format = f;
    s_.main = &t;
    s_.tensors.push_back(&t);
  }

  Result<Stored> run() {
    const std::string module = module_name(t_.name());
    switch (s_.format.layout) {
      case Layout::kInt8:
      case Layout::kFloat8:
        MI_TRY_VOID(scaled());
        break;
      case Layout::kPackedInt:
        MI_TRY_VOID(packed_int(module));
        break;
      case Layout::kNvFp4:
      case Layout::kMxFp4:
      case Layout::kNvFp4ModelOpt:
        MI_TRY_VOID(fp4(module));
        break;
      case Layout::kMxFp4Blocks:
        MI_TRY_VOID(fp4_blocks());
        break;
      case Layout::kGptq:
      case Layout::kAwq:
        MI_TRY_VOID(in_major(module));
        break;
      case Layout::kGguf:
        s_.shape = t_.entry->shape;
        return std::move(s_);
    }
    for (const char* tail : {"input_scale", "input_zero_point", "input_global_scale", "bias_scale"})
      if (const Tensor* t = k_.find(module + "." + tail)) s_.tensors.push_back(t);
    return std::move(s_);
  }

 private:
  const Format& format() const { return s_.format; }

  Result<const Tensor*> sibling(const std::string& name) {
    const Tensor* t = k_.find(name);
    if (!t)
      return bad_input("{}: tensor {} is missing: {} is {} and needs it", t_.path(), name, t_.name(),
                       dtype_name(t_.entry->dtype));
    s_.tensors.push_back(t);
    return t;
  }
  Status expect_shape(const Tensor& t, std::initializer_list<Shape> shapes, const std::string& why) const {
    if (std::find(shapes.begin(), shapes.end(), t.entry->shape) != shapes.end()) return {};
    return bad_input("{}: tensor {} has shape {}, expected {}: {}", t.path(), t.name(), shape_text(t.entry->shape),
                     shape_text(*shapes.begin()), why);
  }
  Status expect_dtype(const Tensor& t, std::initializer_list<DType> types) const {
    if (std::find(types.begin(), types.end(), t.entry->dtype) != types.end()) return {};
    std::string names;
    for (DType d : types) names += (names.empty() ? "" : " or ") + std::string(dtype_name(d));
    return bad_input("{}: tensor {} is {}, expected {}: quantization_config says that it is stored as {}", t.path(),
                     t.name(), dtype_name(t.entry->dtype), names, format().text());
  }
  Status expect_rank(const Tensor& t, size_t rank) const {
    const Shape& s = t.entry->shape;
    if (s.size() == rank && std::all_of(s.begin(), s.end(), [](int64_t d) { return d > 0; })) return {};
    return bad_input("{}: tensor {} has shape {}; {} is read in {} dimensions", t.path(), t.name(), shape_text(s),
                     format().text(), rank);
  }
  static constexpr std::initializer_list<DType> kPlain = {DType::kF32, DType::kBF16, DType::kF16};

  // Columns and rows of the grid of scales over [rows, cols].
  int64_t grid_rows(int64_t rows) const {
    return format().strategy == Strategy::kTensor  ? 1
           : format().strategy == Strategy::kBlock ? divide_up(rows, format().block_rows)
                                                   : rows;
  }
  int64_t grid_cols(int64_t cols) const {
    return format().strategy == Strategy::kGroup && format().group > 0 ? divide_up(cols, format().group)
           : format().strategy == Strategy::kBlock                     ? divide_up(cols, format().block_cols)
                                                                       : 1;
  }
  Status expect_grid(const Tensor& t) const {
    const int64_t rows = s_.shape[0], cols = s_.shape[1], gr = grid_rows(rows), gc = grid_cols(cols);
    const std::string of = shape_text(s_.shape);
    switch (format().strategy) {
      case Strategy::kTensor:
        return expect_shape(t, {{1}, {}, {1, 1}}, "one scale for the matrix");
      case Strategy::kChannel:
        return expect_shape(t, {{gr, 1}, {gr}}, "one scale per row");
      case Strategy::kGroup:  // compressed-tensors makes no other: a group that does not divide contradicts the file
        MI_TRY_VOID(whole_groups());
        return expect_shape(t, {{gr, gc}}, fmt::format("{} in groups of {}", of, format().group));
      case Strategy::kBlock:
        return expect_shape(t, {{gr, gc}},
                            fmt::format("{} in blocks of [{}, {}]", of, format().block_rows, format().block_cols));
    }
    return {};
  }

  Status scaled() {
    MI_TRY_VOID(expect_dtype(t_, {format().layout == Layout::kInt8 ? DType::kI8 : DType::kF8E4M3}));
    MI_TRY_VOID(expect_rank(t_, 2));
    s_.shape = t_.entry->shape;
    const bool inverse = format().layout == Layout::kFloat8 && format().strategy == Strategy::kBlock &&
                         (k_.find(t_.name() + "_scale_inv") || !k_.find(t_.name() + "_scale"));
    MI_TRY(s_.scale, sibling(t_.name() + (inverse ? "_scale_inv" : "_scale")));
    MI_TRY_VOID(expect_dtype(*s_.scale, {DType::kF32, DType::kBF16, DType::kF16, DType::kU8, DType::kF8E8M0}));
    MI_TRY_VOID(expect_grid(*s_.scale));
    const Tensor* zero = k_.find(t_.name() + "_zero_point");
    if (!zero) {
      if (format().layout == Layout::kInt8 && !format().symmetric) return sibling(t_.name() + "_zero_point").error();
      return {};
    }
    s_.tensors.push_back(zero);
    if (!format().symmetric) {
      MI_TRY_VOID(expect_dtype(*zero, {DType::kI8}));
      MI_TRY_VOID(expect_grid(*zero));
      s_.zero = zero;
      return {};
    }
    const TensorView v = zero->view();
    if (std::any_of(v.data, v.data + v.bytes, [](std::byte b) { return b != std::byte(0); }))
      return bad_input("{}: tensor {} is not zero, but quantization_config says that the weights are symmetric",
                       zero->path(), zero->name());
    return {};
  }

  Result<Shape> stated_shape(const std::string& module) {
    MI_TRY(const Tensor* t, sibling(module + ".weight_shape"));
    MI_TRY_VOID(expect_dtype(*t, {DType::kI64, DType::kI32}));
    MI_TRY_VOID(expect_shape(*t, {{2}}, "rows and columns"));
    const TensorView v = t->view();
    Shape s(2);
    for (size_t i = 0; i < 2; ++i) {
      int32_t narrow = 0;
      if (v.dtype == DType::kI64) {
        std::memcpy(&s[i], v.data + i * 8, 8);
      } else {
        std::memcpy(&narrow, v.data + i * 4, 4);
        s[i] = narrow;
      }
      if (s[i] < 1 || s[i] > (int64_t(1) << 31))
        return bad_input("{}: tensor {} says {}, which is no number of rows or columns", t->path(), t->name(), s[i]);
    }
    return s;
  }

  Status packed_int(const std::string& module) {
    MI_TRY_VOID(expect_dtype(t_, {DType::kI32}));
    MI_TRY_VOID(expect_rank(t_, 2));
    MI_TRY(s_.shape, stated_shape(module));
    const int64_t out = s_.shape[0], in = s_.shape[1], per_word = 32 / format().bits;
    MI_TRY_VOID(expect_shape(t_, {{out, divide_up(in, per_word)}},
                             fmt::format("{} of {} bits", shape_text(s_.shape), format().bits)));
    MI_TRY(s_.scale, sibling(module + ".weight_scale"));
    MI_TRY_VOID(expect_dtype(*s_.scale, kPlain));
    MI_TRY_VOID(expect_grid(*s_.scale));
    if (!format().symmetric) {
      MI_TRY(s_.zero, sibling(module + ".weight_zero_point"));
      MI_TRY_VOID(expect_dtype(*s_.zero, {DType::kI32}));
      MI_TRY_VOID(expect_shape(*s_.zero, {{divide_up(grid_rows(out), per_word), grid_cols(in)}},
                               "zero points packed along the rows"));
    }
    return index(module + ".weight_g_idx", in);
  }

  Status index(const std::string& name, int64_t in) {
    s_.group_index = k_.find(name);
    if (!s_.group_index && format().group_index) return sibling(name).error();
    if (!s_.group_index) return {};
    s_.tensors.push_back(s_.group_index);
    MI_TRY_VOID(expect_dtype(*s_.group_index, {DType::kI32}));
    return expect_shape(*s_.group_index, {{in}}, "one group for each input");
  }

  Status fp4(const std::string& module) {
    MI_TRY_VOID(expect_dtype(t_, {DType::kU8}));
    MI_TRY_VOID(expect_rank(t_, 2));
    s_.shape = {t_.entry->shape[0], t_.entry->shape[1] * 2};
    MI_TRY_VOID(whole_groups());
    const bool mx = format().layout == Layout::kMxFp4;
    MI_TRY(s_.scale, sibling(module + ".weight_scale"));
    if (mx)
      MI_TRY_VOID(expect_dtype(*s_.scale, {DType::kU8, DType::kF8E8M0}));
    else
      MI_TRY_VOID(expect_dtype(*s_.scale, {DType::kF8E4M3}));
    MI_TRY_VOID(expect_grid(*s_.scale));
    if (mx) return {};
    MI_TRY(s_.global,
           sibling(module + (format().layout == Layout::kNvFp4 ? ".weight_global_scale" : ".weight_scale_2")));
    MI_TRY_VOID(expect_dtype(*s_.global, {DType::kF32}));
    return expect_shape(*s_.global, {{1}, {}, {1, 1}}, "one factor for the matrix");
  }

  Status fp4_blocks() {
    MI_TRY_VOID(expect_dtype(t_, {DType::kU8}));
    MI_TRY_VOID(expect_rank(t_, 4));
    const Shape& b = t_.entry->shape;
    if (b[3] * 2 != format().group)
      return bad_input("{}: tensor {} has shape {}, expected [experts, out, in / 32, 16]", t_.path(), t_.name(),
                       shape_text(b));
    s_.shape = {b[0], b[1], b[2] * format().group};
    MI_TRY(s_.scale, sibling(without(t_.name(), kBlocks) + "_scales"));
    MI_TRY_VOID(expect_dtype(*s_.scale, {DType::kU8, DType::kF8E8M0}));
    return expect_shape(*s_.scale, {{b[0], b[1], b[2]}}, fmt::format("one scale for each block of {}", t_.name()));
  }

  // GPTQ and AWQ: [in, out].
  Status in_major(const std::string& module) {
    const bool awq = format().layout == Layout::kAwq;
    MI_TRY_VOID(expect_dtype(t_, {DType::kI32}));
    MI_TRY_VOID(expect_rank(t_, 2));
    const int64_t per_word = 32 / format().bits;
    s_.shape = awq ? Shape{t_.entry->shape[1] * per_word, t_.entry->shape[0]}
                   : Shape{t_.entry->shape[1], t_.entry->shape[0] * per_word};
    const int64_t out = s_.shape[0], in = s_.shape[1], groups = grid_cols(in);
    if (awq && format().group > 0) MI_TRY_VOID(whole_groups());  // WQLinear_GEMM takes no other; GPTQ's last group may be short
    const std::string why =
        fmt::format("{} in groups of {} inputs", shape_text(s_.shape), format().group > 0 ? format().group : in);
    MI_TRY(s_.scale, sibling(module + ".scales"));
    MI_TRY_VOID(expect_dtype(*s_.scale, kPlain));
    MI_TRY_VOID(expect_shape(*s_.scale, {{groups, out}}, why));
    MI_TRY(s_.zero, sibling(module + ".qzeros"));
    MI_TRY_VOID(expect_dtype(*s_.zero, {DType::kI32}));
    MI_TRY_VOID(expect_shape(*s_.zero, {{groups, divide_up(out, per_word)}}, why));
    if (out % per_word != 0)
      return bad_input("{}: tensor {} has {} outputs, no multiple of the {} of a word", t_.path(), t_.name(), out,
                       per_word);
    return awq ? Status() : index(module + ".g_idx", in);
  }

  Status whole_groups() const {
    if (s_.shape.back() % format().group == 0) return {};
    return bad_input("{}: tensor {} has {} inputs, no multiple of the group of {} that quantization_config gives; correct it", t_.path(), t_.name(),
                     s_.shape.back(), format().group);
  }

  const Checkpoint& k_;
  const Tensor& t_;
  Stored s_;
};

// The group of each input, every one below `groups`.
Result<std::vector<int32_t>> read_groups(const Stored& s, int64_t groups) {
  const int64_t in = s.cols(), size = s.format.group > 0 ? s.format.group : in;
  std::vector<int32_t> out(static_cast<size_t>(in));
  if (!s.group_index) {
    for (int64_t c = 0; c < in; ++c) out[size_t(c)] = groups > 1 ? int32_t(c / size) : 0;
    return out;
  }
  const Tensor& t = *s.group_index;
  std::memcpy(out.data(), t.view().data, out.size() * 4);
  for (int64_t c = 0; c < in; ++c) {
    const int32_t g = out[size_t(c)];
    if (g < 0 || g >= groups)
      return bad_input("{}: tensor {}: input {} belongs to group {}, but there are only {} groups", t.path(), t.name(),
                       c, g, groups);
  }
  return out;
}

bool holds(DType t, float f) {
  if (t == DType::kBF16) return (std::bit_cast<uint32_t>(f) & 0xffff) == 0;
  return t == DType::kF32 || std::bit_cast<uint32_t>(to_f32(to_f16(f))) == std::bit_cast<uint32_t>(f);
}

}  // namespace

std::string weight_name(const std::string& n) {
  if (n.ends_with(".weight_packed")) return without(n, kPacked);
  if (n.ends_with(".qweight")) return without(n, kQWeight) + "weight";
  if (n.ends_with(kBlocks)) return without(n, kBlocks);
  return n;
}

std::string module_name(const std::string& tensor) {
  const std::string n = weight_name(tensor);
  return n.ends_with(kWeight) ? without(n, kWeight) : n;
}

bool is_quantized(const Tensor& t) {
  if (t.gguf_type) return true;
  const DType d = t.entry->dtype;
  return d != DType::kF32 && d != DType::kBF16 && d != DType::kF16;
}

int64_t Stored::rows() const {
  int64_t n = 1;
  for (size_t i = 0; i + 1 < shape.size(); ++i) n *= shape[i];
  return n;
}

Result<Stored> find_stored(const Checkpoint& k, const Tensor& t, const Format& f) { return Finder(k, t, f).run(); }

Result<std::vector<float>> read_scales(const Tensor& t) {
  const TensorView v = t.view();
  std::vector<float> out(static_cast<size_t>(v.count()));
  const auto byte = [&](size_t i) { return uint8_t(v.data[i]); };
  switch (v.dtype) {
    case DType::kU8:
    case DType::kF8E8M0:
      for (size_t i = 0; i < out.size(); ++i) out[i] = e8m0_value(byte(i));
      break;
    case DType::kF8E4M3:
      for (size_t i = 0; i < out.size(); ++i) out[i] = kE4M3[byte(i)];
      break;
    default:
      convert_to_f32(v.data, v.dtype, out.data(), out.size());
  }
  for (size_t i = 0; i < out.size(); ++i)
    if (!std::isfinite(out[i]))
      return bad_input("{}: tensor {}: scale {} of {} is NaN or infinite{}", t.path(), t.name(), i, out.size(),
                       v.dtype == DType::kU8 ? " (code 255 of E8M0 means NaN)" : "");
  return out;
}

Result<std::unique_ptr<Opened>> open_stored(const Stored& s) {
  auto o = std::make_unique<Opened>();
  const Format& f = s.format;
  const int64_t rows = s.rows(), cols = s.cols();
  const std::byte* data = s.main->view().data;
  if (s.scale) {
    MI_TRY(o->scale_, read_scales(*s.scale));
  }
  switch (f.layout) {
    case Layout::kGguf:
      o->matrix_ = GgufRows{f.gguf_type, data, rows, cols};
      return o;
    case Layout::kInt8:
    case Layout::kFloat8: {
      ScaledCodes m{f.layout == Layout::kInt8 ? ScaledCodes::Kind::kInt8 : ScaledCodes::Kind::kE4M3,
                    data,
                    rows,
                    cols,
                    1,
                    cols,
                    o->scale_,
                    {}};
      if (f.strategy == Strategy::kTensor) m.block_rows = rows;
      if (f.strategy == Strategy::kGroup) m.block_cols = f.group;
      if (f.strategy == Strategy::kBlock) m.block_rows = f.block_rows, m.block_cols = f.block_cols;
      if (s.zero) o->zero_ = to_f32_vector(s.zero->view());
      m.zero = o->zero_;
      o->matrix_ = m;
      return o;
    }
    case Layout::kPackedInt: {
      if (f.strategy == Strategy::kTensor) o->scale_.assign(size_t(rows), o->scale_[0]);
      const int64_t groups = int64_t(o->scale_.size()) / rows;
      MI_TRY(o->group_of_, read_groups(s, groups));
      o->matrix_ =
          PackedInt{f.bits, data, rows, cols, groups, o->scale_, s.zero ? s.zero->view().data : nullptr, o->group_of_};
      return o;
    }
    case Layout::kNvFp4:
    case Layout::kNvFp4ModelOpt: {
      MI_TRY(const std::vector<float> global, read_scales(*s.global));
      if (global[0] == 0)
        return bad_input("{}: tensor {} is 0, which is no factor", s.global->path(), s.global->name());
      for (float& x : o->scale_) x = f.layout == Layout::kNvFp4 ? x / global[0] : x * global[0];
      o->matrix_ = Fp4{data, rows, cols, f.group, o->scale_};
      return o;
    }
    case Layout::kMxFp4:
    case Layout::kMxFp4Blocks:
      o->matrix_ = Fp4{data, rows, cols, f.group, o->scale_};
      return o;
    case Layout::kGptq: {
      MI_TRY(o->group_of_, read_groups(s, int64_t(o->scale_.size()) / rows));
      o->matrix_ =
          Gptq{f.bits, data, s.zero->view().data, f.zero_minus_one ? 1 : 0, rows, cols, o->scale_, o->group_of_};
      return o;
    }
    case Layout::kAwq:
      o->matrix_ = Awq{data, s.zero->view().data, rows, cols, f.group > 0 ? f.group : cols, o->scale_};
      return o;
  }
  return o;
}

void Opened::rows(int64_t first, int64_t n, float* out) const {
  std::visit([&](const auto& m) { dequantize_rows(m, first, n, out); }, matrix_);
}

bool Opened::has_plain_scales() const {
  return !scale_.empty() && std::all_of(scale_.begin(), scale_.end(), [](float f) {
    const float a = std::fabs(f);
    return a >= 0x1p-100f && a <= 0x1p100f && (std::bit_cast<uint32_t>(f) & 0x7fffff) == 0;
  });
}

DType exact_dtype(const Opened& m, int64_t rows, int64_t cols, std::optional<DType> also) {
  if (also.value_or(DType::kBF16) == DType::kBF16 && m.has_plain_scales()) return DType::kBF16;
  std::vector<DType> left = {DType::kBF16, DType::kF16};
  if (also) std::erase_if(left, [&](DType t) { return t != *also; });
  std::vector<float> buffer(size_t(std::min(rows, kMaxRowsAtOnce) * cols));
  for (int64_t r = 0; r < rows && !left.empty(); r += kMaxRowsAtOnce) {
    const int64_t n = std::min(kMaxRowsAtOnce, rows - r);
    m.rows(r, n, buffer.data());
    const std::span<const float> all(buffer.data(), size_t(n * cols));
    std::erase_if(left,
                  [&](DType t) { return !std::all_of(all.begin(), all.end(), [&](float f) { return holds(t, f); }); });
  }
  return left.empty() ? DType::kF32 : left.front();
}

}  // namespace mi::model::formats
