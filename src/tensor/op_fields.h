#pragma once
// Names and fields of operations as text and JSON: what the graph's text form and engine.json share. A field that equals
// its default is left out; an unknown key is refused by name.

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/result.h"
#include "tensor/op.h"

namespace mi {

std::optional<Op> op_from_name(std::string_view name);
std::optional<Role> role_from_name(std::string_view name);
std::string_view elem_name(Elem e);                          // "f32", "q8", "i32", "route", "state"
std::optional<Elem> elem_from_name(std::string_view name);
std::string_view rows_name(Rows r);                          // "token", "pair", "logit"
std::optional<Rows> rows_from_name(std::string_view name);

OpParams default_params(Op op);

std::string float_text(float f);                             // shortest text that reads back to the same bits

// "eps=1e-05 plus_one=true"; "" when all fields have their defaults.
std::string params_text(const OpParams& p);
Result<OpParams> params_from_text(Op op, const std::vector<std::pair<std::string, std::string>>& fields, const std::string& what);

Json params_json(const OpParams& p);
Result<OpParams> params_from_json(Op op, const Json& j, const std::string& what);

}  // namespace mi
