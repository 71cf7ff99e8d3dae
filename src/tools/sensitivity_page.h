#pragma once
// The report of `metainfer quantize --sensitivity FILE.html`: one self-contained page.

#include <string>
#include <vector>

#include "quant/search.h"

namespace mi::tools {

// model: its name for the title.
std::string sensitivity_page(const std::string& model, const quant::Sensitivity& s,
                             const std::vector<quant::MixedChoice>& front);

}  // namespace mi::tools
