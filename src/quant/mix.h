#pragma once
// What a set of texts is made of, and whether calibration text resembles real prompts. A scale learnt from one kind of
// text only is a scale for that kind.

#include <array>
#include <string>
#include <vector>

#include "base/json.h"
#include "quant/piece_engine.h"
#include "text/tokenizer.h"

namespace mi::quant {

enum class TextKind : uint8_t { kLatin, kCjk, kOtherScript, kCode, kStructure, kNumbers };
inline constexpr int kTextKinds = 6;
const char* text_kind_name(TextKind k);

// The kind that most of a line is of: code by its punctuation, structure (JSON, tables, markup) by brackets, bars and
// quotes, numbers by digits, else the script of most letters.
TextKind kind_of_line(std::string_view line);

struct Mix {
  std::array<double, kTextKinds> kinds{};   // share of characters in lines of each kind; sums to 1
  std::array<double, 6> lengths{};          // share of sequences with up to 16, 64, 256, 1024, 4096, more tokens
  int64_t sequences = 0, tokens = 0;
};
Mix mix_of(const Sequences& s, const text::Tokenizer& t);

// Half the sum of the differences of kinds: 0 equal, 1 nothing in common.
double mix_distance(const Mix& a, const Mix& b);

// Warnings in words: a set of one kind only (without traffic), or one that differs from traffic, and in what.
std::vector<std::string> judge_mix(const Mix& calibration, const Mix* traffic);

std::string mix_text(const Mix& m);
Json mix_json(const Mix& m);

}  // namespace mi::quant
