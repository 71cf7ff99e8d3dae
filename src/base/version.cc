#include "base/version.h"

namespace mi {

const char* version() { return MI_VERSION; }

}  // namespace mi
