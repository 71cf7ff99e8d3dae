#pragma once
// One run of the benchmark as a file keeps it: where it was measured, on what, with which settings, every round's
// figures. A record is a JSON object; --save writes one, a history holds one per line.

#include <optional>
#include <string>
#include <vector>

#include "artifact/types.h"
#include "base/file.h"
#include "base/json.h"
#include "tools/bench/share.h"

namespace mi::tools {

struct EngineId {
  std::string name, precision;
  std::string checksum;  // of engine.json, which holds the checksums of the weights
  bool operator==(const EngineId&) const = default;
};
Result<EngineId> identify_engine(const Path& dir, const artifact::Manifest& m);

struct BenchSettings {
  BenchCases cases;
  std::string kv_type;
  std::string attention_order;  // as exec::LoadOptions has it once loaded; "": written by a version that had one order only
  int64_t max_tokens_per_step = 0;
  int64_t expert_cache_bytes = 0;  // 0: all experts in memory
  bool operator==(const BenchSettings&) const = default;
};

struct BenchRecord {
  std::string version, when;  // "metainfer 0.1.0", "2026-11-29T20:15:00Z"
  Machine machine;
  EngineId engine;
  BenchSettings settings;
  std::vector<BenchRow> rows;
  std::vector<BenchShare> shares;  // by row; empty: not known
  double load_s = 0;
  std::optional<int64_t> peak_bytes;  // most memory that was resident; none: not known
};

std::string utc_now();
// What every record begins with, as it stands in a history.
std::string record_beginning();
Json record_json(const BenchRecord& r);
// Error (kBadInput): not a record, or one of another version of the program that has keys unknown here.
Result<BenchRecord> parse_record(const Json& j, const std::string& what);
Result<BenchRecord> read_record(const Path& p);
// Error: the file exists and force is not set; it cannot be written.
Status write_record(const BenchRecord& r, const Path& p, bool force);

}  // namespace mi::tools
