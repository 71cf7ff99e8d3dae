#pragma once
// Where outputs may stand, and what stands beside them.

#include <string>
#include <string_view>

#include "base/file.h"
#include "base/result.h"

namespace mi {

// Refuses an output that is an input, lies inside of one, or holds one: with force an output replaces what has its name.
// Links are followed. Either may be missing, or a file.
Status check_outside(const Path& input, const Path& output);

// The path of a neighbour, "out" and "out/" with ".piece": "out.piece".
Path beside(const Path& output, std::string_view suffix);

// The ending of its name in small letters: ".json" of "A.JSON".
std::string lower_ending(const Path& file);

// A write at p that found no room: bytes, or files, are used up.
Error disk_full(const Path& p);
// ... or a file larger than a limit allows.
Error too_large(const Path& p);

}  // namespace mi
