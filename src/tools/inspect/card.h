#pragma once
// A model on one page: what it is, how many parameters, in which formats, what a token costs in memory.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "ir/stats.h"
#include "tools/inspect/subject.h"

namespace mi::tools {

struct Card {
  std::vector<std::pair<std::string, std::string>> facts;  // label, value; in order
  ir::GraphStats stats;
  int64_t kv_bf16 = 0, kv_int8 = 0;  // bytes per token, as the engine stores them
  // Tokens that fit beside the weights: of one sequence, with the share of the memory that `serve` takes by default.
  int64_t context_bf16 = 0, context_int8 = 0;
};

// available: bytes of memory; weights and the fraction for keys and values are taken off as `serve` does.
Card make_card(const Subject& s, int64_t available, double kv_fraction = 0.6);
std::string card_text(const Card& c);
Json card_json(const Card& c);
// Tables, for a page.
std::string card_html(const Card& c);

}  // namespace mi::tools
