#include "model/gguf_arch.h"

#include <span>

namespace mi::model {
namespace {

struct Name {
  std::string_view local, file;
};
// Without ".weight" or ".bias".
constexpr Name kTop[] = {{"embed", "token_embd"}, {"final_norm", "output_norm"}, {"lm_head", "output"}};
constexpr Name kLayer[] = {
    {"attn_norm", "attn_norm"},
    {"attn.q", "attn_q"},
    {"attn.k", "attn_k"},
    {"attn.v", "attn_v"},
    {"attn.o", "attn_output"},
    {"attn.q_norm", "attn_q_norm"},
    {"attn.k_norm", "attn_k_norm"},
    {"attn.index_q", "indexer.q_proj"},
    {"attn.index_k", "indexer.k_proj"},
    {"attn.index_q_norm", "indexer.q_norm"},
    {"attn.index_k_norm", "indexer.k_norm"},
    {"mlp.gate", "ffn_gate"},
    {"mlp.up", "ffn_up"},
    {"mlp.down", "ffn_down"},
    {"moe.router", "ffn_gate_inp"},
    {"moe.experts.gate", "ffn_gate_exps"},
    {"moe.experts.up", "ffn_up_exps"},
    {"moe.experts.down", "ffn_down_exps"},
    {"moe.shared.gate", "ffn_gate_shexp"},
    {"moe.shared.up", "ffn_up_shexp"},
    {"moe.shared.down", "ffn_down_shexp"},
    {"moe.shared_gate", "ffn_gate_inp_shexp"},
};

struct KnownArch {
  const char* regex;  // of a Split, everything else plain
  bool ignore_merges;
  const char* name;
};
// The rule of GPT-4 with runs of one or of up to three digits, and that of GPT-4o.
#define MI_CONTRACTIONS "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define MI_GPT4(digits)                                    \
  MI_CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" digits \
                  "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
constexpr KnownArch kKnownArchs[] = {
    {MI_GPT4("\\p{N}"), false, "qwen2"},
    {MI_GPT4("\\p{N}{1,3}"), false, "dbrx"},
    {MI_GPT4("\\p{N}{1,3}"), true, "llama-bpe"},
    {"[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+" MI_CONTRACTIONS "?|"
     "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*" MI_CONTRACTIONS "?|"
     "\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
     false, "gpt-4o"},
};
#undef MI_GPT4
#undef MI_CONTRACTIONS

Json byte_level(bool use_regex) {
  return {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", use_regex}};
}

}  // namespace

std::string text_of(const Json& j, const char* key) {
  return j.is_object() && j.contains(key) && j[key].is_string() ? j[key].get<std::string>() : "";
}
bool flag_of(const Json& j, const char* key) {
  return j.is_object() && j.contains(key) && j[key].is_boolean() && j[key].get<bool>();
}

std::vector<Json> parts_of(const Json& p) {
  if (text_of(p, "type") != "Sequence") return {p};
  std::vector<Json> parts;
  if (p.contains("pretokenizers"))
    for (const Json& e : p["pretokenizers"]) parts.push_back(e);
  return parts;
}

const std::vector<GgufArch>& gguf_archs() {
  const std::pair<const char*, Json> divided{"renorm", true}, undivided{"renorm", false};
  static const std::vector<GgufArch> kArchs = {
      {.arch = "dots1", .family = "dots1"},
      {.arch = "ernie4_5-moe", .family = "ernie4_5_moe", .pairs = true},
      {.arch = "glm4moe", .family = "glm4_moe", .mlp_norm = "post_attention_norm"},
      {.arch = "granitemoe", .family = "granitemoe", .pairs = true},
      {.arch = "llama", .family = "llama", .moe = false, .pairs = true},
      {.arch = "minimax-m2", .family = "minimax_m2"},
      {.arch = "minimax-m3", .family = "minimax_m3", .can_import = false},
      {.arch = "llama", .family = "mixtral", .pairs = true},
      {.arch = "olmoe", .family = "olmoe", .built_in = {undivided}},
      {.arch = "qwen2moe", .family = "qwen2_moe", .built_in = {undivided}},
      {.arch = "qwen3", .family = "qwen3", .moe = false},
      {.arch = "qwen3moe", .family = "qwen3_moe", .built_in = {divided}},
  };
  return kArchs;
}

const GgufArch* find_gguf_family(std::string_view family) {
  for (const GgufArch& a : gguf_archs())
    if (a.family == family) return &a;
  return nullptr;
}

const GgufArch* find_gguf_arch(std::string_view arch, bool has_experts) {
  for (const GgufArch& a : gguf_archs())
    if (a.arch == arch && a.moe == has_experts) return &a;
  return nullptr;
}

std::string gguf_tensor_name(const GgufArch& a, std::string_view local) {
  if (local == "moe.select_bias") return "exp_probs_b.bias";
  const size_t dot = local.rfind('.');
  if (dot == local.npos) return "";
  const std::string_view stem = local.substr(0, dot), tail = local.substr(dot);
  if (stem == "mlp_norm") return a.mlp_norm + std::string(tail);
  for (const auto& table : {std::span<const Name>(kTop), std::span<const Name>(kLayer)})
    for (const Name& n : table)
      if (n.local == stem) return std::string(n.file) + std::string(tail);
  return "";
}

std::string pre_tokenizer_name(const Json& pre_tokenizer, bool ignore_merges) {
  const std::vector<Json> parts = parts_of(pre_tokenizer);
  if (parts.empty() || text_of(parts.back(), "type") != "ByteLevel" || flag_of(parts.back(), "add_prefix_space"))
    return "";
  // use_regex is on where nothing is said: GPT-2's own rule.
  const Json& last = parts.back();
  const bool gpt2 = !last.contains("use_regex") || flag_of(last, "use_regex");
  if (parts.size() == 1) return gpt2 && !ignore_merges ? "gpt-2" : "";
  if (parts.size() != 2) return "";
  const Json& p = parts[0];
  if (gpt2)
    return text_of(p, "type") == "Digits" && flag_of(p, "individual_digits") && !ignore_merges ? "starcoder" : "";
  if (text_of(p, "type") != "Split" || text_of(p, "behavior") != "Isolated" || flag_of(p, "invert") ||
      !p.contains("pattern"))
    return "";
  const std::string regex = text_of(p["pattern"], "Regex");
  for (const KnownArch& k : kKnownArchs)
    if (regex == k.regex && ignore_merges == k.ignore_merges) return k.name;
  return "";
}

std::optional<PreTokenizer> pre_tokenizer_of(std::string_view name) {
  if (name == "gpt-2" || name == "default") return PreTokenizer{byte_level(true), false};
  Json first;
  bool gpt2 = false, ignore_merges = false;
  if (name == "starcoder") {
    first = {{"type", "Digits"}, {"individual_digits", true}};
    gpt2 = true;
  }
  for (const KnownArch& k : kKnownArchs)
    if (name == k.name) {
      first = {{"type", "Split"}, {"pattern", {{"Regex", k.regex}}}, {"behavior", "Isolated"}, {"invert", false}};
      ignore_merges = k.ignore_merges;
    }
  if (first.is_null()) return std::nullopt;
  return PreTokenizer{{{"type", "Sequence"}, {"pretokenizers", Json::array({first, byte_level(gpt2)})}}, ignore_merges};
}

}  // namespace mi::model
