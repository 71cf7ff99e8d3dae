#include "quant/mix.h"

#include <algorithm>
#include <cmath>

#include "base/utf8.h"

namespace mi::quant {
namespace {

constexpr double kOneSided = 0.9;   // of one kind
constexpr double kDiffers = 0.3;    // distance from traffic
constexpr double kMissing = 0.05;   // share of traffic of a kind of which calibration has less than a fifth of that
constexpr std::array<int64_t, 5> kLengths = {16, 64, 256, 1024, 4096};

// The character at *at, which moves behind it; a broken byte is U+FFFD.
uint32_t next_code_point(std::string_view s, size_t* at) {
  const size_t n = utf8_bytes(s, *at);
  const auto byte = [&](size_t i) { return uint32_t(uint8_t(s[*at + i])); };
  uint32_t c = 0xfffd;
  if (n == 1) c = byte(0);
  if (n == 2) c = (byte(0) & 31) << 6 | (byte(1) & 63);
  if (n == 3) c = (byte(0) & 15) << 12 | (byte(1) & 63) << 6 | (byte(2) & 63);
  if (n == 4) c = (byte(0) & 7) << 18 | (byte(1) & 63) << 12 | (byte(2) & 63) << 6 | (byte(3) & 63);
  *at += std::max<size_t>(n, 1);
  return c;
}

bool is_cjk(uint32_t c) {
  return (c >= 0x3040 && c <= 0x30ff) || (c >= 0x3400 && c <= 0x9fff) || (c >= 0xac00 && c <= 0xd7af) ||
         (c >= 0xf900 && c <= 0xfaff) || (c >= 0x20000 && c <= 0x3ffff);
}

}  // namespace

const char* text_kind_name(TextKind k) {
  static constexpr const char* kNames[] = {"latin text", "CJK text", "other scripts", "code", "structure", "numbers"};
  return kNames[int(k)];
}

TextKind kind_of_line(std::string_view line) {
  int64_t letters = 0, latin = 0, cjk = 0, digits = 0, code = 0, structure = 0, all = 0;
  for (size_t at = 0; at < line.size();) {
    const uint32_t c = next_code_point(line, &at);
    if (c == ' ' || c == '\t' || c == '\r') continue;
    ++all;
    if (c < 0x80) {
      const char a = char(c);
      if ((a >= 'a' && a <= 'z') || (a >= 'A' && a <= 'Z')) ++letters, ++latin;
      else if (a >= '0' && a <= '9') ++digits;
      else if (std::string_view("(){};=+*&<>_!%^~").find(a) != std::string_view::npos) ++code;
      else if (std::string_view("[]\":|#/").find(a) != std::string_view::npos) ++structure;
    } else if (is_cjk(c)) {
      ++letters, ++cjk;
    } else if (c < 0x250) {
      ++letters, ++latin;
    } else {
      ++letters;
    }
  }
  if (all == 0) return TextKind::kLatin;
  if (digits * 2 > all) return TextKind::kNumbers;
  if (code * 10 > all && code >= structure) return TextKind::kCode;
  if (structure * 8 > all) return TextKind::kStructure;
  if (cjk * 2 > letters) return TextKind::kCjk;
  return latin * 2 >= letters ? TextKind::kLatin : TextKind::kOtherScript;
}

Mix mix_of(const Sequences& s, const text::Tokenizer& t) {
  Mix m;
  double all = 0;
  for (const std::vector<int32_t>& ids : s) {
    ++m.sequences;
    m.tokens += int64_t(ids.size());
    const auto place = std::lower_bound(kLengths.begin(), kLengths.end(), int64_t(ids.size()));
    m.lengths[size_t(place - kLengths.begin())] += 1;
    std::string text;
    for (int32_t id : ids) text += t.is_special(id) ? "\n" : t.token_bytes(id);  // marks of turns are no code
    for (size_t at = 0; at < text.size();) {
      size_t end = text.find('\n', at);
      if (end == std::string::npos) end = text.size();
      m.kinds[size_t(kind_of_line(std::string_view(text).substr(at, end - at)))] += double(end - at);
      all += double(end - at);
      at = end + 1;
    }
  }
  for (double& k : m.kinds) k = all > 0 ? k / all : 0;
  for (double& l : m.lengths) l = m.sequences > 0 ? l / double(m.sequences) : 0;
  return m;
}

double mix_distance(const Mix& a, const Mix& b) {
  double sum = 0;
  for (int k = 0; k < kTextKinds; ++k) sum += std::fabs(a.kinds[size_t(k)] - b.kinds[size_t(k)]);
  return sum / 2;
}

std::vector<std::string> judge_mix(const Mix& c, const Mix* traffic) {
  std::vector<std::string> out;
  if (!traffic) {
    const auto most = std::max_element(c.kinds.begin(), c.kinds.end());
    if (*most >= kOneSided)
      out.push_back(fmt::format("the calibration set is one-sided: {:.0f} % of it is {}; if users send other text too, add some, or "
                                "give a sample of real prompts (--traffic) to compare with",
                                100 * *most, text_kind_name(TextKind(most - c.kinds.begin()))));
    return out;
  }
  if (const double d = mix_distance(c, *traffic); d > kDiffers)
    out.push_back(fmt::format("the calibration set differs from the traffic: {:.0f} % of it would have to be of another kind", 100 * d));
  for (int k = 0; k < kTextKinds; ++k) {
    const double here = c.kinds[size_t(k)], there = traffic->kinds[size_t(k)];
    if (there >= kMissing && here < there / 5)
      out.push_back(fmt::format("the traffic is {:.0f} % {}, the calibration set only {:.1f} %: add such text",
                                100 * there, text_kind_name(TextKind(k)), 100 * here));
  }
  const auto longest = [](const Mix& m) {
    size_t i = m.lengths.size();
    while (i > 0 && m.lengths[i - 1] < kMissing) --i;
    return i;
  };
  if (longest(*traffic) > longest(c))
    out.push_back("the traffic has longer prompts than the calibration set has sequences: raise calibration_length");
  return out;
}

std::string mix_text(const Mix& m) {
  std::string s;
  for (int k = 0; k < kTextKinds; ++k)
    if (m.kinds[size_t(k)] >= 0.005)
      s += fmt::format("{}{:.0f} % {}", s.empty() ? "" : ", ", 100 * m.kinds[size_t(k)], text_kind_name(TextKind(k)));
  return s;
}

Json mix_json(const Mix& m) {
  Json j;
  for (int k = 0; k < kTextKinds; ++k) j["kinds"][text_kind_name(TextKind(k))] = m.kinds[size_t(k)];
  j["lengths"] = m.lengths;
  j["sequences"] = m.sequences;
  j["tokens"] = m.tokens;
  return j;
}

}  // namespace mi::quant
