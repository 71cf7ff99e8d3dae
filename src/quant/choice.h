#pragma once
// Which matrices are rounded, and to what: the recipe's default for those of attention, experts and dense layers, then
// its sensitive_layers, then its `layers` in order; the last word wins. Router, index, shared gate and head stay float
// unless `layers` names them: a name from which such and others begin means the others, a pattern all that it matches.

#include <map>
#include <string>
#include <vector>

#include "base/result.h"
#include "ir/edit.h"
#include "ir/graph.h"
#include "quant/config.h"

namespace mi::quant {

class Choice {
 public:
  // Of a model that is quantized already, only what `layers` names is rounded. Errors: nothing to round; a pattern that
  // means no matrix; int8 or int4 asked for what is quantized already or cannot be.
  static Result<Choice> make(const QuantConfig& c, const ir::Graph& g, const std::string& what);

  // As ir::to_quantized() asks.
  ir::QuantFormat format(int32_t layer, const ir::WeightDecl& d) const;
  bool rounds(const std::string& weight) const;  // "layers.3.attn.q.weight"
  bool rounds_tied_head() const { return rounds_tied_head_; }

  int64_t rounded() const { return int64_t(formats_.size()); }
  const std::vector<std::string>& notes() const { return notes_; }
  int64_t kept() const { return kept_; }  // of those that the default rounds

  struct Count {
    std::string pattern;
    LayerFormat format;
    int64_t matches;
  };
  const std::vector<Count>& counts() const { return counts_; }  // sensitive_layers, then layers

 private:
  void leave_out_unusual(const std::string& pattern, const std::vector<std::string>& usual, std::vector<std::string>* hits);
  std::map<std::string, ir::QuantFormat> formats_;  // by module; one that is not here stays as it is
  std::vector<Count> counts_;
  std::vector<std::string> notes_;
  int64_t kept_ = 0;
  bool rounds_tied_head_ = false;
};

// The modules that a name (whole, or a beginning of it that ends before a dot) or a "re:" pattern means. None, or a
// pattern that is not one, is an error that starts with `key`.
Result<std::vector<std::string>> matching(const std::string& key, const std::string& pattern,
                                          const std::vector<std::string>& modules);

// Refuses alphas of layers that the model does not have.
Status check_layers(const QuantConfig& c, const ir::Graph& g);

// Whether a recipe that says nothing else rounds this matrix.
bool is_rounded_by_default(const ir::WeightDecl& d);

// The first quantized matrix, or null.
const ir::WeightDecl* first_quantized(const ir::Graph& g);

// Gives the head of a tied model a matrix of its own, kHeadWeight, to be filled from kEmbeddingWeight.
void untie_head(ir::Graph& g);
inline constexpr const char* kHeadWeight = "lm_head.weight";
inline constexpr const char* kEmbeddingWeight = "embed.weight";

}  // namespace mi::quant
