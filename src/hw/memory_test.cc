#include "hw/memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <limits>

#include "base/temp_dir.h"
#include "hw/process_memory.h"

namespace mi::hw {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class MadeUpMachine : public testing::Test {
 protected:
  void put(const std::string& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text << "\n";
  }
  void cache(int cpu, int index, int level, const std::string& size, const std::string& shared) {
    const std::string dir =
        "sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/cache/index" + std::to_string(index) + "/";
    put(dir + "level", std::to_string(level));
    put(dir + "size", size);
    put(dir + "shared_cpu_list", shared);
  }
  const TempDir dir_;
  const fs::path root_ = dir_.path();
};

TEST_F(MadeUpMachine, EachLastLevelCacheCountsOnce) {
  EXPECT_EQ(last_level_cache_bytes(root_), 0) << "nothing known";
  for (int cpu = 0; cpu < 4; ++cpu) {
    cache(cpu, 0, 1, "32K", std::to_string(cpu));
    cache(cpu, 1, 1, "32K", std::to_string(cpu));
    cache(cpu, 2, 2, "1024K", std::to_string(cpu));
    cache(cpu, 3, 3, "32768K", cpu < 2 ? "0-1" : "2-3");
  }
  put("sys/devices/system/cpu/cpufreq/boost", "1");
  EXPECT_EQ(last_level_cache_bytes(root_), 2 * (32 << 20));
}

TEST_F(MadeUpMachine, MemoryIsTheLeastOfKernelAndGroups) {
  EXPECT_EQ(available_memory(root_), std::numeric_limits<int64_t>::max());
  put("proc/meminfo", "MemTotal:       16000 kB\nMemAvailable:    8000 kB");
  EXPECT_EQ(available_memory(root_), 8000 * 1024);
  put("proc/self/cgroup", "0::/a/b");
  put("sys/fs/cgroup/a/b/memory.max", "max");
  put("sys/fs/cgroup/a/b/memory.current", "5000");
  put("sys/fs/cgroup/a/memory.max", "9000");
  put("sys/fs/cgroup/a/memory.current", "7000");
  put("sys/fs/cgroup/a/memory.stat", "anon 1000\nfile 500\nfile_mapped 100");     // cache makes room
  EXPECT_EQ(available_memory(root_), 2500);
  put("sys/fs/cgroup/a/memory.current", "20000");
  EXPECT_EQ(available_memory(root_), 0);
}

TEST_F(MadeUpMachine, MemoryIsWhatTheLimitsOfTheProcessLeave) {
  put("proc/meminfo", "MemAvailable:    8000 kB");
  put("proc/self/status", "VmPeak:  4000 kB\nVmSize:  3000 kB\nVmData:   100 kB");
  put("proc/self/limits", "Max data size             unlimited            unlimited            bytes\n"
                          "Max address space         unlimited            unlimited            bytes");
  EXPECT_EQ(available_memory(root_), 8000 * 1024);
  put("proc/self/limits", "Max data size             unlimited            unlimited            bytes\n"
                          "Max address space         5120000              unlimited            bytes");
  EXPECT_EQ(available_memory(root_), 2000 * 1024);
  put("proc/self/limits", "Max data size             1024000              unlimited            bytes\n"
                          "Max address space         5120000              unlimited            bytes");
  EXPECT_EQ(available_memory(root_), 900 * 1024);
  put("proc/self/status", "VmSize:  3000 kB\nVmData:  2000 kB");
  EXPECT_EQ(available_memory(root_), 0);
}

TEST_F(MadeUpMachine, MemoryOfVersion1) {
  put("proc/self/cgroup", "4:memory:/docker/x");
  put("sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes", "9000");
  put("sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes", "7000");
  put("sys/fs/cgroup/memory/docker/x/memory.stat", "cache 1\ntotal_cache 300");
  EXPECT_EQ(available_memory(root_), 2300);
}

TEST(ProcessMemory, ReadsTheKernelsNumbers) {
  const auto m =
      parse_process_status("Name:\tx\nVmPeak:\t  900 kB\nVmHWM:\t  800 kB\nVmRSS:\t  700 kB\nRssAnon:\t  600 kB\n");
  ASSERT_TRUE(m.ok()) << m.error().message();
  EXPECT_EQ(m->peak, 800 * 1024);
  EXPECT_EQ(m->resident, 700 * 1024);
  EXPECT_EQ(m->anonymous, 600 * 1024);
  const auto none = parse_process_status("Name:\tVmRSS: 5 kB\n");
  ASSERT_FALSE(none.ok());
  EXPECT_THAT(none.error().message(), HasSubstr("VmRSS"));
}

TEST(ProcessMemory, SeesPagesThatWereTouched) {
  const auto now = process_memory();
  if (!now.ok()) GTEST_SKIP() << now.error().message();
  EXPECT_GE(now->peak, now->resident / 2);
  constexpr int64_t kBytes = int64_t(32) << 20;
  const int64_t page = sysconf(_SC_PAGESIZE);
  char* p = static_cast<char*>(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(p, MAP_FAILED);
  madvise(p, kBytes, MADV_NOHUGEPAGE);
  auto part = resident_part(p, kBytes);
  if (!part.ok()) GTEST_SKIP() << part.error().message();
  EXPECT_EQ(part->total(), 0);
  std::memset(p + 8 * page, 1, size_t(8 * page));
  EXPECT_EQ(resident_part(p, kBytes)->anonymous, 8 * page);
  EXPECT_EQ(resident_part(p + 9 * page + 5, 2 * page)->anonymous, 2 * page) << "parts of pages count as parts";
  std::memset(p, 1, kBytes);
  EXPECT_EQ(resident_part(p, kBytes)->anonymous, kBytes);
  EXPECT_GE(process_memory()->peak, kBytes);
  munmap(p, kBytes);
  if (reset_peak_memory()) {
    EXPECT_LT(process_memory()->peak, now->resident + kBytes) << "the peak is now's";
  }
}

}  // namespace
}  // namespace mi::hw
