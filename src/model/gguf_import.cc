#include "model/gguf_import.h"

#include <algorithm>
#include <set>

#include "model/checkpoint.h"
#include "model/formats/gguf_blocks.h"

namespace mi::model {
namespace {

// Config value (canonical name in the recipe) <- key, without "<arch>.".
struct Key {
  const char* name;
  const char* key;
};
constexpr Key kGgufKeys[] = {
    {"hidden", "embedding_length"},
    {"max_positions", "context_length"},
    {"heads", "attention.head_count"},
    {"kv_heads", "attention.head_count_kv"},
    {"head_dim", "attention.key_length"},
    {"eps", "attention.layer_norm_rms_epsilon"},
    {"dense_width", "feed_forward_length"},
    {"expert_width", "expert_feed_forward_length"},
    {"experts", "expert_count"},
    {"k", "expert_used_count"},
    {"shared_experts", "expert_shared_count"},
    {"shared_width", "expert_shared_feed_forward_length"},
    {"first_dense", "leading_dense_block_count"},
    {"moe_start", "leading_dense_block_count"},
    {"groups", "expert_group_count"},
    {"groups_keep", "expert_group_used_count"},
    {"renorm", "expert_weights_norm"},
    {"route_scale", "expert_weights_scale"},
    {"mtp_layers", "nextn_predict_layers"},
    {"embedding_multiplier", "embedding_scale"},
    {"residual_multiplier", "residual_scale"},
    {"attention_multiplier", "attention.scale"},
    {"logits_scaling", "logit_scale"},
};

class Importer {
 public:
  Importer(const GgufHeader& h, const std::string& path) : h_(h), path_(path) {}

  Result<GgufModel> run() {
    GgufModel m;
    const std::string arch = h_.architecture();
    if (arch.empty()) return bad_input("{}: general.architecture is missing", path_);
    prefix_ = arch + ".";
    if (const Json parts = top("split.count"); parts.is_number_unsigned() && parts.get<uint64_t>() > 1)
      return bad_input("{}: is one of {} parts of a model; join them first (llama-gguf-split --merge)", path_,
                       parts.get<uint64_t>());
    const Json experts = get("expert_count");
    m.arch = find_gguf_arch(arch, experts.is_number() && experts != 0);
    if (!m.arch || !m.arch->can_import) return unknown(arch);
    MI_TRY(m.recipe, find_recipe(m.arch->family, path_));
    m.model_type = m.recipe.model_types.front();
    MI_TRY_VOID(check_tensors());
    rename(*m.arch, &m.recipe);
    MI_TRY(m.config, config(*m.arch, m.recipe));
    m.gating = get("expert_gating_func");
    note_unread(&m.notes);
    return m;
  }

 private:
  Json top(const std::string& key) const {
    const auto it = h_.keys.find(key);
    return it == h_.keys.end() ? Json() : it->second;
  }
  Json get(const std::string& key) {
    read_.insert(prefix_ + key);
    return top(prefix_ + key);
  }
  const GgufHeader::Tensor* tensor(const std::string& name) const {
    const auto it = std::find_if(h_.tensors.begin(), h_.tensors.end(), [&](const auto& t) { return t.name == name; });
    return it == h_.tensors.end() ? nullptr : &*it;
  }

  Error unknown(const std::string& arch) const {
    std::vector<std::string> known;
    for (const GgufArch& a : gguf_archs())
      if (a.can_import && (known.empty() || std::find(known.begin(), known.end(), a.arch) == known.end()))
        known.push_back(a.arch);
    return bad_input(
        "{}: GGUF files of the architecture '{}' are not imported; known are {}: use the safetensors checkpoint of the "
        "model",
        path_, arch, fmt::join(known, ", "));
  }

  Status check_tensors() const {
    for (const GgufHeader::Tensor& t : h_.tensors)
      if (!formats::can_read_gguf(t.type))
        return bad_input(
            "{}: tensor '{}' has the type {}, which is not read; known are {}: use another file of the model", path_,
            t.name, formats::find_gguf_block(t.type)->name, formats::readable_gguf_types());
    return {};
  }

  // The recipe's tensors under the file's names; where the family has plain names of its own, those are remembered.
  static void rename(const GgufArch& a, Recipe* r) {
    r->rename.clear();
    r->skip.clear();
    r->layer_prefix = "blk.{layer}.";
    for (const bool top : {true, false}) {
      Bindings renamed;
      for (auto& [local, alternatives] : top ? r->top : r->layer) {
        const std::string name = gguf_tensor_name(a, local);
        if (name.empty()) continue;
        Alternative b;
        b.from = {(top ? "" : r->layer_prefix) + name};
        for (const Alternative& old : alternatives)
          if (b.known_as.empty() && old.from.size() == 1 && old.ops.empty()) b.known_as = old.from[0];
        if (local == "moe.shared_gate.weight") b.ops = Json::array({{{"reshape", Json::array({1, "hidden"})}}});
        renamed[local] = {std::move(b)};
      }
      (top ? r->top : r->layer) = std::move(renamed);
    }
  }

  // One number for all layers; some files list one per layer.
  Result<Json> uniform(const std::string& key) {
    const Json v = get(key);
    if (!v.is_array()) return v;
    if (v.empty() || std::any_of(v.begin(), v.end(), [&](const Json& e) { return e != v[0]; }))
      return bad_input("{}: {}{} differs between layers, which the family's graph does not do", path_, prefix_, key);
    return v[0];
  }

  Result<Json> config(const GgufArch& a, const Recipe& r) {
    Json c = Json::object();
    c["model_type"] = r.model_types.front();
    const auto put = [&](const char* name, const Json& v) {
      const auto spec = r.keys.find(name);
      if (!v.is_null() && spec != r.keys.end() && !spec->second.keys.empty()) c[spec->second.keys.front()] = v;
    };
    for (const Key& k : kGgufKeys) {
      MI_TRY(Json v, uniform(k.key));
      put(k.name, v);
    }
    MI_TRY_VOID(layers(put));
    if (get("expert_feed_forward_length").is_null()) put("expert_width", get("feed_forward_length"));
    // Where only their width together is told, the shared experts are as many as fit.
    const Json shared = get("expert_shared_feed_forward_length"), each = get("expert_feed_forward_length");
    if (get("expert_shared_count").is_null()) {
      const bool fits = shared.is_number_unsigned() && each.is_number_unsigned() && each != 0;
      put("shared_experts", fits ? Json(shared.get<uint64_t>() / each.get<uint64_t>()) : Json(0));
    }
    put("tied", tensor("output.weight") == nullptr);
    put("use_qk_norm", tensor("blk.0.attn_q_norm.weight") != nullptr);
    put("attention_bias", tensor("blk.0.attn_q.bias") != nullptr);
    put("qkv_bias", tensor("blk.0.attn_q.bias") != nullptr);
    put("mlp_bias", tensor("blk.0.ffn_gate.bias") != nullptr);
    put("use_routing_bias", std::any_of(h_.tensors.begin(), h_.tensors.end(),
                                        [](const auto& t) { return t.name.ends_with("exp_probs_b.bias"); }));
    if (const auto* e = tensor("token_embd.weight"); e && e->shape.size() == 2) put("vocab", e->shape[0]);
    MI_TRY_VOID(rope(&c));
    for (const auto& [name, v] : a.built_in) put(name, v);
    put("sliding_window", get("attention.sliding_window"));
    put("bos", top("tokenizer.ggml.bos_token_id"));
    put("pad", top("tokenizer.ggml.padding_token_id"));
    Json ends = Json::array();
    for (const char* key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"})
      if (const Json v = top(key); v.is_number_integer() && std::find(ends.begin(), ends.end(), v) == ends.end())
        ends.push_back(v);
    if (!ends.empty()) put("eos", ends);
    c["dtype"] = "float32";
    return c;
  }

  // Layers that predict further tokens are counted among the blocks there.
  template <class Put>
  Status layers(const Put& put) {
    const Json blocks = get("block_count"), extra = get("nextn_predict_layers");
    if (!blocks.is_number_unsigned() || (!extra.is_null() && !extra.is_number_unsigned()) ||
        (!extra.is_null() && extra.get<uint64_t>() >= blocks.get<uint64_t>()))
      return bad_input("{}: {}block_count is no number of layers", path_, prefix_);
    const uint64_t n = extra.is_null() ? 0 : extra.get<uint64_t>();
    put("layers", blocks.get<uint64_t>() - n);
    put("mtp_layers", n);
    return {};
  }

  Status rope(Json* c) {
    if (const Json base = get("rope.freq_base"); !base.is_null()) (*c)["rope_theta"] = base;
    const Json dims = get("rope.dimension_count"), head = get("attention.key_length");
    if (dims.is_number_unsigned() && head.is_number_unsigned() && head != 0)
      (*c)["partial_rotary_factor"] = double(dims.get<uint64_t>()) / double(head.get<uint64_t>());
    const Json type = get("rope.scaling.type");
    if (type.is_null() || type == "none") return {};
    if (type != "linear")
      return bad_input(
          "{}: {}rope.scaling.type is {}; only linear scaling is read from GGUF: use the safetensors "
          "checkpoint of the model",
          path_, prefix_, dump_json(type));
    (*c)["rope_scaling"] = {{"rope_type", "linear"}, {"factor", get("rope.scaling.factor")}};
    return {};
  }

  // The architecture's keys that nothing read, but for those that the tensors' shapes tell as well.
  void note_unread(std::vector<std::string>* notes) const {
    std::vector<std::string> unread;
    for (const auto& [key, v] : h_.keys)
      if (key.starts_with(prefix_) && !read_.count(key) && key != prefix_ + "vocab_size" &&
          key != prefix_ + "attention.value_length" && key != prefix_ + "interleave_moe_layer_step")
        unread.push_back(key);
    if (!unread.empty())
      notes->push_back(fmt::format("{}: {} {} no effect", Path(path_).filename().string(), list_text(unread, 12),
                                   unread.size() == 1 ? "has" : "have"));
  }

  const GgufHeader& h_;
  const std::string& path_;
  std::string prefix_;
  std::set<std::string, std::less<>> read_;
};

// The ids of tokenizer.json's special tokens by name, for tokenizer_config.json.
Json tokenizer_config(const GgufHeader& h, const Json& tokens) {
  Json c = Json::object();
  constexpr std::pair<const char*, const char*> kNames[] = {{"bos_token", "tokenizer.ggml.bos_token_id"},
                                                            {"eos_token", "tokenizer.ggml.eos_token_id"},
                                                            {"pad_token", "tokenizer.ggml.padding_token_id"}};
  for (const auto& [name, key] : kNames)
    if (const auto it = h.keys.find(key); it != h.keys.end() && it->second.is_number_unsigned())
      if (const uint64_t id = it->second.get<uint64_t>(); id < tokens.size()) c[name] = tokens[size_t(id)];
  if (const auto it = h.keys.find("tokenizer.ggml.add_bos_token"); it != h.keys.end() && it->second.is_boolean())
    c["add_bos_token"] = it->second;
  return c;
}

// tokenizer.json of byte-level BPE, or why it cannot be made.
Result<Json> tokenizer_json(const GgufHeader& h) {
  const auto get = [&](const char* key) {
    const auto it = h.keys.find(std::string("tokenizer.ggml.") + key);
    return it == h.keys.end() ? Json() : it->second;
  };
  const Json model = get("model"), pre = get("pre"), tokens = get("tokens"), types = get("token_type"),
             merges = get("merges");
  if (model != "gpt2")
    return bad_input("its tokenizer is {}, and only byte-level BPE ('gpt2') is rebuilt", dump_json(model));
  const auto rule = pre_tokenizer_of(pre.is_string() ? pre.get<std::string>() : "default");
  if (!rule) return bad_input("its pre-tokenizer {} is not known", dump_json(pre));
  const auto all_text = [](const Json& list) {
    return list.is_array() && std::all_of(list.begin(), list.end(), [](const Json& e) { return e.is_string(); });
  };
  if (!all_text(tokens) || !all_text(merges)) return bad_input("its tokens or merges are missing");
  if (!types.is_null() && (!types.is_array() || types.size() != tokens.size()))
    return bad_input("its tokens and their types differ in number");
  // ggml's token types.
  constexpr int kControl = 3, kUserDefined = 4, kUnused = 5;
  Json vocab = Json::object(), added = Json::array();
  std::map<std::string, size_t> seen;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const std::string text = tokens[i].get<std::string>();
    const Json type = types.is_null() ? Json(1) : types[i];
    if (type == kUnused) continue;
    if (const auto [it, fresh] = seen.emplace(text, i); !fresh)
      return bad_input("its tokens {} and {} are the same text", it->second, i);
    vocab.get_ref<Json::object_t&>().emplace_back(text, i);  // seen knows that it is new; an ordered object searches
    if (type == kControl || type == kUserDefined)
      added.push_back({{"id", i},
                       {"content", text},
                       {"single_word", false},
                       {"lstrip", false},
                       {"rstrip", false},
                       {"normalized", false},
                       {"special", type == kControl}});
  }
  Json j = {{"version", "1.0"}, {"truncation", nullptr}, {"padding", nullptr}, {"added_tokens", std::move(added)}};
  // GGUF does not say that Qwen's tokenizer composes characters first.
  j["normalizer"] = pre == "qwen2" ? Json{{"type", "NFC"}} : Json();
  j["pre_tokenizer"] = rule->pre_tokenizer;
  j["post_processor"] = nullptr;
  if (get("add_bos_token") == true && get("bos_token_id").is_number_unsigned() &&
      get("bos_token_id").get<uint64_t>() < tokens.size()) {
    const Json bos = tokens[size_t(get("bos_token_id").get<uint64_t>())];
    const auto special = [&] { return Json{{"SpecialToken", {{"id", bos}, {"type_id", 0}}}}; };
    const auto text = [](const char* id, int type) { return Json{{"Sequence", {{"id", id}, {"type_id", type}}}}; };
    j["post_processor"] = {
        {"type", "TemplateProcessing"},
        {"single", Json::array({special(), text("A", 0)})},
        {"pair", Json::array({special(), text("A", 0), text("B", 1)})},
        {"special_tokens",
         {{bos.get<std::string>(),
           {{"id", bos}, {"ids", Json::array({get("bos_token_id")})}, {"tokens", Json::array({bos})}}}}}};
  }
  j["decoder"] = {{"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", true}, {"use_regex", true}};
  j["model"] = {{"type", "BPE"},
                {"dropout", nullptr},
                {"unk_token", nullptr},
                {"continuing_subword_prefix", nullptr},
                {"end_of_word_suffix", nullptr},
                {"fuse_unk", false},
                {"byte_fallback", false},
                {"ignore_merges", rule->ignore_merges},
                {"vocab", std::move(vocab)},
                {"merges", merges}};
  return j;
}

}  // namespace

TokenizerFiles gguf_tokenizer(const GgufHeader& h) {
  TokenizerFiles t;
  const auto it = h.keys.find("tokenizer.chat_template");
  if (it != h.keys.end() && it->second.is_string()) t.chat_template = it->second.get<std::string>();
  const auto tokenizer = tokenizer_json(h);
  if (!tokenizer.ok()) {
    t.notes.push_back(fmt::format(
        "warning: no tokenizer, {}: the model takes token ids only; a tokenizer.json from the model's safetensors "
        "release can be put into the MIR's tokenizer folder",
        tokenizer.error().message()));
    return t;
  }
  t.has_tokenizer = true;
  t.texts.push_back({"tokenizer.json", dump_json(*tokenizer)});
  t.texts.push_back({"tokenizer_config.json", dump_json(tokenizer_config(h, h.keys.at("tokenizer.ggml.tokens")), 1)});
  t.notes.push_back("the tokenizer is rebuilt from the file's keys");
  return t;
}

Result<GgufModel> read_gguf_model(const GgufHeader& h, const std::string& path) {
  MI_TRY(GgufModel m, Importer(h, path).run());
  m.text = gguf_tokenizer(h);
  return m;
}

Status follow_gguf(const GgufModel& m, ArchSpec* spec) {
  const bool sigmoid = spec->moe.route.score == RouteScore::kSigmoid;
  if (m.arch->moe && m.gating.is_number() && m.gating != 0 && (m.gating == 2) != sigmoid)
    return bad_input(
        "expert_gating_func is {}, but experts of the family {} are chosen by a {}: use the safetensors "
        "checkpoint of the model",
        dump_json(m.gating), m.arch->family, sigmoid ? "sigmoid (2)" : "softmax (1)");
  if (m.arch->pairs)
    for (RopeSpec& r : spec->ropes) r.interleaved = true;
  return {};
}

}  // namespace mi::model
