#pragma once

#include <string>

namespace mi::server {

// A product outside the fast path, as /metrics tells it.
struct Fallback {
  std::string kind;   // "float": not int8 in an int8 model; "kernel": on a slower kernel than there could be
  std::string where;  // "layers 0-2: attn.o.weight"
  std::string why;
};

}  // namespace mi::server
