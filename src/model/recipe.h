#pragma once
// A model family as data: one YAML file (families/NAME.yaml, embedded at build; export --family-file reads one from
// disk). families/common.yaml holds what most share: config keys with all their spellings, groups of tensor names,
// prefixes, skips.
//
//   family: qwen3_moe
//   model_types: [qwen3_moe]            # of config.json; hyphens and underscores are equal
//   misspelled: [...]                   # accepted with a note
//   text_config: [text_config]          # where a wrapper keeps its text config
//   config:                             # canonical name: {keys, type, default, min}; merged over common's, field by
//                                       # field
//   require: {hidden_act: [silu]}       # raw config key: values that this recipe stands for; another value is
//                                       # refused
//   norm, attention, rope, window, index, activation, mlp, moe, scalars: the blocks (fields: arch.cc).
//                                       # A value is a constant, $name (a config value) or $(a * b) (an integer
//                                       # expression of config values).
//   tensors:
//     include: [attention, experts_q]   # groups of common.yaml
//     layer_prefix: "model.layers.{layer}."
//     top: {...}  layer: {...}          # canonical name: source, relative to layer_prefix in `layer`
//   skip: [{names: "vision_tower.*", why: vision}]     # counted, not read
//   extra_layers: $mtp_layers           # layers behind the last that are skipped (multi-token prediction)
//   ignored_keys: [...]                 # config keys that need no mention when nothing reads them
//
// A source is a name with {layer} and {expert}, or a list of alternatives; an alternative is a name or
// {from: NAME or [NAMES to concatenate by rows], ops: [...]} (ops: view.h). A name with {expert} is stacked over all
// experts. With `quantized: true` (false) an alternative is taken only where its tensors are stored quantized (are not):
// packed numbers are [.., out, in] whatever the family's float form is.

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "model/config.h"

namespace mi::model {

struct Alternative {
  std::vector<std::string> from;  // full templates
  std::optional<bool> quantized;
  std::string known_as;  // a template that names the weight for users instead of `from`; "" = none
  Json ops = Json::array();
};
using Bindings = std::map<std::string, std::vector<Alternative>>;  // canonical name ("attn.q.weight") -> alternatives

struct Recipe {
  struct Skip {
    std::string names, why;
  };
  std::string file;  // as errors name it
  std::string family;
  std::vector<std::string> model_types, misspelled, text_config, ignored_keys;
  KeySpecs keys;
  std::vector<std::pair<std::string, Json>> require;
  std::map<std::string, Json> sections;  // norm, attention, ...; absent ones are empty objects
  std::string layer_prefix;
  Bindings top, layer;
  std::vector<std::pair<std::string, std::string>> rename;  // prefix -> prefix, the first that fits is applied
  std::vector<Skip> skip;
  Json extra_layers;  // integer, "$name", or null
  std::vector<std::string> notes;

  const Json& section(const std::string& name) const;
};

// `what` names the file in errors.
Result<Recipe> parse_recipe(std::string_view yaml, const std::string& what);

// The built-in recipe for a model type. Accepted misspellings leave a note. An unknown type is refused with the known
// ones and the nearest; `path` is where the type was read.
Result<Recipe> find_recipe(const std::string& model_type, const std::string& path);
bool same_model_type(std::string a, std::string b);  // hyphen = underscore, case ignored
bool accepts(const Recipe& r, const std::string& model_type);

// The pair of r.rename that applies to a tensor's name in a checkpoint; nullptr: none.
const std::pair<std::string, std::string>* wrapper_of(const Recipe& r, std::string_view name);

struct EmbeddedFamily {
  std::string_view name, text;
};                                                       // "qwen3_moe", the YAML
const std::vector<EmbeddedFamily>& embedded_families();  // generated from families/*.yaml

}  // namespace mi::model
