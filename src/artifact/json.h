#pragma once
// Manifest <-> the text of engine.json. Reading checks shape and types of every field (a wrong type, an unknown enum
// name, a number out of range and an unknown key are named); what the values mean together is validate.h's.

#include <string>
#include <string_view>

#include "artifact/types.h"
#include "base/json.h"
#include "base/result.h"

namespace mi::artifact {

inline constexpr size_t kMaxManifestBytes = size_t(256) << 20;

Json to_json(const Manifest& m);
// to_json as the text that is written: one entry of a list per line, so that two engines can be compared with diff.
std::string manifest_text(const Manifest& m);
// `what` names the source in errors.
Result<Manifest> from_json(const Json& j, const std::string& what);
Result<Manifest> parse_manifest(std::string_view text, const std::string& what);

std::string_view packing_name(Packing p);  // "plain", "packed_f32", "packed_bf16", "packed_i8"

}  // namespace mi::artifact
