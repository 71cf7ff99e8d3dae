#pragma once

namespace mi {

const char* version();   // "0.1.0": the project's version in CMakeLists.txt

}  // namespace mi
