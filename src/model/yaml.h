#pragma once
// YAML files as Json, so that recipes use the same typed access and the same "unknown key" refusal as JSON files.

#include <string>
#include <string_view>

#include "base/json.h"
#include "base/result.h"

namespace mi::model {

// One document. Plain scalars become null, true/false, numbers or strings; quoted ones are strings. Refused: duplicate
// keys, keys that are no scalars, and documents that expand (anchors) beyond a million values. `what` names the source
// in errors.
Result<Json> parse_yaml(std::string_view text, const std::string& what);

}  // namespace mi::model
