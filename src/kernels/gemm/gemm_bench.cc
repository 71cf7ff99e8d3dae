// Every kernel of the register that this machine can run, on the shapes of a model with 2048 hidden columns:
// giga-operations (a multiply and an add are two) and bytes of weights and scales read per second. Weights rotate over
// kRotate bytes, so that few-row products read them from memory, as a decode step does.

#include <benchmark/benchmark.h>

#include <algorithm>

#include "kernels/gemm/gemm_case.h"
#include "kernels/moe/grouped.h"

namespace mi::kernels {
namespace {

constexpr int64_t kRotate = int64_t(600) << 20;

void run(benchmark::State& state, const GemmKernel& kernel, int threads) {
  const int64_t m = state.range(0), n = state.range(1), k = state.range(2);
  GemmCase c(kernel.format, m, n, k);
  if (kernel.format == GemmFormat::kI4) c.w.int4(c.rng, 0, state.range(3), state.range(4) == 0);
  const AlignedBytes& scales = c.w.scale_bf16.size() > 0 ? c.w.scale_bf16 : c.w.scale;
  const int64_t scale_bytes = (scales.size() + 63) / 64 * 64, bytes = c.w.bytes + scale_bytes;
  const int64_t copies = std::max<int64_t>(1, m <= 16 ? kRotate / bytes : 1);
  AlignedBytes w(bytes * copies);
  for (int64_t i = 0; i < copies; ++i) {
    std::memcpy(w.as<char>(i * bytes), c.w.packed.as<char>(), size_t(c.w.bytes));
    std::memcpy(w.as<char>(i * bytes + c.w.bytes), scales.as<char>(), size_t(scales.size()));
  }
  AlignedBytes y(m * n * 4);
  hw::ThreadPool pool(threads);
  GemmArgs a = c.args(y.as<float>(), false);
  int64_t i = 0;
  for (auto _ : state) {
    char* copy = w.as<char>(i++ % copies * bytes);
    a.w = copy;
    if (a.w_scale_bf16)
      a.w_scale_bf16 = reinterpret_cast<uint16_t*>(copy + c.w.bytes);
    else if (scales.size() > 0)
      a.w_scale = reinterpret_cast<float*>(copy + c.w.bytes);
    gemm_run(kernel, a, pool);
  }
  state.counters["GOPS"] =
      benchmark::Counter(2e-9 * double(m * n * k) * double(state.iterations()), benchmark::Counter::kIsRate);
  state.counters["GB/s"] =
      benchmark::Counter(1e-9 * double(bytes) * double(state.iterations()), benchmark::Counter::kIsRate);
}

struct MoeShape {
  int64_t experts, k, hidden, inter;
};

void run_experts(benchmark::State& state, const MoeShape& s, GemmFormat format, int threads) {
  const int64_t tokens = state.range(0);
  std::mt19937 rng(1);
  const auto matrix_bytes = [](const ExpertWeights& w) { return pad_n(w.n) / kNTile * gemm_tile_bytes(w.format, w.k); };
  auto experts = [&](int64_t n, int64_t k, AlignedBytes& data, AlignedBytes& scale, AlignedBytes& colsum, std::vector<ExpertPlace>& places) {
    ExpertWeights w;
    w.format = format;
    w.experts = s.experts;
    w.n = n;
    w.k = k;
    w.group = 128;
    data = AlignedBytes(matrix_bytes(w) * s.experts);
    for (int64_t i = 0; i < data.size(); i += 8) *data.as<uint64_t>(i) = 0x0102030405060708u * uint64_t(i + 1);
    const int64_t scales = pad_n(n) * (format == GemmFormat::kI4 ? int4_groups(k, w.group) : 1);
    scale = AlignedBytes(s.experts * scales * 4);
    colsum = AlignedBytes(s.experts * pad_n(n) * 4);
    for (int64_t e = 0; e < s.experts; ++e)
      places.push_back({data.as<char>(e * matrix_bytes(w)), nullptr, format == GemmFormat::kI4 ? scale.as<uint16_t>() + e * scales : nullptr});
    w.places = places.data();
    if (format != GemmFormat::kI4) w.scale = scale.as<float>();
    w.colsum = colsum.as<int32_t>();
    return w;
  };
  AlignedBytes data[3], scale[3], colsum[3];
  std::vector<ExpertPlace> places[3];
  const InputRows x(format, tokens, s.hidden, rng);
  const int64_t stride = (s.k * 8 + 63) / 64 * 64;
  AlignedBytes route(tokens * stride), out(tokens * s.hidden * 4),
      scratch(tokens * grouped_scratch_bytes_per_token(s.k, s.hidden, s.inter, format));
  GroupedExpertsArgs a;
  a.tokens = tokens;
  a.route = {route.as<char>(), stride, s.k};
  a.gate = experts(s.inter, s.hidden, data[0], scale[0], colsum[0], places[0]);
  a.up = experts(s.inter, s.hidden, data[1], scale[1], colsum[1], places[1]);
  a.down = experts(s.hidden, s.inter, data[2], scale[2], colsum[2], places[2]);
  a.x = x.data.as<char>();
  a.x_stride = x.stride;
  a.x_scale_offset = x.scale_offset;
  a.out = out.as<float>();
  a.out_stride = s.hidden * 4;
  a.scratch = scratch.as<char>();
  hw::ThreadPool pool(threads);
  int64_t active = 0, steps = 0;
  for (auto _ : state) {
    state.PauseTiming();
    std::vector<char> used(size_t(s.experts), 0);
    for (int64_t t = 0; t < tokens; ++t) {
      std::vector<int32_t> ids;
      while (int64_t(ids.size()) < s.k) {
        const int32_t e = int32_t(rng() % uint64_t(s.experts));
        if (std::find(ids.begin(), ids.end(), e) == ids.end()) ids.push_back(e);
      }
      std::sort(ids.begin(), ids.end());
      for (int64_t j = 0; j < s.k; ++j) {
        route.as<int32_t>(t * stride)[j] = ids[size_t(j)];
        used[size_t(ids[size_t(j)])] = 1;
      }
    }
    active += std::count(used.begin(), used.end(), 1);
    ++steps;
    state.ResumeTiming();
    grouped_experts(a, pool);
  }
  state.counters["GOPS"] =
      benchmark::Counter(6e-9 * double(tokens * s.k * s.hidden * s.inter) * double(steps), benchmark::Counter::kIsRate);
  state.counters["GB/s"] =
      benchmark::Counter(1e-9 * double(2 * matrix_bytes(a.gate) + matrix_bytes(a.down)) * double(active),
                         benchmark::Counter::kIsRate);
}

void run_pack(benchmark::State& state) {
  const int64_t n = 2048, k = 2048;
  std::vector<int8_t> w(size_t(n * k), 1), packed(size_t(n * k));
  for (auto _ : state) {
    pack_i8(w.data(), n, k, packed.data(), 0);
    benchmark::DoNotOptimize(packed.data());
  }
  state.SetBytesProcessed(int64_t(state.iterations()) * n * k);
}

const int kRegistered = [] {
  for (const GemmKernel& kernel : gemm_kernels()) {
    if (!kernel.runs_on(hw::detect_cpu())) continue;
    const bool reference = &kernel == &reference_gemm(kernel.format);
    for (int threads : {1, 2}) {
      auto* b = benchmark::RegisterBenchmark((std::string(kernel.name) + "/threads:" + std::to_string(threads)).c_str(),
                                             [&kernel, threads](benchmark::State& s) { run(s, kernel, threads); });
      b->ArgNames({"m", "n", "k", "group", "float_scales"})->UseRealTime()->MeasureProcessCPUTime();
      const bool int4 = kernel.format == GemmFormat::kI4;
      for (int64_t m : {1, 2, 4, 8, 16, 32, 64, 512})
        if (!reference || m <= 4) b->Args({m, 2048, 2048, int4 ? 128 : 0, 0});
      if (reference || !gemm_takes_q8(kernel.format)) continue;
      // Matrices of a mixture of 2048 hidden columns: an expert's gate or up, its down, q + k + v.
      for (const auto& [n, k] : {std::pair<int64_t, int64_t>{768, 2048}, {2048, 768}, {5120, 2048}})
        for (int64_t m : {1, 4, 5, 6, 8, 12, 16, 24, 32, 64})
          for (int64_t group : int4 ? std::vector<int64_t>{128, 64, 32} : std::vector<int64_t>{0})
            for (int64_t float_scales : int4 ? std::vector<int64_t>{0, 1} : std::vector<int64_t>{0})
              b->Args({m, n, k, group, float_scales});
    }
  }
  for (GemmFormat format : {GemmFormat::kI8, GemmFormat::kI4})
    for (int threads : {1, 2}) {
      const std::string name = std::string("grouped_experts_128x8_2048x768/") + gemm_format_name(format) +
                               "/threads:" + std::to_string(threads);
      auto* b = benchmark::RegisterBenchmark(name.c_str(), [format, threads](benchmark::State& s) {
        run_experts(s, {128, 8, 2048, 768}, format, threads);
      });
      b->ArgNames({"tokens"})->UseRealTime();
      for (int64_t tokens : {1, 4, 8, 32, 128, 512, 2048}) b->Arg(tokens);
    }
  benchmark::RegisterBenchmark("pack_i8", run_pack);
  return 0;
}();

}  // namespace
}  // namespace mi::kernels
