#pragma once
// What quantization did to tasks: accuracy per group and greedy answers of the float and the rounded model side by side,
// and for a group that lost, which layers did it: each layer is put back into float, alone.

#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "quant/piece_engine.h"
#include "tools/eval.h"

namespace mi::tools {

struct QualityLimits {
  double max_points = 1;  // of accuracy that any group may lose
  double min_exact = 97;  // percent of the greedy answers that have to be the same, token by token
};

struct QualityOptions {
  Path source, result;  // MIR directories
  EvalOptions eval;
  Path scratch;          // a free name for temporary engines
  int threads = 0;
  QualityLimits limits;  // a group that loses more is looked into
  const quant::Sequences* calibration = nullptr;  // may be null
};

struct GroupQuality {
  std::string group;
  double before = 0, after = 0;  // accuracy
  double known_tokens = -1;      // share of the group's prompt tokens that occur in the calibration text; -1: not looked at
  std::vector<std::pair<int32_t, double>> restored;  // layer, accuracy with this layer in float; the best first
  double lost_points() const { return 100 * (before - after); }
};

struct QualityReport {
  EvalResult before, after;
  int64_t answers = 0, same = 0;  // greedy answers, token by token
  std::vector<GroupQuality> groups;
  double exact_match() const { return answers ? double(same) / double(answers) : 1; }
};

Result<QualityReport> measure_quality(const QualityOptions& o);

// A sentence for each limit that is exceeded.
std::vector<std::string> quality_failures(const QualityReport& r, const QualityLimits& limits);

std::string quality_text(const QualityReport& r, const QualityLimits& limits);
Json quality_json(const QualityReport& r, const QualityLimits& limits);

}  // namespace mi::tools
