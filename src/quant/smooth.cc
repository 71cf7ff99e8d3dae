#include "quant/smooth.h"

#include <algorithm>
#include <cmath>

#include "quant/int4.h"
#include "quant/int8.h"

namespace mi::quant {
namespace {

constexpr int64_t kRowsPerSmoothTask = 64;
constexpr int64_t kSearchRows = 128;     // captured rows on which alphas are compared
constexpr int64_t kSearchMatrices = 16;  // of a site's readers, experts counted one by one, spread evenly

// The matrices of node n that multiply input 0, or nothing when n reads it in another way.
std::vector<int32_t> matrices_on_input(const ir::Node& n, ir::ValueId v) {
  std::vector<int32_t> out;
  if ((n.op != Op::kLinear && n.op != Op::kExpertLinear) || n.in[0] != v) return out;
  if (std::count(n.in.begin(), n.in.end(), v) != 1) return out;
  for (const ir::WeightUse& u : n.weights)
    if (u.role == Role::kWeight) out.insert(out.end(), u.weights.begin(), u.weights.end());
  return out;
}

struct Readers {
  std::vector<int32_t> matrices;
  std::string other;  // an op that reads the value in another way
};
Readers readers_of(const ir::Block& b, ir::ValueId v) {
  Readers r;
  for (const ir::Node& n : b.nodes) {
    if (std::find(n.in.begin(), n.in.end(), v) == n.in.end()) continue;
    const std::vector<int32_t> m = matrices_on_input(n, v);
    if (m.empty()) r.other = std::string(op_name(n.op));
    r.matrices.insert(r.matrices.end(), m.begin(), m.end());
  }
  if (std::find(b.outputs.begin(), b.outputs.end(), v) != b.outputs.end()) r.other = "the next layer";
  return r;
}

// The node whose result `v` is one plain matrix product: its rows may be scaled.
const ir::Node* plain_matrix(const ir::Block& b, ir::ValueId v) {
  for (const ir::Node& n : b.nodes) {
    if (n.out.empty() || n.out[0] != v) continue;
    if (n.op == Op::kLinear && n.in.size() == 1 && n.weights.size() == 1 && n.weights[0].weights.size() == 1) return &n;
    if (n.op == Op::kExpertLinear && n.weights.size() == 1 && n.weights[0].weights.size() == 1) return &n;
  }
  return nullptr;
}

bool linear_in_up(const ActivationParams& p) { return p.kind != ActKind::kSwigluOai; }

std::string name_in(const ir::Block& b, int32_t weight, int32_t layer) {
  return ir::full_name(b.weights[size_t(weight)].name, layer);
}

bool is_wanted(const ir::Block& b, const SmoothSite& site, int32_t layer, const Choice& choice) {
  return std::any_of(site.readers.begin(), site.readers.end(),
                     [&](int32_t r) { return choice.rounds(name_in(b, r, layer)); });
}
bool is_possible(const ir::MirDir& mir, const ir::Block& b, const SmoothSite& site, int32_t layer) {
  const auto stored = [&](int32_t w) { return is_float(mir.weight(name_in(b, w, layer)).dtype); };
  return std::all_of(site.readers.begin(), site.readers.end(), stored) && (site.up < 0 || stored(site.up));
}

// Rows of one matrix (of one expert), in float.
std::vector<float> matrix_rows(const TensorView& w, int64_t expert) {
  const int64_t k = w.shape.back(), n = w.shape[w.shape.size() - 2];
  std::vector<float> out(size_t(n * k));
  convert_to_f32(w.data + size_t(expert * n * k) * dtype_bytes(w.dtype), w.dtype, out.data(), out.size());
  return out;
}

// What one row of activations becomes at int8.
void round_row(std::vector<float>& x) {
  float top = 0;
  for (float v : x) top = std::max(top, std::fabs(v));
  const float scale = top / 127.0f;
  if (scale > 0)
    for (float& v : x) v = std::nearbyint(v / scale) * scale;
}

// Squared error of X W^T when X / s and W * s are rounded, over the given rows of the value.
double output_error(const Fed& fed, const std::vector<int64_t>& rows, const std::vector<float>& w, int64_t n,
                    const std::vector<float>& s, ir::QuantFormat format) {
  const int64_t k = fed.cols;
  std::vector<float> scaled(w), rounded(w.size());
  for (int64_t r = 0; r < n; ++r)
    for (int64_t i = 0; i < k; ++i) scaled[size_t(r * k + i)] *= s[size_t(i)];
  const int64_t group = format.format == ir::WeightFormat::kW4A8 ? format.group : k;
  std::vector<int8_t> q(w.size());
  std::vector<float> scale(size_t(n * ((k + group - 1) / group)));
  if (format.format == ir::WeightFormat::kW4A8)
    quantize_rows_int4(scaled.data(), n, k, group, q.data(), scale.data());
  else
    quantize_rows(scaled.data(), n, k, WeightScheme::kPerChannel, q.data(), scale.data());
  const int64_t groups = (k + group - 1) / group;
  for (int64_t r = 0; r < n; ++r)
    for (int64_t i = 0; i < k; ++i)
      rounded[size_t(r * k + i)] = float(q[size_t(r * k + i)]) * scale[size_t(r * groups + i / group)];
  double error = 0;
  std::vector<float> x(static_cast<size_t>(k));
  for (int64_t at : rows) {
    const float* a = fed.rows.data() + at * k;
    for (int64_t i = 0; i < k; ++i) x[size_t(i)] = a[i] / s[size_t(i)];
    round_row(x);
    for (int64_t r = 0; r < n; ++r) {
      float sum[8] = {};  // of the error: products of both forms, taken together
      for (int64_t i = 0; i < k; ++i)
        sum[i % 8] += x[size_t(i)] * rounded[size_t(r * k + i)] - a[i] * w[size_t(r * k + i)];
      double d = 0;
      for (float v : sum) d += v;
      error += d * d;
    }
  }
  return error;
}

template <typename T>
std::vector<T> spread(const std::vector<T>& all, int64_t most) {
  const int64_t n = int64_t(all.size()), keep = std::min(n, most);
  std::vector<T> out;
  for (int64_t i = 0; i < keep; ++i) out.push_back(all[size_t(i * n / keep)]);
  return out;
}

class Planner {
 public:
  Planner(const ir::MirDir& mir, const ir::Block& b, const Choice& choice, const LayerCapture& seen,
          const QuantConfig& config, hw::ThreadPool& pool)
      : mir_(mir), b_(b), choice_(choice), seen_(seen), config_(config), pool_(pool) {}

  void plan(const SmoothSite& site, LayerSmoothing* out) {
    std::vector<int32_t> rounded;
    for (int32_t r : site.readers)
      if (choice_.rounds(name(r))) rounded.push_back(r);
    const Fed& fed = seen_.values.at(site.value);
    const int64_t sets = site.experts ? int64_t(seen_.expert_tokens.size()) : 1;
    double alpha = config_.smooth_alpha;
    if (const auto it = config_.layer_alpha.find(seen_.layer); it != config_.layer_alpha.end())
      alpha = it->second;
    else if (config_.search_alpha)
      out->alpha[site.value] = alpha = best_alpha(site, fed, rounded, sets);
    std::vector<float> s;
    for (int64_t e = 0; e < sets; ++e) {
      const std::vector<float> one = scales(site, fed, rounded, site.experts ? e : -1, alpha);
      s.insert(s.end(), one.begin(), one.end());
    }
    if (site.norm >= 0) {
      Smoothed& t = out->tensors[name(site.norm)];
      t.norm_divisor = s;
      t.plus_one = site.plus_one;
    } else {
      out->tensors[name(site.up)].row_divisor = s;
    }
    for (int32_t r : site.readers) out->tensors[name(r)].column_scale = s;
    out->divisor[site.value] = std::move(s);
  }

 private:
  std::string name(int32_t weight) const { return name_in(b_, weight, seen_.layer); }

  // expert < 0: one set for all.
  std::vector<float> scales(const SmoothSite& site, const Fed& fed, const std::vector<int32_t>& rounded, int64_t expert,
                            double alpha) {
    std::vector<float> act = fed.max_abs, weight(size_t(site.channels), 0.0f);
    if (expert >= 0) {  // what this expert was fed; one that saw nothing keeps s = 1
      std::fill(act.begin(), act.end(), 0.0f);
      const ExpertRows own = expert_rows(seen_, site.value, expert, config_.min_expert_tokens);
      for (int64_t at : own.rows)
        for (int64_t i = 0; i < fed.cols; ++i)
          act[size_t(i)] = std::max(act[size_t(i)], std::fabs(own.fed->rows[size_t(at * fed.cols + i)]));
    }
    for (int32_t r : rounded) {
      const auto key = std::pair(r, expert);
      auto it = maxima_.find(key);
      if (it == maxima_.end()) it = maxima_.emplace(key, column_max(mir_.weight(name(r)), expert, pool_)).first;
      for (size_t i = 0; i < weight.size(); ++i) weight[i] = std::max(weight[i], it->second[i]);
    }
    return smooth_scales(act, weight, alpha);
  }

  double best_alpha(const SmoothSite& site, const Fed& fed, const std::vector<int32_t>& rounded, int64_t sets) {
    struct Sample {
      int32_t matrix;
      int64_t expert, set;
    };
    std::vector<Sample> samples;
    for (int32_t r : rounded) {
      const bool stacked = b_.weights[size_t(r)].shape.size() == 3;
      for (int64_t e = 0; e < (stacked ? b_.weights[size_t(r)].shape[0] : 1); ++e)
        samples.push_back({r, stacked ? e : -1, sets > 1 ? e : 0});
    }
    samples = spread(samples, kSearchMatrices);
    double best = config_.smooth_alpha, least = INFINITY;
    for (int step = 8; step <= 16; ++step) {
      const double alpha = step * 0.05;
      std::vector<double> errors(samples.size());
      std::map<int64_t, std::vector<float>> s;
      for (const Sample& m : samples)
        if (!s.count(m.set)) s[m.set] = scales(site, fed, rounded, sets > 1 ? m.set : -1, alpha);
      pool_.run(int64_t(samples.size()), [&](int64_t i, int) {
        const Sample& m = samples[size_t(i)];
        const ir::WeightDecl& d = b_.weights[size_t(m.matrix)];
        const std::vector<float> w = matrix_rows(mir_.weight(name(m.matrix)), std::max<int64_t>(m.expert, 0));
        errors[size_t(i)] = output_error(fed, spread(seen_.rows_of(fed, m.expert), kSearchRows), w,
                                         int64_t(w.size()) / fed.cols, s.at(m.set), choice_.format(seen_.layer, d));
      });
      double sum = 0;
      for (double e : errors) sum += e;
      if (sum < least) best = alpha, least = sum;
    }
    return best;
  }

  const ir::MirDir& mir_;
  const ir::Block& b_;
  const Choice& choice_;
  const LayerCapture& seen_;
  const QuantConfig& config_;
  hw::ThreadPool& pool_;
  std::map<std::pair<int32_t, int64_t>, std::vector<float>> maxima_;
};

}  // namespace

std::vector<SmoothSite> smooth_sites(const ir::Block& b, bool down, std::vector<std::string>* skipped) {
  std::vector<SmoothSite> sites;
  for (const ir::Node& n : b.nodes) {
    if (n.op != Op::kRmsNorm && n.op != Op::kActivation) continue;
    const ir::Value& v = b.values[size_t(n.out[0])];
    SmoothSite s;
    s.value = v.name;
    s.channels = v.type.cols;
    Readers readers = readers_of(b, n.out[0]);
    if (n.op == Op::kRmsNorm) {
      const NormParams& p = std::get<NormParams>(n.params);
      if (p.groups != 1 || v.type.elem != Elem::kF32) continue;
      if (readers.matrices.empty() && readers.other.empty()) continue;
      s.norm = n.weights[0].weights[0];
      s.plus_one = p.plus_one;
    } else {
      if (!down) continue;
      const ir::Node* up = n.in.size() == 2 ? plain_matrix(b, n.in[1]) : nullptr;
      if (!up || readers_of(b, n.in[1]).other != std::string(op_name(Op::kActivation)) ||
          !linear_in_up(std::get<ActivationParams>(n.params))) {
        if (skipped)
          skipped->push_back(fmt::format("not smoothed: {} of {}, which is not a plain product of two matrices", v.name,
                                         b.name));
        continue;
      }
      s.up = up->weights[0].weights[0];
      s.experts = up->op == Op::kExpertLinear;
    }
    if (!readers.other.empty()) {
      // A full-width QK norm has clamp, rope or attention behind it and is no smoothing site; say so once per block.
      if (skipped)
        skipped->push_back(fmt::format("not smoothed: {} of {}, which {} reads", v.name, b.name, readers.other));
      continue;
    }
    s.readers = std::move(readers.matrices);
    sites.push_back(std::move(s));
  }
  return sites;
}

std::vector<float> smooth_scales(const std::vector<float>& act_max, const std::vector<float>& weight_max,
                                 double alpha) {
  MI_CHECK_EQ(act_max.size(), weight_max.size());
  std::vector<float> s(act_max.size(), 1.0f);
  for (size_t j = 0; j < s.size(); ++j) {
    if (!(act_max[j] > 0) || !(weight_max[j] > 0)) continue;
    const double v = std::pow(double(act_max[j]), alpha) / std::pow(double(weight_max[j]), 1.0 - alpha);
    s[j] = float(std::clamp(v, 1e-5, 1e5));
  }
  return s;
}

std::set<std::string> smoothed_tensors(const ir::MirDir& mir, const Choice& choice, bool down) {
  std::set<std::string> names;
  for (const ir::Block& b : mir.graph.blocks)
    for (const SmoothSite& site : smooth_sites(b, down, nullptr))
      for (int32_t layer : b.layers) {
        if (!is_wanted(b, site, layer, choice) || !is_possible(mir, b, site, layer)) continue;
        names.insert(name_in(b, site.norm >= 0 ? site.norm : site.up, layer));
        for (int32_t r : site.readers) names.insert(name_in(b, r, layer));
      }
  return names;
}

int64_t smoothed_sites(const ir::MirDir& mir, const ir::Block& b, int32_t layer, const Choice& choice, bool down) {
  int64_t n = 0;
  for (const SmoothSite& site : smooth_sites(b, down, nullptr))
    n += is_wanted(b, site, layer, choice) && is_possible(mir, b, site, layer);
  return n;
}

LayerSmoothing plan_smoothing(const ir::MirDir& mir, const ir::Block& block, const Choice& choice,
                              const LayerCapture& seen, const QuantConfig& config, hw::ThreadPool& pool,
                              std::vector<std::string>* notes) {
  LayerSmoothing out;
  Planner planner(mir, block, choice, seen, config, pool);
  for (const SmoothSite& site : smooth_sites(block, config.smooth_down, nullptr)) {
    if (!is_wanted(block, site, seen.layer, choice)) continue;
    if (is_possible(mir, block, site, seen.layer))
      planner.plan(site, &out);
    else
      notes->push_back(fmt::format("layer {}: {} has a reader that is quantized already and is not smoothed", seen.layer,
                                   site.value));
  }
  return out;
}

std::vector<float> column_max(const TensorView& w, int64_t expert, hw::ThreadPool& pool) {
  const int64_t k = w.shape.back(), n = w.shape[w.shape.size() - 2], all = shape_count(w.shape).value_or(0) / k;
  const int64_t first = expert < 0 ? 0 : expert * n, rows = expert < 0 ? all : n;
  const int64_t tasks = (rows + kRowsPerSmoothTask - 1) / kRowsPerSmoothTask;
  std::vector<std::vector<float>> parts(size_t(pool.threads()), std::vector<float>(size_t(k)));
  pool.run(tasks, [&](int64_t task, int worker) {
    std::vector<float> row(static_cast<size_t>(k));
    std::vector<float>& m = parts[size_t(worker)];
    for (int64_t r = task * kRowsPerSmoothTask; r < std::min(rows, (task + 1) * kRowsPerSmoothTask); ++r) {
      convert_to_f32(w.data + size_t((first + r) * k) * dtype_bytes(w.dtype), w.dtype, row.data(), size_t(k));
      for (int64_t i = 0; i < k; ++i) m[size_t(i)] = std::max(m[size_t(i)], std::fabs(row[size_t(i)]));
    }
  });
  for (size_t p = 1; p < parts.size(); ++p)
    for (size_t i = 0; i < size_t(k); ++i) parts[0][i] = std::max(parts[0][i], parts[p][i]);
  return parts[0];
}

}  // namespace mi::quant
