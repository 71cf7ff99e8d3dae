#pragma once
// Does an engine say what its reference says? Three layers of evidence: outputs of every layer, routing, logits and
// greedy tokens. Two kinds of reference:
//
//  * a recorded one (safetensors): seqS.input_ids, and any of seqS.hidden [layers+1, T, H] (residual stream: what
//    enters layer 0, then what leaves each layer), seqS.layerN.experts / .weights [T, k] (largest weight first),
//    seqS.logits [T, V], seqS.greedy_tokens; or input_ids.S and logits.S. Limits come from the "tolerance" of a .json
//    file of the same name beside it, else from the options; without either a float engine's logits may be off by 1e-4
//    of the largest.
//  * the float MIR that the engine goes back to: its matrices are compared with the engine's one by one
//    (verify_weights.h), and its plain float graph is run on the same tokens.
//
// A MIR can be judged without an engine: by a recorded reference that holds weights too, dequant.NAME (NAME as in the
// checkpoint; float, to 1 ulp) or dequant_first32rows.NAME; its plain float graph is then run on the recorded inputs.
//
// A float engine (fp32, with a cache of f32) must agree within the float limits. An engine with int8 activations, bfloat16
// weights or a smaller cache rounds, and a flipped expert moves logits by more than rounding: for it logits are judged by
// KL divergence, layers by relative deviation, routing is reported. Each of its layers is judged alone, too: fed the
// reference's residual stream, by what it adds to it. So the layer that is wrong is named, not a later one to which
// rounding adds the last bit. A reference by which nothing is judged is an error.

#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/result.h"
#include "tools/session.h"

namespace mi::tools {

struct VerifyLimits {
  double hidden_max_abs = 2e-4, logits_max_abs = 2e-4, weights_max_abs = 1e-4;  // float engines
  bool logits_relative = false;                     // logits_max_abs counts in units of the largest logit
  // Engines that round: mean KL per token in nats, and rms(difference) / rms(reference) of a layer's output, and of what
  // it adds alone.
  // Below 0: what good engines keep, 0.02 and 0.25 (a layer alone: 0.15) with 8-bit weights, 0.25 and 0.4 with 4-bit
  // ones. Of mini-m3 each layer alone has at most 0.036 and 0.14.
  double max_kl = -1, max_layer_deviation = -1;
  bool given_logits = false, given_hidden = false;  // set by flags: win over the file's tolerance
};

struct VerifyRow {
  std::string what;  // "seq0 layer 3 output"
  double found = 0, limit = 0;
  bool ok = true, judged = true;
  std::string unit;  // "max abs", "KL", "relative", "differ"
};

struct VerifyReport {
  std::vector<VerifyRow> rows;
  std::string first_bad;  // the first row out of limits in model order; empty: all within
  bool ok() const { return first_bad.empty(); }
  double mean_kl = 0;
  int64_t tokens = 0;
};

Result<VerifyReport> verify_reference(const Session& s, const Path& reference, VerifyLimits limits);

// Whether there is something to compare with: before an engine is loaded.
Status check_reference(const Path& reference);
Status check_mir(const Path& mir);

// engine: where s was opened from. data: text or .jsonl that both run; empty: the built-in text, or seeded random ids.
Result<VerifyReport> verify_mir(const Session& s, const Path& engine, const Path& mir, const Path& data,
                                VerifyLimits limits);

// A MIR and its weights against a recorded reference; so.engine is not looked at.
Result<VerifyReport> verify_tensors(const Path& mir, const Path& reference, SessionOptions so, VerifyLimits limits);

std::string verify_text(const VerifyReport& r);
Json verify_json(const VerifyReport& r);

}  // namespace mi::tools
