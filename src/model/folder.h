#pragma once
// Files of a checkpoint folder that somebody else wrote. A name from an index or a config is only ever a plain name
// inside the folder; links are followed and must end inside it (or in the blobs folder of the same download cache,
// where the hub's client keeps the files that a snapshot links to). Anything else is refused before it is opened.

#include <string>

#include "base/file.h"
#include "base/result.h"

namespace mi::model {

// The path of the regular file `name` in dir; `origin` says where the name comes from ("model.safetensors.index.json").
Result<Path> file_in_folder(const Path& dir, const std::string& name, const std::string& origin);

// There is something under this (plain) name, whatever it is.
bool is_in_folder(const Path& dir, const std::string& name);

}  // namespace mi::model
