#pragma once
// One YAML document as yaml-cpp's nodes, for readers that need to know how a value is written.

#include <yaml-cpp/yaml.h>

#include <string>
#include <string_view>

#include "base/result.h"

namespace mi::model {

// An empty text is a null node. Refused: what is no YAML, and a second document, which nobody would read.
Result<YAML::Node> load_yaml(std::string_view text, const std::string& what);

// "what: not valid YAML: line 2, column 5: ..."
Error yaml_error(const std::string& what, const YAML::Exception& e);

}  // namespace mi::model
