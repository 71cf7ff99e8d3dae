#pragma once
// A model's architecture with every number resolved: recipe + config.json, before any weight is looked at. Plain data;
// graph_builder.h makes the graph of it.

#include <string>
#include <vector>

#include "model/recipe.h"
#include "tensor/op.h"

namespace mi::model {

enum class QkNorm : uint8_t { kNone, kPerHead, kFull };
enum class SharedGate : uint8_t { kNone, kSigmoid };

struct RopeSpec {
  std::string layer_type;  // "" = of all layers
  int64_t rotary_dim = 0;
  bool interleaved = false;
  float attention_factor = 1;
  std::vector<float> inv_freq;  // [rotary_dim / 2]
};

struct LayerSpec {
  bool moe = false;
  bool indexed = false;  // attends to the blocks that the block index selects
  int64_t window = 0;    // 0 = all earlier tokens
  int rope = 0;          // into ArchSpec::ropes; -1 = none
};

struct ArchSpec {
  std::string family, model_type;
  int64_t vocab = 0, hidden = 0, layers = 0, max_positions = 0;
  std::vector<int64_t> eos_ids;
  int64_t bos_id = -1, pad_id = -1;
  float eps = 1e-6f;
  bool plus_one = false;  // norms multiply by 1 + w

  struct Attention {
    int64_t heads = 0, kv_heads = 0, head_dim = 0, v_dim = 0;
    bool bias_q = false, bias_k = false, bias_v = false, bias_o = false;
    QkNorm qk_norm = QkNorm::kNone;
    bool norm_after_rope = false;
    float clip = 0;  // > 0: q, k, v clamped to +-clip
    float scale = 1;
    float softcap = 0;
    bool sinks = false;
  } attention;

  struct Index {  // block index: IndexSelectParams
    int64_t heads = 0, dim = 0, block = 0, topk = 0, local = 1;
  } index;

  ActivationParams activation;  // of dense, shared and routed alike
  struct Mlp {
    int64_t width = 0;
    bool bias = false;
  } mlp;

  struct Moe {
    int64_t width = 0;
    bool router_bias = false, select_bias = false, expert_bias = false;
    RouteParams route;
    int64_t shared_width = 0;  // 0 = no shared expert
    SharedGate shared_gate = SharedGate::kNone;
    bool shared_bias = false;
  } moe;

  float embed_scale = 1, residual_scale = 1, logits_scale = 1;
  enum class Tied : uint8_t { kNo, kYes, kUnsaid };  // kUnsaid: the file does not say; the weights decide
  Tied tied = Tied::kUnsaid;
  bool tied_by_default = false;
  std::string dtype;  // of the checkpoint, as the config says it; only for random weights

  std::vector<RopeSpec> ropes;
  std::vector<LayerSpec> layer;
};

Result<ArchSpec> resolve_arch(const Recipe& r, Config& c);

// config.json's rope in all its spellings -> one RopeSpec (or one per layer type). section: the recipe's `rope`.
struct RopeRequest {
  std::string style;              // half, interleaved
  double theta = 10000;           // base when the file does not say
  double partial = 1;             // part of the head that is rotated when the file does not say
  bool check_rotary_dim = false;  // rotary_dim is only compared, partial_rotary_factor decides
  Json default_scaling;           // when the file has neither rope_scaling nor rope_parameters
  int64_t head_dim = 0, max_positions = 0;
};
Result<std::vector<RopeSpec>> resolve_rope(const RopeRequest& q, Config& c);

}  // namespace mi::model
