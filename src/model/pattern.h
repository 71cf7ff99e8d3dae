#pragma once
// Which layers have a property (experts, a sliding window, a block index, a rope). A recipe gives a list of rules,
// tried in order:
//   all, none
//   {names: KEY, yes: [sparse], no: [dense]}    a list of one name per layer
//   {flags: KEY}                                a list of 0 and 1 (or booleans) per layer; not used when the value is
//                                               no list
//   {from, until, last, every, offset, except}  layer i is in when from <= i < until, i <= last (-1: no limit),
//                                               (i + offset) % every = 0 and i is not in the list `except`; each a
//                                               number or a KEY
// KEY is a canonical config name. Rules whose keys the file gives must agree about every layer; if it gives none, the
// first rule that its defaults can answer decides.

#include <string>
#include <vector>

#include "model/config.h"

namespace mi::model {

Result<std::vector<bool>> resolve_layers(const Json& rules, int64_t layers, Config& c, const std::string& what);

}  // namespace mi::model
