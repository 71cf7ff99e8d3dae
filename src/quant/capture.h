#pragma once
// What the matrices of one layer are fed: everything that smoothing, activation scales and error-compensating rounding
// want to know about the layer, from one run of its float form.

#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ir/graph.h"
#include "quant/piece_engine.h"

namespace mi::quant {

// A matrix of a block and the value that it multiplies.
struct MatrixUse {
  int32_t weight = 0;  // index into Block::weights
  std::string value;
  int64_t cols = 0;
  bool experts = false;  // [E, N, K]
  bool pairs = false;    // the value has one row per (token, chosen expert), not per token
};
std::vector<MatrixUse> matrix_uses(const ir::Block& b);

struct Fed {
  int64_t cols = 0;
  bool pairs = false;
  std::vector<float> max_abs;  // per channel, over all tokens
  std::vector<float> rows;     // of the kept tokens, [kept (x k), cols]
};

struct LayerCapture {
  int32_t layer = 0;
  std::map<std::string, Fed> values;   // by name in the graph
  int64_t kept = 0;                    // tokens whose rows are here, spread evenly over all
  int64_t k = 0;                       // experts per token; 0: the layer has no router
  std::vector<int32_t> chosen;         // [kept, k]
  std::vector<int64_t> expert_tokens;  // over all tokens

  // What experts see of tokens that were not routed to them; may be null. See expert_rows().
  std::shared_ptr<const LayerCapture> forced;

  // Places in Fed::rows that expert e was fed (e < 0: all).
  std::vector<int64_t> rows_of(const Fed& f, int64_t expert) const;
};

// What expert e was fed by way of a value: its own rows, or of an expert with fewer than min_tokens what it was forced
// to see. e < 0: all rows.
struct ExpertRows {
  const Fed* fed = nullptr;
  std::vector<int64_t> rows;
};
ExpertRows expert_rows(const LayerCapture& c, const std::string& value, int64_t expert, int64_t min_tokens);

// The one-layer model with its router sending every token to every expert: for what experts see of tokens that they
// would not get. What such a layer puts out means nothing.
ir::MirDir with_all_experts(ir::MirDir piece);

// Runs the plain float form (opt level 0) of a layer over `in` [tokens, hidden]; out: the layer's results, may be `in`.
LayerCapture capture_layer(PieceEngine& engine, const ir::Block& block, int32_t layer, const Sequences& s,
                           std::span<const float> in, std::span<float> out, int64_t keep_tokens);

// X^T X of the given rows, each column divided by divisor (empty: 1): [cols, cols], symmetric. Every element is summed
// in the order of the rows, so the result does not depend on the number of threads.
std::vector<float> gram_matrix(const Fed& f, std::span<const int64_t> rows, std::span<const float> divisor,
                               hw::ThreadPool* pool);

}  // namespace mi::quant
