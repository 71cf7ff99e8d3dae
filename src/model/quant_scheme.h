#pragma once
// quantization_config of a checkpoint. Taken as it is: compressed-tensors `int-quantized` with int8 weights per output
// channel and int8 activations per token, both symmetric. Other formats are recognised, their tensors checked (scales
// there, of the right shape, finite; group indices in range), and then refused: "not supported yet".

#include <optional>
#include <string>
#include <vector>

#include "model/checkpoint.h"
#include "model/config.h"
#include "model/module_pattern.h"

namespace mi::model {

class QuantScheme {
 public:
  // nullopt: the config has no quantization_config. An unknown quant_method is refused.
  static Result<std::optional<QuantScheme>> read(Config& c);

  const std::string& method() const { return method_; }
  bool supported() const { return unsupported_.empty(); }
  // Of a scheme that is not supported: why its tensors cannot be trusted, or that it is not supported yet.
  Error refuse(const Checkpoint& k) const;

  // Matches module names as the checkpoint spells them ("model.layers.0.mlp.gate"); counts for the report.
  bool is_ignored(const std::string& module);
  bool is_targeted(const std::string& module);
  // One line per pattern with its matches; "warning: " where an ignore pattern matched nothing.
  std::vector<std::string> notes() const;

 private:
  Status read_compressed_tensors(const Json& q, const std::string& what);
  Status check_tensors(const Checkpoint& k) const;
  struct Pattern {
    std::string text;
    std::optional<ModulePattern> rx;  // of "re:..."
    int64_t matches = 0;
  };
  static Result<Pattern> read_pattern(const std::string& text, const std::string& what);
  static bool matches(Pattern& p, const std::string& module);

  std::string path_, method_, unsupported_;  // unsupported_: what is not supported, "" = all is well
  std::vector<int64_t> block_;               // fp8: weight_block_size
  std::vector<Pattern> targets_, ignore_;
};

}  // namespace mi::model
