#pragma once
// From canonical weights to tensors of the checkpoint. The binder answers, for a weight of the graph, where its numbers
// come from and in which form they are; it remembers what was used, so that at the end nothing is missing and nothing
// is left over.

#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "ir/graph.h"
#include "model/checkpoint.h"
#include "model/export.h"
#include "model/formats/stored.h"
#include "model/graph_builder.h"
#include "model/origin.h"
#include "model/quant_scheme.h"
#include "model/recipe.h"
#include "model/view.h"

namespace mi::model {

struct Part {
  const Checkpoint::Tensor* tensor = nullptr;
  StridedView view;                               // where the tensor is stored quantized, only its dimensions count
  std::shared_ptr<const formats::Stored> stored;  // nullptr: plain floats
};

// A weight of the MIR directory: the parts follow one another along its first dimensions.
struct Source {
  DType dtype = DType::kF32;
  ir::WeightFormat format = ir::WeightFormat::kFloat;
  Shape shape;
  std::vector<Part> parts;
  std::vector<Part> scales;  // kW8A8: one float per row, or one for all
  Origin origin;
  std::string local;  // "attn.q.weight"
  ir::Mark mark = ir::Mark::kNone;
  // Float here, quantized in the checkpoint, at least in part.
  bool dequantized() const;
  std::string stored_as() const;  // the format of the first part that is; precondition: dequantized
};

class Binder {
 public:
  // scheme may be null (a float checkpoint). extra_layers: how many layers behind the last are skipped.
  static Result<Binder> create(const Recipe& r, const Checkpoint& k, Config& c, QuantScheme* scheme, int64_t layers,
                               int64_t extra_layers);

  // The weight's form; its source is kept under its full name. A tensor that is missing
  // or has another shape is remembered for finish(), so that one message can name them all.
  Result<WeightInfo> need(int32_t layer, const std::string& local, const Shape& shape, ir::Mark mark);
  bool is_present(const std::string& top_name) const;
  // lm_head.weight beside tied embeddings: used up without being part of the graph.
  void use_up(const std::string& top_name);
  const Checkpoint::Tensor* find_top(const std::string& top_name) const;

  Status finish() const;  // missing, left over
  // Weights that are dequantized get the narrowest type that holds every number of all layers' ones; until then they
  // count as F32. Reads them if need be. False: there are none.
  Result<bool> settle_dtypes();
  WeightInfo info(const std::string& full_name) const;  // precondition: it was asked for
  std::vector<Dequantized> dequantized() const;
  std::vector<std::string> notes() const;
  const std::map<std::string, Source>& sources() const { return sources_; }
  const std::vector<std::pair<std::string, int64_t>>& skipped() const { return skipped_; }
  int64_t used() const { return int64_t(used_.size()); }

 private:
  Binder(const Recipe& r, const Checkpoint& k, Config& c, QuantScheme* s)
      : recipe_(r), checkpoint_(k), config_(c), scheme_(s) {}
  Status normalise(int64_t layers, int64_t extra_layers);
  struct Candidate {
    const Alternative* alternative = nullptr;
    std::vector<std::string> names;  // normalised, in order of the parts
    size_t present = 0;
    std::string first_missing;
  };
  Candidate expand(const Alternative& a, int32_t layer, int64_t experts) const;
  const Checkpoint::Tensor* find(const std::string& normalised) const;
  // As this checkpoint spells it: a tensor that is missing, for messages; one that has the wrapper of t.
  std::string original(const std::string& normalised) const;
  std::string spelled_as(const Checkpoint::Tensor& t, const std::string& normalised) const;
  Result<Part> make_part(const Checkpoint::Tensor& t, const Shape& shape, const std::vector<ViewOp>& ops,
                         bool is_vector) const;
  Result<std::shared_ptr<const formats::Stored>> stored_form(const Checkpoint::Tensor& t, const std::string& local,
                                                             ir::Mark mark);
  Status decide_format(Source* s, const std::string& local);

  const Recipe& recipe_;
  const Checkpoint& checkpoint_;
  Config& config_;
  QuantScheme* scheme_;
  std::unordered_map<std::string, const Checkpoint::Tensor*> by_name_;  // normalised, skipped ones left out
  std::unordered_set<const Checkpoint::Tensor*> used_;
  const std::pair<std::string, std::string>* wrapper_ = nullptr;  // of recipe_.rename, the last that was taken off
  std::vector<std::pair<std::string, int64_t>> skipped_;
  std::map<std::string, Source> sources_;
  std::map<std::string, std::vector<ViewOp>> ops_;  // parsed, by their JSON text
  std::vector<std::string> missing_, mismatches_;
  int64_t static_activations_ = 0, asymmetric_activations_ = 0;  // tensors made for them
};

// "*" stands for any characters.
bool glob_match(std::string_view pattern, std::string_view name);

}  // namespace mi::model
