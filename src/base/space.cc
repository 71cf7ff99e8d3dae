#include "base/space.h"

#include "base/util.h"

namespace mi {

Status check_space(const Path& output, uint64_t bytes) {
  const Path parent = std::filesystem::absolute(output).parent_path();
  const auto free = free_bytes(parent);
  if (free.ok() && *free < bytes)
    return fail(ErrorCode::kEnvironment, "{}: the output needs {}, but only {} are free", parent.string(),
                human_bytes(double(bytes)), human_bytes(double(*free)));
  return {};
}

}  // namespace mi
