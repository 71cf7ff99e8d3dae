#include "tools/verify_weights.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "ir/graph.h"
#include "kernels/gemm/pack.h"
#include "quant/choice.h"
#include "quant/smooth.h"
#include "tensor/int4.h"

namespace mi::tools {
namespace {

using artifact::Packing;
using artifact::WeightTensor;

// What good roundings keep: int8 is 0.01 off, int4 0.1 to 0.2. A scale that is wrong by a half or more is not.
double limit_of(const WeightTensor& t) {
  if (t.packing == Packing::kPlain && t.dtype == DType::kBF16) return 0.01;  // a table
  switch (t.packing) {
    case Packing::kPackedI8: return 0.25;
    case Packing::kPackedI4: return 0.45;
    case Packing::kPackedBF16: return 0.01;
    default: return 1e-4;
  }
}

// Part of a tensor of the engine: a matrix of the model, [experts][n][k].
struct Part {
  const WeightTensor* tensor = nullptr;
  int64_t first_row = 0, n = 0;
};

std::vector<float> engine_matrix(const artifact::LoadedArtifact& a, const Part& part, int64_t expert) {
  const WeightTensor& t = *part.tensor;
  const std::byte* base = artifact::view_weight(a, t) + expert * t.expert_stride;
  const float* scales = artifact::view_scales(a, t);
  const uint16_t* scales_bf16 = artifact::view_scales_bf16(a, t);
  const int64_t groups = t.packing == Packing::kPackedI4 ? int4_groups(t.k, t.group) : 1;
  std::vector<float> out(size_t(part.n * t.k));
  for (int64_t r = 0; r < part.n; ++r) {
    const int64_t row = part.first_row + r;
    float* to = out.data() + r * t.k;
    switch (t.packing) {
      case Packing::kPackedI8: {
        const auto* q = reinterpret_cast<const int8_t*>(base);
        const float scale = scales[expert * t.n_pad + row];
        for (int64_t c = 0; c < t.k; ++c) to[c] = float(q[kernels::packed_index(row, c, t.k_pad, 4)]) * scale;
        break;
      }
      case Packing::kPackedI4: {
        const auto* q = reinterpret_cast<const uint8_t*>(base);
        for (int64_t c = 0; c < t.k; ++c) {
          const int64_t at = expert * t.n_pad * groups + kernels::packed_scale_index(row, c / t.group, groups);
          const int half = q[kernels::packed_i4_byte(row, c, t.k_pad)] >> (c % 8 < 4 ? 0 : 4) & 15;
          to[c] = float(half - 8) * (scales ? scales[at] : to_f32(BF16{scales_bf16[at]}));
        }
        break;
      }
      case Packing::kPackedBF16: {
        const auto* q = reinterpret_cast<const uint16_t*>(base);
        for (int64_t c = 0; c < t.k; ++c) to[c] = to_f32(BF16{q[kernels::packed_index(row, c, t.k_pad, 2)]});
        break;
      }
      case Packing::kPackedF32: {
        const auto* q = reinterpret_cast<const float*>(base);
        for (int64_t c = 0; c < t.k; ++c) to[c] = q[kernels::packed_index(row, c, t.k_pad, 1)];
        break;
      }
      case Packing::kPlain:
        convert_to_f32(base + size_t(row * t.k) * dtype_bytes(t.dtype), t.dtype, to, size_t(t.k));
        break;
    }
  }
  return out;
}

// The model's matrix, of one expert.
std::vector<float> model_matrix(const ir::MirDir& mir, const std::string& name, const ir::WeightDecl& d, int64_t expert) {
  const TensorView w = mir.weight(name);
  const int64_t k = d.shape.back(), n = d.shape[d.shape.size() - 2];
  std::vector<float> out(size_t(n * k));
  if (!ir::is_quantized(d)) {
    convert_to_f32(w.data + size_t(expert * n * k) * dtype_bytes(w.dtype), w.dtype, out.data(), out.size());
    return out;
  }
  const std::vector<float> scale = to_f32_vector(mir.weight(name + "_scale"));
  const bool int4 = d.format == ir::WeightFormat::kW4A8;
  const int64_t row_bytes = int4 ? int4_row_bytes(k) : k, groups = int4 ? int4_groups(k, d.group) : 1;
  for (int64_t r = 0; r < n; ++r) {
    const std::byte* row = w.data + (expert * n + r) * row_bytes;
    for (int64_t c = 0; c < k; ++c) {
      const int8_t q = int4 ? int4_at(reinterpret_cast<const uint8_t*>(row), c) : int8_t(row[c]);
      out[size_t(r * k + c)] = float(q) * scale[size_t((expert * n + r) * groups + (int4 ? c / d.group : 0))];
    }
  }
  return out;
}

double relative_error(const std::vector<float>& found, const std::vector<float>& want) {
  double error = 0, size = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double d = double(found[i]) - want[i];
    error += d * d;
    size += double(want[i]) * want[i];
  }
  const double r = size > 0 ? std::sqrt(error / size) : error > 0 ? INFINITY : 0;
  return std::isnan(r) ? INFINITY : r;
}

// By how much each row is longer than it should be.
std::vector<float> row_gains(const std::vector<float>& found, const std::vector<float>& want, int64_t k) {
  constexpr double kNone = 1e-6;  // a row that rounding made zero says nothing
  std::vector<float> gains;
  for (size_t at = 0; at < want.size(); at += size_t(k)) {
    double dot = 0, size = 0;
    for (size_t i = at; i < at + size_t(k); ++i) {
      dot += double(found[i]) * want[i];
      size += double(want[i]) * want[i];
    }
    gains.push_back(size > 0 && dot / size > kNone ? float(dot / size) : 1.0f);
  }
  return gains;
}

class LayerWeights {
 public:
  LayerWeights(const artifact::LoadedArtifact& a, const ir::MirDir& mir, const std::map<std::string, Part>& parts,
               const ir::Block& b, int32_t layer)
      : a_(a), mir_(mir), parts_(parts), b_(b), layer_(layer) {}

  Status judge(Judge* judge, hw::ThreadPool& pool) {
    MI_TRY_VOID(find());
    for (const quant::SmoothSite& s : quant::smooth_sites(b_, true, nullptr)) {
      if (s.norm >= 0) divide_norm(s);
      if (s.up >= 0) pair(s);
    }
    struct Job {
      Matrix* m;
      int64_t expert;
    };
    std::vector<Job> jobs;
    for (Matrix& m : matrices_) {
      m.error.resize(size_t(m.experts));
      if (m.up >= 0) continue;  // its up looks at both
      for (int64_t e = 0; e < m.experts; ++e) jobs.push_back({&m, e});
    }
    pool.run(int64_t(jobs.size()), [&](int64_t i, int) { look(*jobs[size_t(i)].m, jobs[size_t(i)].expert); });
    for (const Matrix& m : matrices_) {
      const auto worst = std::max_element(m.error.begin(), m.error.end());
      const double limit = limit_of(*m.part.tensor);
      const std::string where = layer_ < 0 ? m.d->name : fmt::format("layer {} {}", layer_, m.d->name);
      judge->row(m.experts > 1 && *worst > limit ? fmt::format("{} expert {}", where, worst - m.error.begin()) : where, *worst,
                 limit, "relative");
    }
    return {};
  }

 private:
  struct Matrix {
    const ir::WeightDecl* d = nullptr;
    std::string source;  // its name in the model
    Part part;
    int64_t experts = 1;
    std::vector<float> columns;  // what smoothing multiplied its columns by; empty: nothing
    int32_t up = -1, down = -1;  // the other matrix of a pair whose channels smoothing may have moved
    std::vector<double> error;   // by expert
    int64_t k() const { return d->shape.back(); }
  };

  Status find() {
    index_.assign(b_.weights.size(), -1);
    for (size_t i = 0; i < b_.weights.size(); ++i) {
      const ir::WeightDecl& d = b_.weights[i];
      const std::string name = ir::full_name(d.name, layer_);
      const auto it = parts_.find(name);
      if (it == parts_.end() || it->second.tensor->k == 1) continue;  // what the program does not read, and vectors
      const WeightTensor& t = *it->second.tensor;
      Matrix m{&d, name, it->second, t.experts, {}, -1, -1, {}};
      const int64_t experts = d.shape.size() == 3 ? d.shape[0] : 1;
      if (d.shape.size() < 2 || t.k != m.k() || t.experts != experts || m.part.first_row + d.shape[d.shape.size() - 2] > t.n)
        return bad_input("{}: is not the model of this engine: {} has shape {} there", mir_.dir.string(), name, shape_text(d.shape));
      m.part.n = d.shape[d.shape.size() - 2];
      index_[i] = int32_t(matrices_.size());
      matrices_.push_back(std::move(m));
    }
    return {};
  }
  Matrix* of(int32_t weight) { return weight < 0 || index_[size_t(weight)] < 0 ? nullptr : &matrices_[size_t(index_[size_t(weight)])]; }

  // A smoothed norm is its own divided by what its readers are multiplied by.
  void divide_norm(const quant::SmoothSite& s) {
    const std::string name = ir::full_name(b_.weights[size_t(s.norm)].name, layer_);
    const auto it = parts_.find(name);
    if (it == parts_.end() || it->second.tensor->n != s.channels) return;
    const float plus = s.plus_one ? 1.0f : 0.0f;
    const std::vector<float> was = to_f32_vector(mir_.weight(name));
    const float* is = reinterpret_cast<const float*>(artifact::view_weight(a_, *it->second.tensor));
    std::vector<float> factors;
    for (size_t i = 0; i < was.size(); ++i) {
      const float now = is[i] + plus;
      factors.push_back(now != 0 ? (was[i] + plus) / now : 1.0f);
    }
    if (std::all_of(factors.begin(), factors.end(), [](float f) { return f == 1; })) return;
    for (int32_t r : s.readers)
      if (Matrix* m = of(r)) m->columns = factors;
  }

  void pair(const quant::SmoothSite& s) {
    if (s.readers.size() != 1 || !of(s.up) || !of(s.readers[0])) return;
    Matrix &up = *of(s.up), &down = *of(s.readers[0]);
    if (up.experts != down.experts || up.part.n != down.k()) return;
    up.down = index_[size_t(s.readers[0])];
    down.up = index_[size_t(s.up)];
  }

  std::vector<float> wanted(const Matrix& m, int64_t expert) const {
    std::vector<float> w = model_matrix(mir_, m.source, *m.d, expert);
    if (!m.columns.empty())
      for (size_t i = 0; i < w.size(); ++i) w[i] *= m.columns[i % m.columns.size()];
    return w;
  }

  void look(Matrix& m, int64_t e) {
    const std::vector<float> found = engine_matrix(a_, m.part, e), want = wanted(m, e);
    m.error[size_t(e)] = relative_error(found, want);
    if (m.down < 0) return;
    Matrix& down = matrices_[size_t(m.down)];
    const std::vector<float> down_found = engine_matrix(a_, down.part, e);
    std::vector<float> down_want = wanted(down, e);
    down.error[size_t(e)] = relative_error(down_found, down_want);
    const bool up_good = m.error[size_t(e)] <= limit_of(*m.part.tensor),
               down_good = down.error[size_t(e)] <= limit_of(*down.part.tensor);
    if (up_good && down_good) return;
    // Smoothed? Then what up's rows lost, down's columns have. Of a pair of which one is as it was, it is not.
    const std::vector<float> gains = row_gains(found, want, m.k());
    std::vector<float> up_want(want);
    for (size_t i = 0; i < up_want.size(); ++i) up_want[i] *= gains[i / size_t(m.k())];
    for (size_t i = 0; i < down_want.size(); ++i) down_want[i] /= gains[i % gains.size()];
    const double up_error = relative_error(found, up_want), down_error = relative_error(down_found, down_want);
    const bool smoothed = up_error <= limit_of(*m.part.tensor) && down_error <= limit_of(*down.part.tensor);
    if (!smoothed && (up_good || down_good)) return;
    m.error[size_t(e)] = up_error;
    down.error[size_t(e)] = down_error;
  }

  const artifact::LoadedArtifact& a_;
  const ir::MirDir& mir_;
  const std::map<std::string, Part>& parts_;
  const ir::Block& b_;
  const int32_t layer_;
  std::vector<Matrix> matrices_;
  std::vector<int32_t> index_;  // of the block's weights
};

// Where the matrices of the model are in the engine. Stacked ones stand behind each other.
Result<std::map<std::string, Part>> find_parts(const artifact::LoadedArtifact& a, const ir::MirDir& mir) {
  std::map<std::string, int64_t> rows;
  const auto add = [&](const ir::Block& b, int32_t layer) {
    for (const ir::WeightDecl& d : b.weights)
      rows[ir::full_name(d.name, layer)] = d.shape.size() >= 2 ? d.shape[d.shape.size() - 2] : d.shape.empty() ? 0 : d.shape[0];
  };
  add(mir.graph.prologue, -1);
  for (int32_t l = 0; l < mir.graph.info.layers; ++l) add(mir.graph.block_of(l), l);
  add(mir.graph.epilogue, -1);
  std::map<std::string, Part> parts;
  for (const WeightTensor& t : a.manifest.weights) {
    int64_t row = 0;
    for (size_t at = 0; at <= t.name.size();) {
      const size_t end = std::min(t.name.find('+', at), t.name.size());
      const std::string name = t.name.substr(at, end - at);
      const auto it = rows.find(name);
      if (it != rows.end()) {
        parts[name] = {&t, row, it->second};
        row += it->second;
      } else if (name != quant::kHeadWeight && t.packing != Packing::kPlain) {
        return bad_input("{}: is not the model of this engine: it has no {}", mir.dir.string(), name);
      }
      at = end + 1;
    }
  }
  return parts;
}

}  // namespace

Status judge_weights(const artifact::LoadedArtifact& a, const ir::MirDir& mir, Judge* judge, hw::ThreadPool& pool) {
  MI_TRY(const auto parts, find_parts(a, mir));
  MI_TRY_VOID(LayerWeights(a, mir, parts, mir.graph.prologue, -1).judge(judge, pool));
  for (int32_t l = 0; l < mir.graph.info.layers; ++l)
    MI_TRY_VOID(LayerWeights(a, mir, parts, mir.graph.block_of(l), l).judge(judge, pool));
  return LayerWeights(a, mir, parts, mir.graph.epilogue, -1).judge(judge, pool);
}

}  // namespace mi::tools
