#pragma once
// Memory of this process as the kernel counts it.

#include <cstdint>
#include <string_view>

#include "base/result.h"

namespace mi::hw {

struct ProcessMemory {
  int64_t resident = 0, anonymous = 0;  // now; resident - anonymous is pages of files and shared memory
  int64_t peak = 0;                     // the most that was ever resident
};
// Error (kEnvironment): /proc/self/status cannot be read or lacks the numbers.
Result<ProcessMemory> process_memory();
Result<ProcessMemory> parse_process_status(std::string_view text);

// Makes the peak what is resident now. False where the kernel does not offer it: the peak then is that of the whole
// life.
bool reset_peak_memory();

// How much of [data, data + bytes) is resident for this process, page by page.
struct ResidentPart {
  int64_t anonymous = 0, file = 0;
  int64_t total() const { return anonymous + file; }
};
// Error (kEnvironment): /proc/self/pagemap cannot be read.
Result<ResidentPart> resident_part(const void* data, int64_t bytes);

}  // namespace mi::hw
