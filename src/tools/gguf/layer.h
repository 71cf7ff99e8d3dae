#pragma once
// What a layer of the plain graph computes, read back from its nodes: the opposite direction of model/graph_builder.h.
// Programs with one fixed graph per architecture (llama.cpp) can be given the weights only if the graph is the one that
// they have built in; so every node must be recognised, and a graph with anything else in it is refused.

#include <string>

#include "base/result.h"
#include "ir/graph.h"

namespace mi::tools::gguf {

using Weight = const ir::WeightDecl*;  // nullptr: there is none

struct Matrix {
  Weight weight = nullptr, bias = nullptr;
};
struct Mlp {
  Matrix gate, up, down;
  explicit operator bool() const { return down.weight != nullptr; }
};

enum class QkNorm : uint8_t { kNone, kPerHead, kFull };

struct Layer {
  Weight attn_norm = nullptr, mlp_norm = nullptr;
  Matrix q, k, v, o;
  Weight q_norm = nullptr, k_norm = nullptr;
  QkNorm qk_norm = QkNorm::kNone;
  bool norm_after_rope = false;
  float clip = 0;   // q, k, v clamped to +-clip
  RopeParams rope;  // rotary_dim 0: none
  Weight inv_freq = nullptr;
  AttentionParams attention;
  Weight sinks = nullptr;

  // The block index of a sparse layer; dim 0: none.
  IndexSelectParams index;
  Weight index_q = nullptr, index_k = nullptr, index_q_norm = nullptr, index_k_norm = nullptr;

  bool moe = false;
  Mlp mlp;  // dense, or the experts
  Mlp shared;
  Weight shared_gate = nullptr;
  Matrix router;
  Weight select_bias = nullptr;
  RouteParams route;
  ActivationParams activation;

  float eps = 0;          // of every norm
  bool plus_one = false;  // norms multiply by 1 + w
  float residual_scale = 1;
  bool static_scales = false;  // activations are rounded with scales from calibration
  bool saturates = false;      // ... or with scales per token that end at numbers from calibration
};

// The parts around the layers.
struct Ends {
  Weight embed = nullptr, final_norm = nullptr, head = nullptr;  // head == embed by name when tied
  float embed_scale = 1, logits_scale = 1, eps = 0;
  bool plus_one = false;
};

// Errors name the block and the node that is not understood. The pointers point into the graph.
Result<Layer> read_layer(const ir::Block& b);
Result<Ends> read_ends(const ir::Graph& g);

}  // namespace mi::tools::gguf
