#include "tools/verify_weights.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>

#include "artifact/layout.h"
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

// What an engine's matrix stands for, and how fine it is.
struct Numbers {
  std::vector<float> w;     // [n][k]
  std::vector<float> step;  // between neighbours: [n][groups of k]; empty: float
  int64_t group = 0;
};

Numbers engine_matrix(const artifact::LoadedArtifact& a, const Part& part, int64_t expert) {
  const WeightTensor& t = *part.tensor;
  const std::byte* base = artifact::view_weight(a, t) + artifact::expert_slot(t, expert) * t.expert_stride;
  const float* scales = artifact::view_scales(a, t);
  const uint16_t* scales_bf16 = artifact::view_scales_bf16(a, t);
  const int64_t groups = t.packing == Packing::kPackedI4 ? int4_groups(t.k, t.group) : 1;
  Numbers out{std::vector<float>(size_t(part.n * t.k)), {}, t.packing == Packing::kPackedI4 ? t.group : t.k};
  if (t.packing == Packing::kPackedI8 || t.packing == Packing::kPackedI4) out.step.resize(size_t(part.n * groups));
  for (int64_t r = 0; r < part.n; ++r) {
    const int64_t row = part.first_row + r;
    float* to = out.w.data() + r * t.k;
    switch (t.packing) {
      case Packing::kPackedI8: {
        const auto* q = reinterpret_cast<const int8_t*>(base);
        const float scale = scales[expert * t.n_pad + row];
        out.step[size_t(r)] = scale;
        for (int64_t c = 0; c < t.k; ++c) to[c] = float(q[kernels::packed_index(row, c, t.k_pad, 4)]) * scale;
        break;
      }
      case Packing::kPackedI4: {
        const auto* q = reinterpret_cast<const uint8_t*>(base);
        for (int64_t c = 0; c < t.k; ++c) {
          const int64_t at = artifact::expert_slot(t, expert) * t.n_pad * groups + kernels::packed_scale_index(row, c / t.group, groups);
          const float scale = scales ? scales[at] : to_f32(BF16{scales_bf16[at]});
          out.step[size_t(r * groups + c / t.group)] = scale;
          const int half = q[kernels::packed_i4_byte(row, c, t.k_pad)] >> (c % 8 < 4 ? 0 : 4) & 15;
          to[c] = float(half - 8) * scale;
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

double relative(double error2, double size2) {
  const double r = size2 > 0 ? std::sqrt(error2 / size2) : error2 > 0 ? INFINITY : 0;
  return std::isnan(r) ? INFINITY : r;
}

// A matrix of one expert against the model's.
struct Look {
  double error = 0;  // of the whole
  // The row (or column) that is furthest beyond its own limit; -1: none is.
  int64_t row = -1, column = -1;
  double line_found = 0, line_limit = 0;
  int64_t rows = 0, rows_out = 0, columns = 0, columns_out = 0;

  bool good(double limit) const { return error <= limit && row < 0 && column < 0; }
  // Whether the line is what is wrong: where most are, the matrix is.
  bool names_line(double limit) const {
    if (row < 0 && column < 0) return false;
    return error <= limit || (row >= 0 ? 2 * rows_out <= rows : 2 * columns_out <= columns);
  }
  double badness(double limit) const { return names_line(limit) ? std::max(error / limit, line_found / line_limit) : error / limit; }
  void line(double found, double limit, int64_t at, int64_t Look::*which) {
    if (found <= limit) return;
    if ((row >= 0 || column >= 0) && found / limit <= line_found / line_limit) return;
    row = column = -1;
    this->*which = at;
    line_found = found;
    line_limit = limit;
  }
};

// Of a rounded row or column its length along the model's is judged, not its error: where rounding errors are spread over the
// columns, numbers that calibration's inputs cannot tell apart may be off by more than their size, in any direction.
// Rounding leaves a number an error of step / sqrt(12): a row of small numbers beside large ones, under one scale, may be
// as far off as that, with room for spread errors.
constexpr double kOfRounding = 2;
double line_error(double dot, double size, double found) {
  const double e = size > 0 ? std::fabs(dot / size - 1) : found > 0 ? INFINITY : 0;
  return std::isnan(e) ? INFINITY : e;
}

Look compare(const Numbers& found, const std::vector<float>& want, int64_t k, double limit) {
  Look l;
  l.rows = int64_t(want.size()) / k;
  double error = 0, size = 0;
  const int64_t groups = (k + found.group - 1) / found.group;
  for (int64_t r = 0; r < l.rows; ++r) {
    double row_error = 0, row_size = 0, row_found = 0, dot = 0, rounding = 0;
    for (int64_t i = r * k; i < (r + 1) * k; ++i) {
      const double d = double(found.w[size_t(i)]) - want[size_t(i)];
      row_error += d * d;
      row_size += double(want[size_t(i)]) * want[size_t(i)];
      row_found += double(found.w[size_t(i)]) * found.w[size_t(i)];
      dot += double(found.w[size_t(i)]) * want[size_t(i)];
    }
    for (int64_t g = 0; g < groups && !found.step.empty(); ++g) {
      const double step = found.step[size_t(r * groups + g)];
      rounding += step * step / 12 * double(std::min(found.group, k - g * found.group));
    }
    error += row_error;
    size += row_size;
    const double e = found.step.empty() ? relative(row_error, row_size) : line_error(dot, row_size, row_found);
    const double most = std::max(limit, kOfRounding * relative(rounding, row_size));
    l.rows_out += !(e <= most);
    l.line(e, most, r, &Look::row);
  }
  l.error = relative(error, size);
  return l;
}

// Columns that are longer or shorter than they should be.
void look_at_columns(const Numbers& found, const std::vector<float>& want, int64_t k, double limit, Look* l) {
  const int64_t n = int64_t(want.size()) / k, groups = (k + found.group - 1) / found.group;
  l->columns = k;
  for (int64_t c = 0; c < k; ++c) {
    double dot = 0, size = 0, length = 0, rounding = 0;
    for (int64_t r = 0; r < n; ++r) {
      const double w = want[size_t(r * k + c)], step = found.step.empty() ? 0 : found.step[size_t(r * groups + c / found.group)];
      dot += w * found.w[size_t(r * k + c)];
      size += w * w;
      length += double(found.w[size_t(r * k + c)]) * found.w[size_t(r * k + c)];
      rounding += step * step / 12;
    }
    const double e = line_error(dot, size, length), most = std::max(limit, kOfRounding * relative(rounding, size));
    l->columns_out += !(e <= most);
    l->line(e, most, c, &Look::column);
  }
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
    std::set<int32_t> smoothed;  // norms whose readers have what they lack
    for (const quant::SmoothSite& s : quant::smooth_sites(b_, true, nullptr)) {
      if (s.norm >= 0 && divide_norm(s)) smoothed.insert(s.norm);
      if (s.up >= 0) pair(s);
    }
    struct Job {
      Matrix* m;
      int64_t expert;
    };
    std::vector<Job> jobs;
    for (Matrix& m : matrices_) {
      m.looks.resize(size_t(m.experts));
      if (m.up >= 0) continue;  // its up looks at both
      for (int64_t e = 0; e < m.experts; ++e) jobs.push_back({&m, e});
    }
    pool.run(int64_t(jobs.size()), [&](int64_t i, int) { look(*jobs[size_t(i)].m, jobs[size_t(i)].expert); });
    for (const Matrix& m : matrices_) {
      const double limit = limit_of(*m.part.tensor);
      const auto worst = std::max_element(m.looks.begin(), m.looks.end(),
                                          [&](const Look& x, const Look& y) { return x.badness(limit) < y.badness(limit); });
      std::string where = place(m.name);
      if (m.experts > 1 && !worst->good(limit)) where += fmt::format(" expert {}", worst - m.looks.begin());
      if (worst->names_line(limit))
        judge->row(fmt::format("{} {} {}", where, worst->row >= 0 ? "row" : "column", std::max(worst->row, worst->column)),
                   worst->line_found, worst->line_limit, "relative");
      else
        judge->row(where, worst->error, limit, "relative");
    }
    for (size_t i = 0; i < b_.weights.size(); ++i)
      if (smoothed.count(int32_t(i)) == 0) judge_vector(b_.weights[i], judge);
    return {};
  }

 private:
  std::string place(const std::string& name) const { return layer_ < 0 ? name : fmt::format("layer {} {}", layer_, name); }

  // Norms and biases are not rounded: each number is the model's own. A small one is worth as much as a large one, so the
  // worst is told, and its limit is what float32 explains.
  void judge_vector(const ir::WeightDecl& d, Judge* judge) const {
    const auto it = parts_.find(ir::full_name(d.name, layer_));
    if (it == parts_.end() || d.shape.size() != 1 || !holds_vector(*it->second.tensor, d.shape[0])) return;
    const std::vector<float> want = to_f32_vector(mir_.weight(it->first)), found = vector_of(*it->second.tensor);
    double size = 0, worst = 0;
    size_t at = 0;
    for (const float w : want) size = std::max(size, std::fabs(double(w)));
    for (size_t i = 0; i < want.size(); ++i) {
      const double difference = std::fabs(double(found[i]) - want[i]), e = difference == 0 ? 0 : difference / size;
      if (!(e <= worst)) worst = std::isnan(e) ? INFINITY : e, at = i;
    }
    constexpr double kLimit = 1e-6;
    judge->row(worst <= kLimit ? place(d.name) : fmt::format("{} element {}", place(d.name), at), worst, kLimit, "relative");
  }
  static bool holds_vector(const WeightTensor& t, int64_t n) { return t.packing == Packing::kPlain && t.k == 1 && t.n == n && t.experts == 1; }
  std::vector<float> vector_of(const WeightTensor& t) const {
    std::vector<float> out(static_cast<size_t>(t.n));
    convert_to_f32(artifact::view_weight(a_, t), t.dtype, out.data(), out.size());
    return out;
  }

  struct Matrix {
    const ir::WeightDecl* d = nullptr;
    std::string name;    // in the report
    std::string source;  // in the model
    Part part;
    int64_t experts = 1;
    std::vector<float> columns;  // what smoothing multiplied its columns by; empty: nothing
    int32_t up = -1, down = -1;  // the other matrix of a pair whose channels smoothing may have moved
    std::vector<Look> looks;     // by expert
    int64_t k() const { return d->shape.back(); }
  };

  Status find() {
    index_.assign(b_.weights.size(), -1);
    for (size_t i = 0; i < b_.weights.size(); ++i) {
      const ir::WeightDecl& d = b_.weights[i];
      const std::string name = ir::full_name(d.name, layer_);
      // A head that shares the embedding's numbers is another tensor of the engine, and has its own name where it is rounded.
      const bool tied_head = &b_ == &mir_.graph.epilogue && d.name == quant::kEmbeddingWeight;
      auto it = parts_.find(tied_head ? quant::kHeadWeight : name);
      if (it == parts_.end()) it = parts_.find(name);
      if (it == parts_.end() || it->second.tensor->k == 1) continue;  // what the program does not read, and vectors
      const WeightTensor& t = *it->second.tensor;
      Matrix m{&d, tied_head ? quant::kHeadWeight : d.name, name, it->second, t.experts, {}, -1, -1, {}};
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

  // A smoothed norm is its own divided by what its readers are multiplied by. False: it is as it was.
  bool divide_norm(const quant::SmoothSite& s) {
    const std::string name = ir::full_name(b_.weights[size_t(s.norm)].name, layer_);
    const auto it = parts_.find(name);
    if (it == parts_.end() || !holds_vector(*it->second.tensor, s.channels)) return false;
    const float plus = s.plus_one ? 1.0f : 0.0f;
    const std::vector<float> was = to_f32_vector(mir_.weight(name));
    const std::vector<float> is = vector_of(*it->second.tensor);
    std::vector<float> factors;
    for (size_t i = 0; i < was.size(); ++i) {
      const float now = is[i] + plus;
      factors.push_back(now != 0 ? (was[i] + plus) / now : 1.0f);
    }
    if (std::all_of(factors.begin(), factors.end(), [](float f) { return f == 1; })) return false;
    for (int32_t r : s.readers)
      if (Matrix* m = of(r)) m->columns = factors;
    return true;
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
    const double limit = limit_of(*m.part.tensor);
    const Numbers found = engine_matrix(a_, m.part, e);
    const std::vector<float> want = wanted(m, e);
    m.looks[size_t(e)] = compare(found, want, m.k(), limit);
    if (m.down < 0) return;
    Matrix& down = matrices_[size_t(m.down)];
    const double down_limit = limit_of(*down.part.tensor);
    const Numbers down_found = engine_matrix(a_, down.part, e);
    std::vector<float> down_want = wanted(down, e);
    down.looks[size_t(e)] = compare(down_found, down_want, down.k(), down_limit);
    const bool up_good = m.looks[size_t(e)].good(limit), down_good = down.looks[size_t(e)].good(down_limit);
    if (up_good && down_good) return;
    // Smoothed? Then what up's rows lost, down's columns have. Of a pair of which one is as it was, it is not.
    const std::vector<float> gains = row_gains(found.w, want, m.k());
    std::vector<float> up_want(want);
    for (size_t i = 0; i < up_want.size(); ++i) up_want[i] *= gains[i / size_t(m.k())];
    for (size_t i = 0; i < down_want.size(); ++i) down_want[i] /= gains[i % gains.size()];
    const Look up_smoothed = compare(found, up_want, m.k(), limit);
    Look down_smoothed = compare(down_found, down_want, down.k(), down_limit);
    look_at_columns(down_found, down_want, down.k(), down_limit, &down_smoothed);
    if ((up_good || down_good) && !(up_smoothed.good(limit) && down_smoothed.good(down_limit))) return;
    m.looks[size_t(e)] = up_smoothed;
    down.looks[size_t(e)] = down_smoothed;
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
  const bool tied = std::any_of(mir.graph.epilogue.weights.begin(), mir.graph.epilogue.weights.end(),
                                [](const ir::WeightDecl& d) { return d.name == quant::kEmbeddingWeight; });
  std::map<std::string, Part> parts;
  for (const WeightTensor& t : a.manifest.weights) {
    int64_t row = 0;
    for (size_t at = 0; at <= t.name.size();) {
      const size_t end = std::min(t.name.find('+', at), t.name.size());
      const std::string name = t.name.substr(at, end - at);
      const auto it = rows.find(name);
      if (it != rows.end()) {
        const bool tied_head = tied && name == quant::kEmbeddingWeight && t.packing != Packing::kPlain;
        parts[tied_head ? quant::kHeadWeight : name] = {&t, row, it->second};
        row += it->second;
      } else if (tied && name == quant::kHeadWeight) {
        parts[name] = {&t, row, rows.at(quant::kEmbeddingWeight)};
      } else if (t.packing != Packing::kPlain) {
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
