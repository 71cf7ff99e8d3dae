#include "kernels/gemm/gemm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "kernels/gemm/amx_emulation.h"
#include "kernels/gemm/gemm_case.h"

namespace mi::kernels {
namespace {

// Every kernel of the register, against the scalar reference of its format.
class GemmKernelTest : public testing::TestWithParam<GemmKernel> {
 protected:
  void SetUp() override {
    if (!GetParam().runs_on(hw::detect_cpu())) GTEST_SKIP() << GetParam().name << " needs " << GetParam().needs;
  }
  const GemmKernel& kernel() const { return kernel_; }
  const GemmKernel kernel_ = GetParam();
};
class Int8KernelTest : public GemmKernelTest {};
class Int4KernelTest : public GemmKernelTest {};
class FloatKernelTest : public GemmKernelTest {};

std::vector<GemmKernel> kernels_of(std::initializer_list<GemmFormat> formats) {
  std::vector<GemmKernel> found;
  for (const GemmKernel& k : gemm_kernels())
    if (std::find(formats.begin(), formats.end(), k.format) != formats.end()) found.push_back(k);
  if (std::find(formats.begin(), formats.end(), GemmFormat::kI8) == formats.end()) return found;
  // AMX where there is none: its loops anywhere, its compiled code where everything else in it runs.
  found.push_back(
      {"gemm_i8_amx_emulated", GemmFormat::kI8, "", [](const hw::CpuFeatures&) { return true; }, gemm_i8_amx_emulated});
#if !defined(MI_SCALAR_ONLY)
  found.push_back({"gemm_i8_amx_trapped", GemmFormat::kI8, "avx512_vnni without amx_int8",
                   [](const hw::CpuFeatures& f) { return f.avx512_vnni && !f.amx_int8; }, gemm_i8_amx_trapped});
#endif
  return found;
}
std::string kernel_name(const testing::TestParamInfo<GemmKernel>& info) { return info.param.name; }
INSTANTIATE_TEST_SUITE_P(Register, GemmKernelTest, testing::ValuesIn(kernels_of({kI8, kI4, kBF16, kF32})), kernel_name);
INSTANTIATE_TEST_SUITE_P(Register, Int8KernelTest, testing::ValuesIn(kernels_of({kI8})), kernel_name);
INSTANTIATE_TEST_SUITE_P(Register, Int4KernelTest, testing::ValuesIn(kernels_of({kI4})), kernel_name);
INSTANTIATE_TEST_SUITE_P(Register, FloatKernelTest, testing::ValuesIn(kernels_of({kBF16, kF32})), kernel_name);

TEST_P(GemmKernelTest, EqualsTheReferenceBitForBit) {
  for (int64_t m : {1, 2, 3, 4, 5, 7, 8, 13, 33, 129})
    for (int64_t n : {1, 15, 16, 17, 64, 100, 150})
      for (int64_t k : {1, 2, 3, 5, 63, 64, 65, 200, 333}) {
        const GemmCase c(kernel().format, m, n, k, unsigned(m * 1000 + n * 10 + k));
        const bool extras = (m + n + k) % 2 == 0;
        ASSERT_TRUE(same_bits(c.run(kernel(), extras), c.run(reference_gemm(kernel().format), extras)))
            << "m " << m << " n " << n << " k " << k;
      }
}

TEST_P(Int8KernelTest, ExactAtTheEdgesOfInt8) {
  for (int x : {-127, 127})
    for (int w : {-128, -127, 127})
      for (int64_t m : {1, 4, 9}) {
        const int64_t n = 70, k = 4100;
        const GemmCase c(kernel().format, m, n, k, 3, x, w);
        const std::vector<float> y = c.run(kernel(), false);
        for (int64_t i = 0; i < m; ++i)
          for (int64_t j = 0; j < n; ++j) {
            const float sum = float(int64_t(x) * w * k);
            ASSERT_EQ(y[size_t(i * n + j)],
                      (sum * *c.x.data.as<float>(i * c.x.stride + c.x.scale_offset)) * c.w.scale.as<float>()[j]);
          }
      }
}

TEST_P(Int8KernelTest, ExactAtTheLargestDepth) {
  const GemmCase c(kernel().format, 2, 16, kMaxK, 3, -127, -128);  // u8 sums leave int32 on the way
  EXPECT_TRUE(same_bits(c.run(kernel()), c.run(reference_gemm(kernel().format))));
}

// Every group size with every way a last group can end, few and many rows.
TEST_P(Int4KernelTest, EqualsTheReferenceForEveryGroupAndRemainder) {
  for (int64_t m : {1, 2, 3, 4, 6, 13})
    for (int64_t group : {32, 64, 128})
      for (int64_t k : {1, 31, 32, 33, 64, 100, 128, 129, 160, 192, 250, 256, 300, 768})
        for (bool bf16 : {true, false}) {
          GemmCase c(kI4, m, 70, k, unsigned(m + group + k));
          c.w.int4(c.rng, 0, group, bf16);
          ASSERT_TRUE(same_bits(c.run(kernel()), c.run(reference_gemm(kI4))))
              << m << " rows, group " << group << ", k " << k << (bf16 ? ", bf16" : ", float") << " scales";
        }
}

TEST_P(Int4KernelTest, ExactAtTheEdgesOfInt4) {
  for (int x : {-127, 127})
    for (int w : {-8, 7})
      for (int64_t m : {1, 2, 4, 9})
        for (int64_t group : {32, 64, 128}) {
          GemmCase c(kI4, m, 40, 500, 3, x, w);
          c.w.int4(c.rng, w, group, false);
          const std::vector<float> y = c.run(kernel(), false);
          for (int64_t i = 0; i < m; ++i)
            for (int64_t j = 0; j < c.n; ++j) {
              float t = 0;
              for (int64_t g = 0; g * group < c.k; ++g)
                t = std::fma(float(x * w * std::min(group, c.k - g * group)), c.w.int4_scale(j, g), t);
              ASSERT_EQ(y[size_t(i * c.n + j)], t * *c.x.data.as<float>(i * c.x.stride + c.x.scale_offset));
            }
        }
}

TEST_P(Int4KernelTest, RunsAtTheLargestDepth) {
  for (int64_t m : {2, 7}) {
    const GemmCase c(kI4, m, 20, kMaxK, 3, -127, -8);
    EXPECT_TRUE(same_bits(c.run(kernel()), c.run(reference_gemm(kI4))));
  }
}

TEST_P(GemmKernelTest, ARowDoesNotDependOnTheBatch) {
  const GemmCase c(kernel().format, 37, 90, 130);
  const std::vector<float> all = c.run(kernel());
  for (int64_t i = 0; i < c.m; ++i) {
    std::vector<float> y(size_t(c.m * c.n), 0.0f);
    gemm_range(kernel(), c.args(y.data()), {i, i + 1, 0, pad_n(c.n) / kNTile});
    ASSERT_EQ(std::memcmp(&y[size_t(i * c.n)], &all[size_t(i * c.n)], size_t(c.n) * 4), 0) << "row " << i;
  }
}

TEST_P(GemmKernelTest, WritesItsRangeOnly) {
  const GemmCase c(kernel().format, 9, 100, 70);
  const std::vector<float> all = c.run(kernel());
  std::vector<float> y(all.size(), 5.0f);
  gemm_range(kernel(), c.args(y.data()), {2, 8, 1, 4});
  for (int64_t i = 0; i < c.m; ++i)
    for (int64_t j = 0; j < c.n; ++j) {
      const bool inside = i >= 2 && i < 8 && j >= 16 && j < 64;
      ASSERT_EQ(y[size_t(i * c.n + j)], inside ? all[size_t(i * c.n + j)] : 5.0f) << i << ", " << j;
    }
}

// Without bias, residual and scale, and with rows that may be written past the caches.
TEST_P(GemmKernelTest, PlainProductsAreTheSameInEveryWayTheyAreWritten) {
  for (int64_t m : {1, 7, 16, 33, 64, 65, 100, 128, 150})
    for (int64_t n : {16, 64, 70, 96}) {
      const GemmCase c(kernel().format, m, n, 640, unsigned(m + n));
      const int64_t stride = pad_n(n) * 4;
      AlignedBytes y[2];
      for (const bool stream : {false, true}) {
        GemmArgs a = c.args(nullptr, false);
        y[stream] = AlignedBytes(m * stride);
        a.y = y[stream].as<float>();
        a.y_stride = stride;
        a.stream_y = stream;
        gemm_range(kernel(), a, c.whole());
      }
      const std::vector<float> want = c.run(reference_gemm(kernel().format), false);
      for (const AlignedBytes& got : y)
        for (int64_t i = 0; i < m; ++i)
          ASSERT_EQ(std::memcmp(got.as<char>(i * stride), &want[size_t(i * n)], size_t(n) * 4), 0)
              << m << " x " << n << ", row " << i << (&got == y ? "" : ", streamed");
    }
}

TEST(GemmRun, StreamsWhatNoCacheHoldsIfItsRowsAreAligned) {
  alignas(64) float y[32] = {};
  EXPECT_TRUE(gemm_streams(y, 8192, 512));
  EXPECT_FALSE(gemm_streams(y, 8192, 511));
  EXPECT_FALSE(gemm_streams(y + 1, 8192, 512));
  EXPECT_FALSE(gemm_streams(y, 8196, 512));
}

TEST_P(GemmKernelTest, GathersAndScattersRows) {
  for (int64_t m : {3, 11}) {
    const GemmCase c(kernel().format, m, 50, 70);
    const std::vector<float> plain = c.run(kernel());
    std::vector<int32_t> rows(static_cast<size_t>(m));
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = int32_t((i * 7 + 3) % rows.size());
    std::vector<float> y(plain.size());
    GemmArgs a = c.args(y.data());
    a.x_rows = rows.data();
    a.y_rows = rows.data();
    gemm_range(kernel(), a, c.whole());
    EXPECT_TRUE(same_bits(y, plain));
  }
}

TEST_P(GemmKernelTest, ResidualMayBeTheOutput) {
  const GemmCase c(kernel().format, 6, 40, 64);
  std::vector<float> y(c.residual.as<float>(), c.residual.as<float>() + c.m * c.n);
  GemmArgs a = c.args(y.data());
  a.residual = y.data();
  gemm_range(kernel(), a, c.whole());
  EXPECT_TRUE(same_bits(y, c.run(kernel())));
}

TEST_P(GemmKernelTest, ThreadsDoNotChangeBits) {
  for (int64_t m : {1, 5, 300}) {
    const GemmCase c(kernel().format, m, 333, 129);
    const std::vector<float> alone = c.run(kernel());
    for (int threads : {1, 2, 3}) {
      hw::ThreadPool pool(threads);
      std::vector<float> y(alone.size());
      gemm_run(kernel(), c.args(y.data()), pool);
      EXPECT_TRUE(same_bits(y, alone)) << m << " rows, " << threads << " threads";
    }
  }
}

// In double precision, with the classical bound on a chain of k fused multiply-adds: k * eps * sum |x w|.
TEST_P(FloatKernelTest, NearTheExactProduct) {
  const GemmCase c(kernel().format, 5, 40, 700);
  const std::vector<float> y = c.run(kernel(), false);
  for (int64_t i = 0; i < c.m; ++i)
    for (int64_t j = 0; j < c.n; ++j) {
      double sum = 0, size = 0;
      for (int64_t d = 0; d < c.k; ++d) {
        const double p = double(c.x.data.as<float>(i * c.x.stride)[d]) * double(c.w.f32[size_t(j * c.k + d)]);
        sum += p;
        size += std::abs(p);
      }
      ASSERT_NEAR(double(y[size_t(i * c.n + j)]), sum, double(c.k) * 0x1p-24 * size) << i << ", " << j;
    }
}

// The epilogue's order, step by step.
TEST(Gemm, Int8FormulaStepByStep) {
  const GemmCase c(GemmFormat::kI8, 3, 20, 100);
  const std::vector<float> y = c.run(reference_gemm(GemmFormat::kI8));
  for (int64_t i = 0; i < c.m; ++i)
    for (int64_t j = 0; j < c.n; ++j) {
      int64_t acc = 0;
      for (int64_t d = 0; d < c.k; ++d)
        acc += int64_t(c.x.data.as<int8_t>(i * c.x.stride)[d]) * c.w.i8[size_t(j * c.k + d)];
      const volatile float scaled = float(acc) * *c.x.data.as<float>(i * c.x.stride + c.x.scale_offset);
      const volatile float value = scaled * c.w.scale.as<float>()[j];
      const volatile float biased = value + c.bias.as<float>()[j];
      const volatile float outer = biased * 0.7f;
      EXPECT_EQ(y[size_t(i * c.n + j)], outer + c.residual.as<float>()[i * c.n + j]);
    }
}

TEST(Gemm, Int4FormulaStepByStep) {
  for (unsigned seed : {1, 2, 3, 4, 5, 6}) {  // all groups, scales of both kinds
    const GemmCase c(kI4, 3, 20, 300, seed);
    const std::vector<float> y = c.run(reference_gemm(kI4));
    for (int64_t i = 0; i < c.m; ++i)
      for (int64_t j = 0; j < c.n; ++j) {
        volatile float t = 0;
        for (int64_t g = 0; g * c.w.group < c.k; ++g) {
          int64_t acc = 0;
          for (int64_t d = g * c.w.group; d < std::min(c.k, (g + 1) * c.w.group); ++d)
            acc += int64_t(c.x.data.as<int8_t>(i * c.x.stride)[d]) * c.w.i8[size_t(j * c.k + d)];
          t = std::fma(float(acc), c.w.int4_scale(j, g), t);
        }
        const volatile float scaled = t * *c.x.data.as<float>(i * c.x.stride + c.x.scale_offset);
        const volatile float biased = scaled + c.bias.as<float>()[j];
        const volatile float outer = biased * 0.7f;
        EXPECT_EQ(y[size_t(i * c.n + j)], outer + c.residual.as<float>()[i * c.n + j]);
      }
  }
}

TEST(Gemm, SelectionByFeatures) {
  using F = hw::CpuFeatures;
  const auto pick = [](GemmFormat f, const F& cpu) { return std::string(select_gemm(f, cpu).name); };
  EXPECT_EQ(pick(GemmFormat::kI8, F{}), "gemm_i8_scalar");
  EXPECT_EQ(pick(GemmFormat::kI4, F{}), "gemm_i4_scalar");
  EXPECT_EQ(pick(GemmFormat::kBF16, F{}), "gemm_bf16_scalar");
  EXPECT_EQ(pick(GemmFormat::kF32, F{}), "gemm_f32_scalar");
#if !defined(MI_SCALAR_ONLY)
  EXPECT_EQ(pick(GemmFormat::kI8, F{.avx2 = true}), "gemm_i8_avx2");
  EXPECT_EQ(pick(GemmFormat::kI8, F{.avx2 = true, .avx_vnni = true}), "gemm_i8_avxvnni");
  EXPECT_EQ(pick(GemmFormat::kI8, F{.avx2 = true, .avx512 = true}), "gemm_i8_avx2");
  EXPECT_EQ(pick(GemmFormat::kI8, F{.avx2 = true, .avx512 = true, .avx512_vnni = true}), "gemm_i8_avx512vnni");
  EXPECT_EQ(pick(GemmFormat::kI8, F{.avx2 = true, .avx512 = true, .avx512_vnni = true, .amx_int8 = true}),
            "gemm_i8_amx");
  EXPECT_EQ(pick(GemmFormat::kI8, F{.avx2 = true, .avx512 = true, .amx_int8 = true}), "gemm_i8_avx2");
  EXPECT_EQ(pick(GemmFormat::kI4, F{.avx2 = true}), "gemm_i4_avx2");
  EXPECT_EQ(pick(GemmFormat::kI4, F{.avx2 = true, .avx_vnni = true}), "gemm_i4_avxvnni");
  EXPECT_EQ(pick(GemmFormat::kI4, F{.avx2 = true, .avx512 = true, .avx512_vnni = true}), "gemm_i4_avx512vnni");
  EXPECT_EQ(pick(GemmFormat::kF32, F{.avx2 = true}), "gemm_f32_avx2");
  EXPECT_EQ(pick(GemmFormat::kF32, F{.avx2 = true, .avx512 = true}), "gemm_f32_avx512");
  EXPECT_EQ(pick(GemmFormat::kBF16, F{.avx2 = true, .avx512 = true}), "gemm_bf16_avx512");
#endif
}

template <typename T>
void check_pack(void (*pack)(const T*, int64_t, int64_t, T*, int64_t), void (*unpack)(const T*, int64_t, int64_t, T*)) {
  constexpr int64_t g = 4 / int64_t(sizeof(T));
  std::mt19937 rng(5);
  for (int64_t k : {1, 3, 64, 65, 700}) {
    const int64_t parts[] = {20, 7, 16, 5}, n = 48, k_pad = pad_k(k);
    std::vector<T> w(size_t(n * k)), packed(size_t(pad_n(n) * k_pad), T(77)), back(w.size());
    for (auto& v : w) v = T(1 + rng() % 100);
    int64_t row = 0;
    for (int64_t p : parts) {
      pack(&w[size_t(row * k)], p, k, packed.data(), row);
      row += p;
    }
    ASSERT_EQ(row, n);
    for (int64_t r = 0; r < pad_n(n); ++r)
      for (int64_t i = 0; i < k_pad; ++i)
        ASSERT_EQ(packed[size_t(packed_index(r, i, k_pad, g))], r < n && i < k ? w[size_t(r * k + i)] : T(0))
            << r << ", " << i;
    unpack(packed.data(), n, k, back.data());
    EXPECT_EQ(back, w);
  }
}
TEST(Pack, EveryElementAndThePaddingInt8) { check_pack<int8_t>(pack_i8, unpack_i8); }
TEST(Pack, EveryElementAndThePaddingBf16) { check_pack<uint16_t>(pack_bf16, unpack_bf16); }
TEST(Pack, EveryElementAndThePaddingF32) { check_pack<float>(pack_f32, unpack_f32); }

TEST(Pack, EveryElementAndThePaddingInt4) {
  std::mt19937 rng(5);
  for (int64_t k : {1, 3, 8, 63, 64, 65, 700, 4100}) {
    const int64_t parts[] = {20, 7, 16, 2}, n = 45, k_pad = pad_k(k), row_bytes = int4_row_bytes(k);
    std::vector<int8_t> w(size_t(n * k)), back(w.size());
    for (auto& v : w) v = int8_t(int(rng() % 16) - 8);
    std::vector<uint8_t> rows(size_t(n * row_bytes)), packed(size_t(pad_n(n) * k_pad / 2), 77);
    for (int64_t r = 0; r < n; ++r) {
      int4_store_row(&w[size_t(r * k)], k, &rows[size_t(r * row_bytes)]);
      for (int64_t i = 0; i < k; ++i) ASSERT_EQ(int4_at(&rows[size_t(r * row_bytes)], i), w[size_t(r * k + i)]);
    }
    int64_t row = 0;
    for (int64_t p : parts) {
      pack_i4(&rows[size_t(row * row_bytes)], p, k, packed.data(), row);
      row += p;
    }
    ASSERT_EQ(row, n);
    for (int64_t r = 0; r < pad_n(n); ++r)
      for (int64_t i = 0; i < k_pad; ++i) {
        const int q = packed[size_t(packed_i4_byte(r, i, k_pad))] >> (i % 8 < 4 ? 0 : 4) & 15;
        ASSERT_EQ(q - 8, r < n && i < k ? w[size_t(r * k + i)] : 0) << r << ", " << i;
      }
    unpack_i4(packed.data(), n, k, back.data());
    EXPECT_EQ(back, w);
  }
}

TEST(Pack, ScalesOfGroups) {
  const int64_t n = 20, groups = 3;
  std::vector<float> s(size_t(n * groups)), packed(size_t(pad_n(n) * groups), -1.0f);
  for (size_t i = 0; i < s.size(); ++i) s[i] = float(i);
  pack_scales_i4(s.data(), 7, groups, packed.data(), 0);
  pack_scales_i4(&s[7 * 3], 13, groups, packed.data(), 7);
  for (int64_t t = 0; t < 2; ++t)
    for (int64_t g = 0; g < groups; ++g)
      for (int64_t c = 0; c < 16; ++c)
        EXPECT_EQ(packed[size_t((t * groups + g) * 16 + c)], t * 16 + c < n ? float((t * 16 + c) * groups + g) : -1.0f);
}

TEST(Pack, PartialLastTileIsZeroed) {
  std::vector<int8_t> w(5 * 3, 9), packed(size_t(16 * 64), 77);
  pack_i8(w.data(), 5, 3, packed.data(), 0);
  int nonzero = 0;
  for (int8_t v : packed) nonzero += v != 0;
  EXPECT_EQ(nonzero, 15);
}

TEST(Pack, ColumnSums) {
  const std::vector<int8_t> w = {1, -128, 3, 127, 127, -1};
  int32_t sums[2];
  colsum_i8(w.data(), 2, 3, sums);
  EXPECT_EQ(sums[0], 128 * (1 - 128 + 3));
  EXPECT_EQ(sums[1], 128 * (127 + 127 - 1));
}

TEST(Register, TheReferenceIsAFallbackWhereTheRegisterHasMore) {
  const bool more = gemm_kernels().size() > 4;
  for (const GemmFormat f : {GemmFormat::kI8, GemmFormat::kI4, GemmFormat::kBF16, GemmFormat::kF32}) {
    const auto plain = gemm_fallback(f, hw::CpuFeatures{});
    ASSERT_EQ(plain.has_value(), more);
    if (plain) EXPECT_TRUE(plain->chosen == &reference_gemm(f) && plain->better == nullptr);
    if (more) EXPECT_FALSE(gemm_fallback(f, {.avx2 = true}).has_value());
  }
}

TEST(Register, OnlyKernelsCanBeLeftOut) {
  EXPECT_TRUE(check_left_out("").ok());
  for (const GemmKernel& k : gemm_kernels()) EXPECT_EQ(check_left_out(k.name).ok(), *k.needs != 0) << k.name;
  EXPECT_FALSE(check_left_out("gemm_i9_amx").ok());
  if (gemm_kernels().size() <= 4) return;
  EXPECT_TRUE(check_left_out("gemm_i8_amx,gemm_f32_avx2").ok());
  EXPECT_NE(check_left_out("gemm_i8_amx,gemm_i8_amxx").error().message().find("did you mean gemm_i8_amx?"), std::string::npos);
}

}  // namespace
}  // namespace mi::kernels
