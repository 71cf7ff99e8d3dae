#pragma once
// quantization_config of a checkpoint as plain data: which module is stored in which format (formats/format.h). The
// tensors themselves are looked at in formats/stored.h.
//
// compressed-tensors names what it quantizes; a float tensor there that ought to be quantized, or the other way round,
// is an error. The other tools' lists of what they left alone have many dialects; a tensor's own siblings say what it
// is, so those lists are not needed and not read.

#include <optional>
#include <string>
#include <vector>

#include "model/checkpoint.h"
#include "model/config.h"
#include "model/formats/format.h"
#include "model/module_pattern.h"

namespace mi::model {

class QuantScheme {
 public:
  // nullopt: the config has no quantization_config. An unknown quant_method is refused. folder: of the checkpoint,
  // whose hf_quant_config.json (ModelOpt) stands in for a config without quantization_config; empty: none.
  static Result<std::optional<QuantScheme>> read(Config& c, const Path& folder);

  const std::string& method() const { return method_; }
  bool supported() const { return unsupported_.empty(); }
  Error refuse() const;  // precondition: not supported

  // The list of modules is complete: others are float.
  bool is_strict() const { return method_ == "compressed-tensors"; }
  // How the module is stored if it is quantized; nullptr: the config leaves it in float. Names are as the checkpoint
  // spells them ("model.layers.0.mlp.gate"). Counts for the report.
  const formats::Format* format_of(const std::string& module);
  // One line per pattern with its matches; "warning: " where an ignore pattern matched nothing. Then what of the config
  // is not followed.
  std::vector<std::string> notes() const;

 private:
  struct Pattern {
    std::string text;
    std::optional<ModulePattern> rx;  // of "re:..."
    int64_t matches = 0;
  };
  struct Group {
    std::vector<Pattern> targets;
    std::optional<formats::Format> format;  // nullopt: left in float
  };
  Status read_compressed_tensors(const Json& q, const std::string& what);
  Status read_group(const Json& g, const std::string& format, const std::string& at, const std::string& what,
                    Group* out);
  Status read_modelopt(const Json& q, const std::string& what);
  Status read_fp8(const Json& q, const std::string& what);
  Status read_gptq(const Json& q, const std::string& what);
  Status read_awq(const Json& q, const std::string& what);
  void add_everything(formats::Format f);
  static Result<Pattern> read_pattern(const std::string& text, const std::string& what);
  static bool matches(Pattern& p, const std::string& module);

  std::string path_, method_, unsupported_;  // unsupported_: what is not supported, "" = all is well
  std::vector<Group> groups_;                // the first that fits counts; those of class names come last
  std::vector<Pattern> ignore_;
  std::vector<std::string> notes_;
};

}  // namespace mi::model
