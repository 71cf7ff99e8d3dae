#include "quant/rewrite.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>

#include "quant/gptq.h"
#include "quant/int4.h"
#include "tensor/finite.h"
#include "tensor/int4.h"

namespace mi::quant {
namespace {

constexpr int64_t kRowsPerTask = 64;

// A matrix [.., N, K] in the source and what is to become of it.
struct Job {
  std::string name;
  TensorView w;
  const ir::WeightDecl* d = nullptr;
  const Smoothed* smoothed = nullptr;  // may be null
  int64_t experts = 1, n = 0, k = 0;
  std::vector<std::byte> q;  // int8, or rows of tensor/int4.h
  std::vector<float> scale;
  WeightError error;

  bool int4() const { return d->format == ir::WeightFormat::kW4A8; }
  int64_t group() const { return int4() ? d->group : k; }
  int64_t groups() const { return (k + group() - 1) / group(); }
  int64_t row_bytes() const { return int4() ? int4_row_bytes(k) : k; }
};

// Row r of all (r = expert * n + row), smoothed.
void load_row(const TensorView& w, const Smoothed* s, int64_t r, int64_t n, int64_t k, float* out) {
  convert_to_f32(w.data + size_t(r * k) * dtype_bytes(w.dtype), w.dtype, out, size_t(k));
  if (!s) return;
  if (!s->column_scale.empty()) {
    const float* c = s->column_scale.data() + (int64_t(s->column_scale.size()) == k ? 0 : r / n * k);
    for (int64_t i = 0; i < k; ++i) out[i] *= c[i];
  }
  if (!s->row_divisor.empty()) {
    const float d = s->row_divisor[size_t(int64_t(s->row_divisor.size()) == n ? r % n : r)];
    for (int64_t i = 0; i < k; ++i) out[i] /= d;
  }
}

Job make_job(const ir::MirDir& source, const std::string& name, const std::string& from, const ir::WeightDecl& d,
             const LayerPlan& plan) {
  Job j;
  j.name = name;
  j.w = source.weight(from);
  j.d = &d;
  if (const auto it = plan.smoothing.tensors.find(name); it != plan.smoothing.tensors.end()) j.smoothed = &it->second;
  j.k = d.shape.back();
  j.n = d.shape[d.shape.size() - 2];
  j.experts = shape_count(d.shape).value_or(0) / (j.n * j.k);
  j.q.resize(size_t(j.experts * j.n * j.row_bytes()));
  j.scale.resize(size_t(j.experts * j.n * j.groups()));
  return j;
}

// Rows [r0, r0 + rows) of all: to nearest, or with errors spread over the columns. Returns the rounding error.
WeightError round_rows(Job& j, int64_t r0, int64_t rows, const QuantConfig& config, const ErrorSpread* spread) {
  const int64_t k = j.k;
  WeightError error;
  std::vector<float> block(size_t(rows * k));
  for (int64_t r = 0; r < rows; ++r) load_row(j.w, j.smoothed, r0 + r, j.n, k, block.data() + r * k);
  std::vector<int8_t> q(size_t(rows * k));
  float* scale = j.scale.data() + r0 * j.groups();
  if (j.int4()) {
    const std::vector<float> importance = spread ? spread->diagonal() : std::vector<float>();
    quantize_rows_int4(block.data(), rows, k, j.group(), q.data(), scale, spread ? importance.data() : nullptr);
    if (spread) spread->round_groups(block.data(), rows, scale, j.group(), -8, 7, q.data());
    for (int64_t r = 0; r < rows; ++r) int4_store_row(q.data() + r * k, k, reinterpret_cast<uint8_t*>(j.q.data()) + (r0 + r) * j.row_bytes());
  } else {
    const WeightScheme scheme =
        config.weights == WeightScheme::kPerTensor ? WeightScheme::kPerTensor : WeightScheme::kPerChannel;
    quantize_rows(block.data(), rows, k, scheme, q.data(), scale);
    if (spread) spread->round_rows(block.data(), rows, scale, k, -127, 127, q.data());
    std::memcpy(j.q.data() + r0 * k, q.data(), q.size());
  }
  add_error(block.data(), q.data(), scale, rows, k, j.group(), &error);
  return error;
}

void add(const std::vector<WeightError>& errors, WeightError* to) {
  for (const WeightError& e : errors) {
    to->err2 += e.err2;
    to->ref2 += e.ref2;
  }
}

void round_nearest(Job& j, const QuantConfig& config, hw::ThreadPool& pool) {
  // per_tensor: one scale per matrix, so a task is a whole matrix (of one expert).
  const int64_t rows = j.experts * j.n;
  const int64_t chunk = !j.int4() && config.weights == WeightScheme::kPerTensor ? j.n : kRowsPerTask;
  const int64_t tasks = (rows + chunk - 1) / chunk;
  std::vector<WeightError> errors(static_cast<size_t>(tasks));
  pool.run(tasks, [&](int64_t t, int) {
    errors[size_t(t)] = round_rows(j, t * chunk, std::min(chunk, rows - t * chunk), config, nullptr);
  });
  add(errors, &j.error);
}

// With few rows the Gram matrix says little about most directions; more damping makes the result go over into rounding
// to nearest. From one row per column on, the configured damping holds.
double damping_for(double configured, int64_t rows, int64_t k) {
  return configured * std::max(1.0, double(k) / double(std::max<int64_t>(rows, 1)));
}

// Matrices that read one value: what it was fed is looked at once for all of them.
void round_spread(std::vector<Job*> jobs, const LayerCapture& seen, const std::string& value, const QuantConfig& config,
                  hw::ThreadPool& pool, RoundedLayer* out) {
  const Job& first = *jobs[0];
  const auto make = [&](int64_t expert, hw::ThreadPool* p) {
    const auto [of, rows] = expert_rows(seen, value, expert, config.min_expert_tokens);
    const Fed& fed = *of;
    std::vector<float> divisor;
    if (first.smoothed && !first.smoothed->column_scale.empty()) {
      const std::vector<float>& s = first.smoothed->column_scale;
      const auto begin = s.begin() + (int64_t(s.size()) == fed.cols ? 0 : std::max<int64_t>(expert, 0) * fed.cols);
      divisor.assign(begin, begin + fed.cols);
    }
    return std::pair(ErrorSpread(gram_matrix(fed, rows, divisor, p), fed.cols,
                                 damping_for(config.gptq_damping, int64_t(rows.size()), fed.cols)),
                     !rows.empty());
  };
  if (first.experts == 1) {
    const auto [spread, reached] = make(-1, &pool);
    const ErrorSpread& s = spread;
    for (Job* j : jobs) {
      const int64_t tasks = (j->n + kRowsPerTask - 1) / kRowsPerTask;
      std::vector<WeightError> errors(static_cast<size_t>(tasks));
      pool.run(tasks, [&](int64_t t, int) {
        errors[size_t(t)] =
            round_rows(*j, t * kRowsPerTask, std::min(kRowsPerTask, j->n - t * kRowsPerTask), config, &s);
      });
      add(errors, &j->error);
      ++(reached ? out->spread : out->alone);
    }
    return;
  }
  std::vector<std::vector<WeightError>> errors(jobs.size(), std::vector<WeightError>(size_t(first.experts)));
  std::vector<char> reached(size_t(first.experts));
  pool.run(first.experts, [&](int64_t e, int) {
    const auto [spread, any] = make(e, nullptr);
    reached[size_t(e)] = any;
    for (size_t i = 0; i < jobs.size(); ++i)
      errors[i][size_t(e)] = round_rows(*jobs[i], e * jobs[i]->n, jobs[i]->n, config, &spread);
  });
  for (size_t i = 0; i < jobs.size(); ++i) add(errors[i], &jobs[i]->error);
  const int64_t hit = std::count(reached.begin(), reached.end(), 1);
  out->spread += hit * int64_t(jobs.size());
  out->alone += (first.experts - hit) * int64_t(jobs.size());
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

Tensor float_tensor(const TensorView& w, const ir::WeightDecl& d, const Smoothed* s, hw::ThreadPool& pool) {
  Tensor t = make_tensor(d.dtype, d.shape);
  const int64_t k = w.shape.empty() ? 1 : w.shape.back(), rows = w.count() / std::max<int64_t>(k, 1);
  const int64_t n = w.shape.size() < 2 ? 1 : w.shape[w.shape.size() - 2];
  pool.run((rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task, int) {
    std::vector<float> row(static_cast<size_t>(k));
    for (int64_t r = task * kRowsPerTask; r < std::min(rows, (task + 1) * kRowsPerTask); ++r) {
      load_row(w, s, r, n, k, row.data());
      if (s && !s->norm_divisor.empty()) {
        const float one = s->plus_one ? 1.0f : 0.0f;
        for (int64_t i = 0; i < k; ++i) row[size_t(i)] = (row[size_t(i)] + one) / s->norm_divisor[size_t(i)] - one;
      }
      store_row(row.data(), k, d.dtype, t.data.data() + size_t(r * k) * dtype_bytes(d.dtype));
    }
  });
  return t;
}

template <typename T>
std::shared_ptr<const Tensor> tensor_of(DType t, Shape shape, const std::vector<T>& values) {
  Tensor out{t, std::move(shape), std::vector<std::byte>(values.size() * sizeof(T))};
  std::memcpy(out.data.data(), values.data(), out.data.size());
  return std::make_shared<const Tensor>(std::move(out));
}

}  // namespace

int32_t layer_of(const std::string& name) {
  constexpr std::string_view kPrefix = "layers.";
  if (name.rfind(kPrefix, 0) != 0) return -1;
  int32_t layer = -1;
  std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), layer);
  return layer;
}

bool wants_spread(const ir::WeightDecl& d, const QuantConfig& c) {
  if (!ir::is_quantized(d) || c.rounding == Rounding::kNone) return false;
  if (c.rounding == Rounding::kAuto) return d.format == ir::WeightFormat::kW4A8;
  return c.rounding == Rounding::kGptq && !(d.format == ir::WeightFormat::kW8A8 && c.weights == WeightScheme::kPerTensor);
}

namespace {
int64_t first_not_finite(const TensorView& v, hw::ThreadPool& pool) {
  constexpr int64_t kElements = int64_t(1) << 20;
  const int64_t count = v.count(), tasks = (count + kElements - 1) / kElements;
  std::vector<int64_t> found(size_t(tasks), -1);
  pool.run(tasks, [&](int64_t t, int) {
    const int64_t begin = t * kElements;
    const int64_t at = mi::first_not_finite(v.data + size_t(begin) * dtype_bytes(v.dtype), v.dtype, std::min(kElements, count - begin));
    if (at >= 0) found[size_t(t)] = begin + at;
  });
  const auto first = std::find_if(found.begin(), found.end(), [](int64_t at) { return at >= 0; });
  return first == found.end() ? -1 : *first;
}
}  // namespace

Status check_finite(const ir::MirDir& mir, const ir::Block& b, int32_t layer, hw::ThreadPool& pool) {
  for (const ir::WeightDecl& d : b.weights)
    for (const std::string& name : {ir::full_name(d.name, layer), ir::full_name(d.name, layer) + "_scale"}) {
      if (!mir.has(name)) continue;
      const TensorView v = mir.weight(name);
      if (const int64_t bad = first_not_finite(v, pool); bad >= 0)
        return bad_input("{}: tensor '{}' of shape {} holds {}: the model is damaged; export it again from an intact checkpoint",
                         mir.dir.string(), name, shape_text(v.shape), not_finite_text(v, bad));
    }
  return {};
}

RoundedLayer round_layer(const ir::MirDir& source, const ir::Block& b, int32_t layer, const LayerPlan& plan,
                         const QuantConfig& config, hw::ThreadPool& pool) {
  RoundedLayer out;
  std::vector<Job> jobs;
  jobs.reserve(b.weights.size());
  std::map<std::string, std::vector<Job*>> together;  // by value
  std::vector<MatrixUse> uses = matrix_uses(b);
  for (size_t i = 0; i < b.weights.size(); ++i) {
    const ir::WeightDecl& d = b.weights[i];
    const std::string name = ir::full_name(d.name, layer);
    if (const auto c = plan.constants.find(name); c != plan.constants.end()) {
      out.made[name] = tensor_of(DType::kF32, {1}, std::vector<float>{c->second});
      continue;
    }
    const auto renamed = plan.sources.find(name);
    const std::string& from = renamed == plan.sources.end() ? name : renamed->second;
    const TensorView w = source.weight(from);
    const auto smoothed = plan.smoothing.tensors.find(name);
    if (!ir::is_quantized(d)) {
      if (w.dtype != d.dtype || smoothed != plan.smoothing.tensors.end() || renamed != plan.sources.end())
        out.made[name] = std::make_shared<const Tensor>(
            float_tensor(w, d, smoothed == plan.smoothing.tensors.end() ? nullptr : &smoothed->second, pool));
      continue;
    }
    if (!is_float(w.dtype)) continue;  // quantized in the source
    jobs.push_back(make_job(source, name, from, d, plan));
    const auto use = std::find_if(uses.begin(), uses.end(), [&](const MatrixUse& u) { return u.weight == int32_t(i); });
    if (plan.seen && use != uses.end() && wants_spread(d, config) && plan.seen->values.count(use->value))
      together[fmt::format("{} {}", use->value, use->experts)].push_back(&jobs.back());
    else
      round_nearest(jobs.back(), config, pool);
  }
  for (auto& [key, group] : together)
    round_spread(group, *plan.seen, key.substr(0, key.find(' ')), config, pool, &out);
  for (Job& j : jobs) {
    out.made[j.name] = std::make_shared<const Tensor>(Tensor{j.d->dtype, ir::stored_shape(*j.d), std::move(j.q)});
    out.made[j.name + "_scale"] = tensor_of(DType::kF32, ir::scale_shape(*j.d), j.scale);
    out.error.err2 += j.error.err2;
    out.error.ref2 += j.error.ref2;
  }
  return out;
}

}  // namespace mi::quant
