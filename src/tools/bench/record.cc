#include "tools/bench/record.h"

#include <ctime>

#include "base/util.h"
#include "base/version.h"

namespace mi::tools {
namespace {

constexpr const char* kKind = "metainfer bench record";

Json row_json(const BenchRow& r, const BenchShare* share) {
  Json j{{"metric", r.metric},
         {"n", r.n},
         {"tok_s", r.values(&BenchRound::tok_s)},
         {"ttft_s", r.values(&BenchRound::ttft_s)},
         {"total_tok_s", r.values(&BenchRound::total_tok_s)}};
  if (share)
    j["share"] = {{"gbs", share->gbs},
                  {"gops", share->gops},
                  {"bound", bound_name(share->limit.bound)},
                  {"of_limit", share->limit.share}};
  return j;
}

Status parse_share(const Json& j, const std::string& what, BenchShare* s) {
  MI_TRY_VOID(refuse_unknown_keys(j, {"gbs", "gops", "bound", "of_limit"}, what));
  MI_TRY(s->gbs, json_get<double>(j, "gbs", what));
  MI_TRY(s->gops, json_get<double>(j, "gops", what));
  MI_TRY(s->limit.share, json_get<double>(j, "of_limit", what));
  MI_TRY(const std::string bound, json_get<std::string>(j, "bound", what));
  for (Bound b : {Bound::kNone, Bound::kMemory, Bound::kArithmetic})
    if (bound == bound_name(b)) {
      s->limit.bound = b;
      return {};
    }
  return bad_input("{}: unknown bound '{}'", what, bound);
}

Status parse_row(const Json& j, const std::string& what, BenchRecord* r) {
  MI_TRY_VOID(refuse_unknown_keys(j, {"metric", "n", "tok_s", "ttft_s", "total_tok_s", "share"}, what));
  BenchRow row;
  MI_TRY(row.metric, json_get<std::string>(j, "metric", what));
  MI_TRY(row.n, json_get<int64_t>(j, "n", what));
  MI_TRY(const auto tok_s, json_get<std::vector<double>>(j, "tok_s", what));
  MI_TRY(const auto ttft_s, json_get<std::vector<double>>(j, "ttft_s", what));
  MI_TRY(const auto total, json_get<std::vector<double>>(j, "total_tok_s", what));
  if (tok_s.empty() || tok_s.size() != ttft_s.size() || tok_s.size() != total.size())
    return bad_input("{}: {} {} has {}, {} and {} rounds of its figures, expected as many of each and at least one",
                     what, row.metric, row.n, tok_s.size(), ttft_s.size(), total.size());
  for (size_t i = 0; i < tok_s.size(); ++i) {
    if (!(tok_s[i] > 0) || !(ttft_s[i] > 0))
      return bad_input("{}: {} {}: a speed or time that is not positive", what, row.metric, row.n);
    row.rounds.push_back({tok_s[i], ttft_s[i], total[i]});
  }
  if (j.contains("share")) {
    r->shares.emplace_back();
    MI_TRY_VOID(parse_share(j["share"], what + ": share", &r->shares.back()));
  }
  r->rows.push_back(std::move(row));
  return {};
}

Result<BenchSettings> parse_settings(const Json& j, const std::string& what) {
  MI_TRY_VOID(refuse_unknown_keys(j, {"prefill", "decode", "batch", "kv_type", "attention_order", "max_tokens_per_step", "expert_cache_bytes"}, what));
  BenchSettings s;
  MI_TRY(s.cases.prefill, json_get<std::vector<int64_t>>(j, "prefill", what));
  MI_TRY(s.cases.decode, json_get<std::vector<int64_t>>(j, "decode", what));
  MI_TRY(s.cases.batch, json_get<std::vector<int64_t>>(j, "batch", what));
  MI_TRY(s.kv_type, json_get<std::string>(j, "kv_type", what));
  if (j.contains("attention_order")) {
    MI_TRY(s.attention_order, json_get<std::string>(j, "attention_order", what));
  }
  MI_TRY(s.max_tokens_per_step, json_get<int64_t>(j, "max_tokens_per_step", what));
  if (j.contains("expert_cache_bytes")) {
    MI_TRY(s.expert_cache_bytes, json_get<int64_t>(j, "expert_cache_bytes", what));
  }
  return s;
}

Result<EngineId> parse_engine(const Json& j, const std::string& what) {
  MI_TRY_VOID(refuse_unknown_keys(j, {"name", "precision", "checksum"}, what));
  EngineId e;
  MI_TRY(e.name, json_get<std::string>(j, "name", what));
  MI_TRY(e.precision, json_get<std::string>(j, "precision", what));
  MI_TRY(e.checksum, json_get<std::string>(j, "checksum", what));
  return e;
}

}  // namespace

Result<EngineId> identify_engine(const Path& dir, const artifact::Manifest& m) {
  MI_TRY(const std::string text, read_file(dir / "engine.json"));
  return EngineId{m.model.name, m.model.precision, xxh3_hex(std::as_bytes(std::span(text)))};
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm t{};
  gmtime_r(&now, &t);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &t);
  return text;
}

std::string record_beginning() {
  const std::string all = dump_json(Json{{"kind", kKind}});
  return all.substr(0, all.size() - 1);
}

Json record_json(const BenchRecord& r) {
  Json j{{"kind", kKind}, {"version", r.version}, {"when", r.when}, {"machine", machine_json(r.machine)}};
  j["engine"] = {{"name", r.engine.name}, {"precision", r.engine.precision}, {"checksum", r.engine.checksum}};
  j["settings"] = {{"prefill", r.settings.cases.prefill},
                   {"decode", r.settings.cases.decode},
                   {"batch", r.settings.cases.batch},
                   {"kv_type", r.settings.kv_type},
                   {"attention_order", r.settings.attention_order},
                   {"max_tokens_per_step", r.settings.max_tokens_per_step}};
  if (r.settings.expert_cache_bytes > 0) j["settings"]["expert_cache_bytes"] = r.settings.expert_cache_bytes;
  j["load_s"] = r.load_s;
  j["peak_bytes"] = r.peak_bytes ? Json(*r.peak_bytes) : Json(nullptr);
  j["rows"] = Json::array();
  for (size_t i = 0; i < r.rows.size(); ++i)
    j["rows"].push_back(row_json(r.rows[i], i < r.shares.size() ? &r.shares[i] : nullptr));
  return j;
}

Result<BenchRecord> parse_record(const Json& j, const std::string& what) {
  if (!j.is_object() || !j.contains("kind") || j["kind"] != kKind)
    return bad_input("{}: not a record of metainfer bench; make one with metainfer bench --save", what);
  MI_TRY_VOID(refuse_unknown_keys(
      j, {"kind", "version", "when", "machine", "engine", "settings", "load_s", "peak_bytes", "rows"}, what));
  BenchRecord r;
  MI_TRY(r.version, json_get<std::string>(j, "version", what));
  MI_TRY(r.when, json_get<std::string>(j, "when", what));
  for (const char* part : {"machine", "engine", "settings", "rows", "peak_bytes"})
    if (!j.contains(part)) return bad_input("{}: {} is missing", what, part);
  MI_TRY(r.machine, parse_machine(j["machine"], what + ": machine"));
  MI_TRY(r.engine, parse_engine(j["engine"], what + ": engine"));
  MI_TRY(r.settings, parse_settings(j["settings"], what + ": settings"));
  MI_TRY(r.load_s, json_get<double>(j, "load_s", what));
  if (!j["peak_bytes"].is_null()) {
    MI_TRY(r.peak_bytes, json_get<int64_t>(j, "peak_bytes", what));
  }
  if (!j["rows"].is_array() || j["rows"].empty()) return bad_input("{}: rows: expected a list of measurements", what);
  for (const Json& row : j["rows"]) MI_TRY_VOID(parse_row(row, what + ": rows", &r));
  if (!r.shares.empty() && r.shares.size() != r.rows.size())
    return bad_input("{}: rows: some have a share of the limit and some none", what);
  return r;
}

Result<BenchRecord> read_record(const Path& p) {
  MI_TRY(const Json j, read_json(p));
  return parse_record(j, p.string());
}

Status write_record(const BenchRecord& r, const Path& p, bool force) {
  MI_TRY(OutputFile out, OutputFile::create(p, force));
  MI_TRY_VOID(out.writer().write(dump_json(record_json(r), 2) + "\n"));
  return out.commit();
}

}  // namespace mi::tools
