#pragma once
// Whether the text side of a model can be used: asked before the work of export and build, not when the engine is
// opened.

#include "base/file.h"
#include "base/result.h"

namespace mi::tools {

// `folder`: a checkpoint, or the tokenizer/ folder of a MIR. A tokenizer or template that is there but cannot be read
// is an error that names the file and ends with way_out; an absent one is not.
Status check_text(const Path& folder, const std::string& way_out);

}  // namespace mi::tools
