#include <gtest/gtest.h>
#include <signal.h>
#include <ucontext.h>

#include <cstring>

#include "base/check.h"
#include "base/sanitized.h"
#include "kernels/gemm/amx_emulation.h"
#include "kernels/gemm/gemm_case.h"
#include "kernels/gemm/i8_amx_tile.h"

namespace mi::kernels {

#if !defined(MI_SCALAR_ONLY)
void gemm_i8_amx(const GemmArgs& a, const GemmRange& r, void* scratch);
#endif

TileMachine& TileMachine::of_this_thread() {
  static thread_local TileMachine machine;
  return machine;
}

void TileMachine::configure(const uint8_t* memory) {
  uint8_t c[64];
  std::memcpy(c, memory, 64);
  release();
  if (c[0] == 0) return;
  MI_CHECK(c[0] == 1, "ldtilecfg: palette {}", c[0]);
  MI_CHECK(c[1] == 0, "ldtilecfg: start row {}: only the operating system resumes in the middle", c[1]);
  for (int i = 0; i < 64; ++i) {
    const bool reserved = (i >= 2 && i < 16) || (i >= 32 && i < 48) || i >= 56;
    MI_CHECK(!reserved || c[i] == 0, "ldtilecfg: reserved byte {} is {}", i, c[i]);
  }
  for (int t = 0; t < 8; ++t) {
    tile_[t].row_bytes = c[16 + 2 * t] | c[17 + 2 * t] << 8;
    tile_[t].rows = c[48 + t];
    MI_CHECK(tile_[t].row_bytes <= 64 && tile_[t].rows <= 16, "ldtilecfg: tile {}: {} rows of {} bytes", t,
             tile_[t].rows, tile_[t].row_bytes);
    MI_CHECK((tile_[t].rows == 0) == (tile_[t].row_bytes == 0), "ldtilecfg: tile {}: {} rows of {} bytes", t,
             tile_[t].rows, tile_[t].row_bytes);
    std::memset(tile_[t].data, 0, sizeof tile_[t].data);
  }
  configured_ = true;
  ++configurations_;
}

void TileMachine::release() {
  configured_ = false;
  for (Tile& t : tile_) t.rows = t.row_bytes = 0;
}

TileMachine::Tile& TileMachine::valid(int t, const char* who) {
  MI_CHECK(configured_, "{}: no tiles configured", who);
  MI_CHECK(t >= 0 && t < 8 && tile_[t].rows > 0 && tile_[t].row_bytes % 4 == 0, "{}: tile {} is not usable", who, t);
  return tile_[t];
}

void TileMachine::zero(int t) { std::memset(valid(t, "tilezero").data, 0, sizeof(Tile::data)); }

void TileMachine::load(int t, const uint8_t* base, int64_t stride) {
  Tile& tile = valid(t, "tileloadd");
  std::memset(tile.data, 0, sizeof tile.data);
  for (int r = 0; r < tile.rows; ++r) std::memcpy(tile.data[r], base + r * stride, size_t(tile.row_bytes));
}

void TileMachine::store(int t, uint8_t* base, int64_t stride) {
  const Tile& tile = valid(t, "tilestored");
  for (int r = 0; r < tile.rows; ++r) std::memcpy(base + r * stride, tile.data[r], size_t(tile.row_bytes));
}

void TileMachine::dot(int c, int a, int b) {
  MI_CHECK(c != a && c != b && a != b, "tdpbssd: tiles {}, {}, {} are not three", c, a, b);
  Tile& sum = valid(c, "tdpbssd");
  const Tile& left = valid(a, "tdpbssd");
  const Tile& right = valid(b, "tdpbssd");
  MI_CHECK(sum.rows == left.rows && sum.row_bytes == right.row_bytes && left.row_bytes / 4 == right.rows,
           "tdpbssd: [{} x {}] += [{} x {}] * [{} x {}] in rows x bytes", sum.rows, sum.row_bytes, left.rows,
           left.row_bytes, right.rows, right.row_bytes);
  for (int m = 0; m < sum.rows; ++m) {
    uint32_t row[16];
    std::memcpy(row, sum.data[m], 64);
    for (int k = 0; k < right.rows; ++k)
      for (int n = 0; n < sum.row_bytes / 4; ++n)
        for (int i = 0; i < 4; ++i)
          row[n] += uint32_t(int32_t(int8_t(left.data[m][4 * k + i])) * int32_t(int8_t(right.data[k][4 * n + i])));
    std::memcpy(sum.data[m], row, size_t(sum.row_bytes));
  }
  ++products_;
  multiplications_ += int64_t(sum.rows) * right.rows * sum.row_bytes;
}

namespace {

struct EmulatedTiles {
  static TileMachine& machine() { return TileMachine::of_this_thread(); }
  static void configure(const MI_ISA::TileConfig& c) { machine().configure(reinterpret_cast<const uint8_t*>(&c)); }
  static void release() { machine().release(); }
  template <int t>
  static void zero() {
    machine().zero(t);
  }
  template <int t>
  static void load(const void* p, int64_t stride) {
    machine().load(t, static_cast<const uint8_t*>(p), stride);
  }
  template <int t>
  static void store(void* p, int64_t stride) {
    machine().store(t, static_cast<uint8_t*>(p), stride);
  }
  template <int c, int a, int b>
  static void dot() {
    machine().dot(c, a, b);
  }
};

// A memory operand behind the four bytes of VEX prefix and opcode (SDM vol. 2, 2.1.5).
struct Operand {
  uint8_t* base = nullptr;  // everything but the index
  int64_t stride = 0;       // the index, scaled
  int bytes = 0;            // of ModRM, SIB and displacement
};

int64_t general_register(const ucontext_t& u, int i) {
  constexpr int kOrder[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                              REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return u.uc_mcontext.gregs[kOrder[i]];
}

Operand memory_operand(const ucontext_t& u, const uint8_t* code) {
  const bool vex_x = !(code[1] & 0x40), vex_b = !(code[1] & 0x20);
  const uint8_t* p = code + 4;
  const int mod = *p >> 6, rm = *p & 7;
  ++p;
  Operand o;
  int64_t address = 0;
  bool wide = mod == 2;
  if (rm == 4) {
    const int scale = *p >> 6, index = ((*p >> 3) & 7) | (vex_x ? 8 : 0), base = *p & 7;
    ++p;
    if (index != 4) o.stride = general_register(u, index) << scale;
    if (mod == 0 && base == 5)
      wide = true;
    else
      address = general_register(u, base | (vex_b ? 8 : 0));
  } else if (mod == 0 && rm == 5) {
    address = reinterpret_cast<int64_t>(p) + 4;  // relative to the next instruction
    wide = true;
  } else {
    address = general_register(u, rm | (vex_b ? 8 : 0));
  }
  if (wide) {
    int32_t d;
    std::memcpy(&d, p, 4);
    address += d;
    p += 4;
  } else if (mod == 1) {
    address += int8_t(*p++);
  }
  o.base = reinterpret_cast<uint8_t*>(address);
  o.bytes = int(p - code - 4);
  return o;
}

// The length of the tile instruction at `code`, carried out; 0: it is none.
int carry_out(const ucontext_t& u, const uint8_t* code) {
  enum { kNone, k66, kF3, kF2 };
  if (code[0] != 0xc4 || (code[1] & 0x1f) != 2 || (code[2] & 0x84) != 0) return 0;  // VEX.128.0F38.W0
  const int prefix = code[2] & 3, opcode = code[3], modrm = code[4], reg = (modrm >> 3) & 7, rm = modrm & 7;
  const bool memory = modrm >> 6 != 3;
  const int tile3 = ~(code[2] >> 3) & 15;
  TileMachine& machine = TileMachine::of_this_thread();
  if (opcode == 0x5e && prefix == kF2 && !memory) {
    machine.dot(reg, rm, tile3);
    return 5;
  }
  if (opcode == 0x49 && prefix == kNone && modrm == 0xc0) {
    machine.release();
    return 5;
  }
  if (opcode == 0x49 && prefix == kF2 && !memory && rm == 0) {
    machine.zero(reg);
    return 5;
  }
  if (!memory) return 0;
  const Operand o = memory_operand(u, code);
  if (opcode == 0x49 && prefix == kNone && reg == 0)
    machine.configure(o.base + o.stride);
  else if (opcode == 0x4b && prefix == kF2 && rm == 4)
    machine.load(reg, o.base, o.stride);
  else if (opcode == 0x4b && prefix == kF3 && rm == 4)
    machine.store(reg, o.base, o.stride);
  else
    return 0;
  return 4 + o.bytes;
}

void on_illegal_instruction(int, siginfo_t*, void* context) {
  ucontext_t& u = *static_cast<ucontext_t*>(context);
  greg_t& rip = u.uc_mcontext.gregs[REG_RIP];
  const int length = carry_out(u, reinterpret_cast<const uint8_t*>(rip));
  rip += length;
  if (length == 0) signal(SIGILL, SIG_DFL);  // the instruction runs again and ends the process
}

[[maybe_unused]] bool trap_tile_instructions() {  // unused in a build without the kernel
  struct sigaction action = {};
  action.sa_sigaction = on_illegal_instruction;
  action.sa_flags = SA_SIGINFO;
  return sigaction(SIGILL, &action, nullptr) == 0;
}

}  // namespace

void gemm_i8_amx_emulated(const GemmArgs& a, const GemmRange& r, void* scratch) {
  MI_ISA::tile_gemm<EmulatedTiles>(a, r, scratch);
}

void gemm_i8_amx_trapped(const GemmArgs& a, const GemmRange& r, void* scratch) {
#if defined(MI_SCALAR_ONLY)
  MI_CHECK(false, "not in this build: {} {} {}", a.m, r.m_end, scratch);
#else
  static const bool trapped = trap_tile_instructions();
  MI_CHECK(trapped, "sigaction");
  gemm_i8_amx(a, r, scratch);
#endif
}

namespace {

// The loops over emulated tiles, and the compiled kernel: on the CPU's own tiles where it has them.
struct Form {
  const char* name;
  GemmFn run;  // null: not on this CPU
  bool counted() const { return run == gemm_i8_amx_emulated || run == gemm_i8_amx_trapped; }
};
GemmFn compiled_form() {
#if !defined(MI_SCALAR_ONLY)
  const hw::CpuFeatures f = hw::detect_cpu();
  if (f.avx512_vnni) return f.amx_int8 ? gemm_i8_amx : gemm_i8_amx_trapped;
#endif
  return nullptr;
}

class Int8AmxTest : public testing::TestWithParam<Form> {
 protected:
  void SetUp() override {
    if (!GetParam().run) GTEST_SKIP() << "the compiled AMX kernel needs AVX-512 VNNI";
  }
  void TearDown() override { EXPECT_FALSE(TileMachine::of_this_thread().configured()) << "tiles left behind"; }
  GemmKernel kernel() const {
    return {GetParam().name, GemmFormat::kI8, "", [](const hw::CpuFeatures&) { return true; }, GetParam().run};
  }
};
INSTANTIATE_TEST_SUITE_P(Forms, Int8AmxTest,
                         testing::Values(Form{"Emulated", gemm_i8_amx_emulated}, Form{"Compiled", compiled_form()}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(Int8AmxTest, EveryNumberOfRows) {
  const int64_t widths[] = {1, 16, 17, 40, 64, 75, 100}, depths[] = {1, 63, 64, 65, 200, 1024, 1025, 2100};
  const int64_t products = TileMachine::of_this_thread().products();
  int64_t cases = 0;
  for (int64_t m = 1; m <= 129; ++m) {
    if (m > 70 && m % 19 != 0 && m < 127) continue;
    if (kSanitized && m > 18 && (m + 1) % 16 > 2) continue;  // the rows around whole tiles
    for (int64_t i = 0; i < 3; ++i) {
      const int64_t n = widths[(m + i * 3) % 7], k = depths[(m + i * 5) % 8];
      const GemmCase c(GemmFormat::kI8, m, n, k, unsigned(m));
      ASSERT_TRUE(same_bits(c.run(kernel(), i != 1), c.run(reference_gemm(GemmFormat::kI8), i != 1)))
          << "m " << m << " n " << n << " k " << k;
      ++cases;
    }
  }
  if (GetParam().counted()) {
    EXPECT_GT(TileMachine::of_this_thread().products(), products + cases * 40) << "no tile was multiplied";
  }
}

// Rows equally far apart are loaded where they lie, others are brought together; y's rows are named separately.
TEST_P(Int8AmxTest, RowsInAnyOrder) {
  const auto third = [](int64_t i) { return i * 3; };
  const auto backwards = [](int64_t i) { return 140 - i * 2; };
  const auto same = [](int64_t) -> int64_t { return 7; };
  const auto scattered = [](int64_t i) { return (i * 53 + 11) % 151; };
  const auto last_off = [](int64_t i) { return i + (i % 45 == 44); };
  for (int64_t (*order)(int64_t) : {+third, +backwards, +same, +scattered, +last_off})
    for (int64_t m : {5, 16, 17, 33, 45, 50}) {
      const GemmCase c(GemmFormat::kI8, 151, 50, 1100, unsigned(m));
      std::vector<int32_t> x_rows(static_cast<size_t>(m)), y_rows(x_rows);
      for (size_t i = 0; i < x_rows.size(); ++i) {
        x_rows[i] = int32_t(order(int64_t(i)));
        y_rows[i] = int32_t(i * 38 % 151);
      }
      std::vector<float> y[2];
      for (int form = 0; form < 2; ++form) {
        y[form].assign(size_t(c.m * c.n), 3.0f);
        GemmArgs a = c.args(y[form].data());
        a.m = m;
        a.x_rows = x_rows.data();
        a.y_rows = y_rows.data();
        a.residual = form == 0 ? c.residual.as<float>() : a.residual;
        gemm_range(form == 0 ? kernel() : reference_gemm(GemmFormat::kI8), a, {0, m, 0, pad_n(c.n) / kNTile});
      }
      ASSERT_TRUE(same_bits(y[0], y[1])) << m << " rows";
    }
}

// The last tile of rows overlaps the one before: its first rows may not be finished twice.
TEST_P(Int8AmxTest, ResidualIsAddedOnce) {
  for (int64_t m : {17, 35, 83, 127}) {
    const GemmCase c(GemmFormat::kI8, m, 70, 1100);
    std::vector<float> y(c.residual.as<float>(), c.residual.as<float>() + c.m * c.n);
    GemmArgs a = c.args(y.data());
    a.residual = y.data();
    gemm_range(kernel(), a, c.whole());
    ASSERT_TRUE(same_bits(y, c.run(reference_gemm(GemmFormat::kI8)))) << m << " rows";
  }
}

TEST(Int8AmxLoops, OneConfigurationAndNoEmptyRows) {
  TileMachine& machine = TileMachine::of_this_thread();
  for (int64_t m = 1; m <= kMaxRangeRows; ++m) {
    const GemmCase c(GemmFormat::kI8, m, 40, 100);
    const int64_t before = machine.multiplications(), configurations = machine.configurations();
    std::vector<float> y(size_t(c.m * c.n));
    gemm_range({"", GemmFormat::kI8, "", nullptr, gemm_i8_amx_emulated}, c.args(y.data()), c.whole());
    const int64_t tiles = (m + 15) / 16, rows = (m + tiles - 1) / tiles * tiles;
    EXPECT_EQ(machine.multiplications() - before, rows * pad_n(c.n) * pad_k(c.k)) << m << " rows";
    EXPECT_LT(rows - m, tiles);
    EXPECT_EQ(machine.configurations() - configurations, 1);
  }
}

struct Config {
  uint8_t bytes[64] = {1};
  Config& tile(int t, int rows, int row_bytes) {
    bytes[16 + 2 * t] = uint8_t(row_bytes);
    bytes[48 + t] = uint8_t(rows);
    return *this;
  }
};

TEST(TileMachineTest, MultipliesSignedBytes) {
  TileMachine m;
  m.configure(Config().tile(0, 3, 20).tile(1, 3, 8).tile(2, 2, 20).bytes);
  int8_t a[3][8], b[2][20];
  int32_t c[3][5], expected[3][5];
  std::mt19937 rng(1);
  for (auto& row : a)
    for (int8_t& v : row) v = int8_t(rng());
  for (auto& row : b)
    for (int8_t& v : row) v = int8_t(rng());
  a[0][0] = b[0][0] = -128;
  for (int i = 0; i < 3; ++i)
    for (int j = 0; j < 5; ++j) {
      c[i][j] = expected[i][j] = i == 2 ? INT32_MAX : int32_t(rng() % 1000);
      int64_t sum = expected[i][j];
      for (int k = 0; k < 8; ++k) sum += a[i][k] * b[k / 4][j * 4 + k % 4];
      expected[i][j] = int32_t(uint32_t(sum));  // modulo 2^32
    }
  m.load(0, reinterpret_cast<uint8_t*>(c), 20);
  m.load(1, reinterpret_cast<uint8_t*>(a), 8);
  m.load(2, reinterpret_cast<uint8_t*>(b), 20);
  m.dot(0, 1, 2);
  m.store(0, reinterpret_cast<uint8_t*>(c), 20);
  EXPECT_EQ(std::memcmp(c, expected, sizeof c), 0);
  m.zero(0);
  m.store(0, reinterpret_cast<uint8_t*>(c), 20);
  for (auto& row : c)
    for (int32_t v : row) EXPECT_EQ(v, 0);
}

TEST(TileMachineDeathTest, RefusesWhatHardwareRefuses) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  TileMachine m;
  const Config good = Config().tile(0, 3, 20).tile(1, 3, 8).tile(2, 2, 20).tile(3, 16, 64).tile(4, 4, 20);
  m.configure(good.bytes);
  uint8_t memory[1024] = {};
  m.load(3, memory, 64);
  EXPECT_DEATH(m.load(5, memory, 64), "tile 5 is not usable");
  EXPECT_DEATH(m.dot(0, 1, 3), "rows x bytes");
  EXPECT_DEATH(m.dot(4, 1, 2), "rows x bytes");
  EXPECT_DEATH(m.dot(0, 2, 1), "rows x bytes");
  EXPECT_DEATH(m.dot(0, 0, 2), "are not three");
  EXPECT_DEATH(m.configure(Config().tile(0, 17, 64).bytes), "17 rows");
  EXPECT_DEATH(m.configure(Config().tile(0, 16, 65).bytes), "65 bytes");
  EXPECT_DEATH(m.configure(Config().tile(0, 0, 64).bytes), "0 rows");
  for (int reserved : {2, 15, 32, 47, 56, 63}) {
    Config c = good;
    c.bytes[reserved] = 1;  // as where stores to the configuration were dropped
    EXPECT_DEATH(m.configure(c.bytes), "reserved byte");
  }
  m.release();
  EXPECT_DEATH(m.store(3, memory, 64), "no tiles configured");
}

}  // namespace
}  // namespace mi::kernels
