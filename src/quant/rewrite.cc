#include "quant/rewrite.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>

#include "base/util.h"
#include "tensor/int4.h"

namespace mi::quant {
namespace {

constexpr int64_t kRowsPerTask = 64;

// A tensor [.., N, K] seen as rows of K.
struct RowsOf {
  int64_t rows = 0, k = 0;
};
RowsOf rows_of(const Shape& s) {
  RowsOf r{1, s.empty() ? 1 : s.back()};
  for (size_t i = 0; i + 1 < s.size(); ++i) r.rows *= s[i];
  return r;
}

void load_row(const TensorView& w, int64_t row, int64_t k, const std::vector<float>* scale, float* out) {
  convert_to_f32(w.data + size_t(row * k) * dtype_bytes(w.dtype), w.dtype, out, size_t(k));
  if (scale)
    for (int64_t i = 0; i < k; ++i) out[i] *= (*scale)[size_t(i)];
}

void store_row(const float* v, int64_t k, DType t, std::byte* out) {
  if (t == DType::kF32) {
    std::memcpy(out, v, size_t(k) * 4);
  } else if (t == DType::kBF16) {
    for (int64_t i = 0; i < k; ++i) {
      const BF16 b = to_bf16(v[i]);
      std::memcpy(out + i * 2, &b, 2);
    }
  } else {
    MI_CHECK(t == DType::kF16);
    for (int64_t i = 0; i < k; ++i) {
      const F16 h = to_f16(v[i]);
      std::memcpy(out + i * 2, &h, 2);
    }
  }
}

// A matrix as it will be stored.
struct RoundedTensor {
  std::vector<uint8_t> q;  // int8, or rows of tensor/int4.h
  std::vector<float> scale;
};

RoundedTensor round_tensor(const TensorView& w, const ir::WeightDecl& d, const TensorPlan& plan,
                           WeightScheme int8_scheme, hw::ThreadPool& pool, WeightError* error) {
  const auto [rows, k] = rows_of(w.shape);
  const bool int4 = d.format == ir::WeightFormat::kW4A8;
  const int64_t row_bytes = int4 ? int4_row_bytes(k) : k, row_scales = int4 ? int4_groups(k, d.group) : 1;
  // per_tensor: one scale per matrix, so a task is a whole matrix (of one expert).
  const int64_t chunk = !int4 && int8_scheme == WeightScheme::kPerTensor ? w.shape[w.shape.size() - 2] : kRowsPerTask;
  const int64_t tasks = (rows + chunk - 1) / chunk;
  RoundedTensor t{std::vector<uint8_t>(size_t(rows * row_bytes)), std::vector<float>(size_t(rows * row_scales))};
  std::vector<WeightError> errors(static_cast<size_t>(tasks));
  pool.run(tasks, [&](int64_t task, int) {
    const int64_t r0 = task * chunk, n = std::min(chunk, rows - r0);
    std::vector<float> block(size_t(n * k));
    for (int64_t r = 0; r < n; ++r) load_row(w, r0 + r, k, plan.column_scale, block.data() + r * k);
    uint8_t* q = t.q.data() + r0 * row_bytes;
    float* scale = t.scale.data() + r0 * row_scales;
    if (int4) {
      std::vector<int8_t> wide(size_t(n * k));
      quantize_rows_int4(block.data(), n, k, d.group, wide.data(), scale);
      add_error_int4(block.data(), wide.data(), scale, n, k, d.group, &errors[size_t(task)]);
      for (int64_t r = 0; r < n; ++r) int4_store_row(wide.data() + r * k, k, q + r * row_bytes);
    } else {
      int8_t* q8 = reinterpret_cast<int8_t*>(q);
      quantize_rows(block.data(), n, k, int8_scheme, q8, scale);
      add_error(block.data(), q8, scale, n, k, &errors[size_t(task)]);
    }
  });
  for (const WeightError& e : errors) {
    error->err2 += e.err2;
    error->ref2 += e.ref2;
  }
  return t;
}

// Quantized declarations by full name.
std::map<std::string, const ir::WeightDecl*> quantized_weights(const ir::Graph& g) {
  std::map<std::string, const ir::WeightDecl*> found;
  const auto add = [&](const ir::Block& b, int32_t layer) {
    for (const ir::WeightDecl& d : b.weights)
      if (ir::is_quantized(d)) found[ir::full_name(d.name, layer)] = &d;
  };
  add(g.prologue, -1);
  for (const ir::Block& b : g.blocks)
    for (int32_t layer : b.layers) add(b, layer);
  add(g.epilogue, -1);
  return found;
}

Status write_float(const TensorView& w, DType target, const TensorPlan& plan, ir::MirWriter& writer) {
  if (w.dtype == target && !plan.column_scale && !plan.norm_divisor) return writer.write({w.data, w.bytes});
  const auto [rows, k] = rows_of(w.shape);
  std::vector<float> row(static_cast<size_t>(k));
  std::vector<std::byte> out(size_t(k) * dtype_bytes(target));
  for (int64_t r = 0; r < rows; ++r) {
    load_row(w, r, k, plan.column_scale, row.data());
    if (plan.norm_divisor) {
      const float one = plan.plus_one ? 1.0f : 0.0f;
      for (int64_t i = 0; i < k; ++i) row[size_t(i)] = (row[size_t(i)] + one) / (*plan.norm_divisor)[size_t(i)] - one;
    }
    store_row(row.data(), k, target, out.data());
    MI_TRY_VOID(writer.write(out));
  }
  return {};
}

}  // namespace

int32_t layer_of(const std::string& name) {
  constexpr std::string_view kPrefix = "layers.";
  if (name.rfind(kPrefix, 0) != 0) return -1;
  int32_t layer = -1;
  std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), layer);
  return layer;
}

std::vector<float> column_max(const TensorView& w, hw::ThreadPool& pool) {
  const auto [rows, k] = rows_of(w.shape);
  const int64_t tasks = (rows + kRowsPerTask - 1) / kRowsPerTask;
  std::vector<std::vector<float>> parts(size_t(pool.threads()), std::vector<float>(size_t(k)));
  pool.run(tasks, [&](int64_t task, int worker) {
    std::vector<float> row(static_cast<size_t>(k));
    std::vector<float>& m = parts[size_t(worker)];
    for (int64_t r = task * kRowsPerTask; r < std::min(rows, (task + 1) * kRowsPerTask); ++r) {
      load_row(w, r, k, nullptr, row.data());
      for (int64_t i = 0; i < k; ++i) m[size_t(i)] = std::max(m[size_t(i)], std::fabs(row[size_t(i)]));
    }
  });
  for (size_t p = 1; p < parts.size(); ++p)
    for (size_t i = 0; i < size_t(k); ++i) parts[0][i] = std::max(parts[0][i], parts[p][i]);
  return parts[0];
}

Status rewrite_tensors(const ir::MirDir& source, const ir::Graph& g, const RewritePlan& plan, ir::MirWriter& writer,
                       hw::ThreadPool& pool, std::map<int32_t, WeightError>* errors) {
  constexpr std::string_view kScale = "_scale";
  const auto source_name = [&](const std::string& name) {
    const auto it = plan.sources.find(name);
    return it == plan.sources.end() ? name : it->second;
  };
  uint64_t total = 0;
  for (const auto& d : writer.order())
    if (const std::string from = source_name(d.name); source.has(from)) total += source.weight(from).bytes;
  Progress progress("quantize", total, true);
  const auto quantized = quantized_weights(g);
  std::vector<float> pending_scale;  // of the rounded matrix written last
  std::string pending_name;
  for (const auto& d : writer.order()) {
    if (const auto c = plan.constants.find(d.name); c != plan.constants.end()) {
      MI_TRY_VOID(writer.write(std::as_bytes(std::span(&c->second, 1))));
      continue;
    }
    if (!pending_name.empty() && d.name == pending_name + std::string(kScale)) {
      MI_TRY_VOID(writer.write(std::as_bytes(std::span(pending_scale))));
      pending_name.clear();
      continue;
    }
    const std::string from = source_name(d.name);
    MI_CHECK(source.has(from), "{} is declared but not in the source", d.name);
    const TensorView w = source.weight(from);
    const auto p = plan.tensors.find(d.name);
    const TensorPlan tensor_plan = p == plan.tensors.end() ? TensorPlan{} : p->second;
    const auto rounded = quantized.find(d.name);
    if (rounded != quantized.end() && is_float(w.dtype)) {
      RoundedTensor t =
          round_tensor(w, *rounded->second, tensor_plan, plan.int8_scheme, pool, &(*errors)[layer_of(d.name)]);
      MI_TRY_VOID(writer.write(std::as_bytes(std::span(t.q))));
      pending_scale = std::move(t.scale);
      pending_name = d.name;
    } else {
      MI_TRY_VOID(write_float(w, d.dtype, tensor_plan, writer));
    }
    progress.advance(w.bytes, d.name);
  }
  progress.done();
  return {};
}

}  // namespace mi::quant
