#pragma once
// Room on the disk, asked for before a long write and not found out after it.

#include <cstdint>

#include "base/file.h"
#include "base/result.h"

namespace mi {

// An error when fewer than `bytes` are free where output is going to be.
Status check_space(const Path& output, uint64_t bytes);

}  // namespace mi
