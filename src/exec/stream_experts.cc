// Which weights stay in memory and which are streamed, when the experts' matrices stay on disk.

#include <algorithm>
#include <atomic>

#include "artifact/expert_reads.h"
#include "base/util.h"
#include "exec/context.h"
#include "exec/memory_plan.h"

namespace mi::exec {
namespace {

using artifact::Instr;
using artifact::Manifest;
using artifact::Packing;
using artifact::WeightTensor;
using artifact::has_scale_matrix;
using artifact::tensor_of;

// int8's scales and column sums stay in memory: they are a hundredth.
ExpertStream::Group group_of(const Manifest& m, const Instr& i) {
  const WeightTensor& w = tensor_of(m, i, artifact::expert_roles(i)[0]);  // validated: all have its order
  return {w.experts, i.in[1].type.cols, artifact::expert_matrices(m, i), w.expert_slots};
}

enum class Place : uint8_t { kMemory, kStreamed, kMapped };
std::vector<Place> places(const Manifest& m) {
  std::vector<Place> all(m.weights.size(), Place::kMemory);
  for (const Instr& i : m.program) {
    for (const Role role : artifact::expert_roles(i)) all[size_t(&tensor_of(m, i, role) - m.weights.data())] = Place::kStreamed;
    // A step reads a row for each of its tokens and no more.
    if (i.op == Op::kEmbed) all[size_t(&tensor_of(m, i, Role::kWeight) - m.weights.data())] = Place::kMapped;
  }
  return all;
}

// A part of weights.bin that is read into memory.
struct Part {
  int64_t from = 0, bytes = 0, to = 0;
};

// Calls f(tensor, from, bytes) for elements, scales and column sums that stay in memory.
template <typename F>
void each_kept(const Manifest& m, F f) {
  const std::vector<Place> where = places(m);
  for (size_t t = 0; t < m.weights.size(); ++t) {
    const WeightTensor& w = m.weights[t];
    if (where[t] == Place::kMapped) continue;
    if (where[t] == Place::kMemory) f(t, w.offset, w.bytes);
    if (w.scale_offset > 0 && !(where[t] == Place::kStreamed && has_scale_matrix(w))) f(t, w.scale_offset, artifact::scale_bytes(w));
    if (w.packing == Packing::kPackedI8) f(t, w.colsum_offset, w.experts * w.n_pad * int64_t(sizeof(int32_t)));
  }
}

int64_t kept_bytes(const Manifest& m) {
  int64_t sum = 0;
  each_kept(m, [&](size_t, int64_t, int64_t bytes) { sum += artifact::round_up(bytes, artifact::kAlign); });
  return sum;
}

Status read_parts(const Context& c, const std::vector<Part>& parts) {
  MI_TRY(const FileReader file, FileReader::open(c.artifact.dir / "weights.bin"));
  std::vector<Status> results(parts.size());
  c.pool->run(int64_t(parts.size()), [&](int64_t i, int) {
    const Part& p = parts[size_t(i)];
    results[size_t(i)] = file.read_at(size_t(p.from), {c.memory.data() + p.to, size_t(p.bytes)});
  });
  for (const Status& s : results)
    if (!s.ok()) return s;
  return {};
}

}  // namespace

WeightDivision divide_weights(const Manifest& m) {
  WeightDivision d{kept_bytes(m), 0};
  for (const Instr& i : m.program)
    for (const Role role : artifact::expert_roles(i)) {
      const WeightTensor& w = tensor_of(m, i, role);
      d.experts += w.bytes + (has_scale_matrix(w) ? artifact::scale_bytes(w) : 0);
    }
  return d;
}

Status stream_weights(Context& c) {
  const Manifest& m = c.manifest();
  if (c.options.weights != "auto")
    return fail(ErrorCode::kUsage, "weights are read or mapped, or experts are streamed into a cache: leave out one of the two");
  c.stream_group.assign(m.program.size(), -1);
  std::vector<ExpertStream::Group> groups;
  for (size_t n = 0; n < m.program.size(); ++n) {
    if (artifact::expert_roles(m.program[n]).empty()) continue;
    c.stream_group[n] = int32_t(groups.size());
    groups.push_back(group_of(m, m.program[n]));
  }
  if (groups.empty()) return fail(ErrorCode::kUsage, "{}: this model has no experts to stream: leave the expert cache out", c.artifact.dir.string());
  if (c.options.verify_checksums) {
    const artifact::ParallelFor parallel = [&](int64_t tasks, const auto& f) { c.pool->run(tasks, f); };
    MI_TRY_VOID(artifact::verify_weights(c.artifact, parallel, c.options.progress));
  }
  c.artifact.weights.drop(0, c.artifact.bytes.size());

  MI_TRY(c.memory, Region::map(kept_bytes(m), "the weights but experts"));
  c.memory.place_on(c.options.weight_nodes);
  std::vector<Part> parts;
  int64_t at = 0;
  const std::vector<Place> where = places(m);
  for (size_t t = 0; t < m.weights.size(); ++t) {
    const WeightTensor& w = m.weights[t];
    c.weights.push_back({&w, where[t] == Place::kMapped ? artifact::view_weight(c.artifact, w) : nullptr, nullptr, nullptr, nullptr, {}});
    if (where[t] == Place::kStreamed) c.weights.back().experts.resize(size_t(w.experts));
  }
  each_kept(m, [&](size_t t, int64_t from, int64_t bytes) {
    const WeightTensor& w = m.weights[t];
    const std::byte* here = c.memory.data() + at;
    if (from == w.offset)
      c.weights[t].data = here;
    else if (w.packing == Packing::kPackedI8 && from == w.colsum_offset)
      c.weights[t].colsums = reinterpret_cast<const int32_t*>(here);
    else if (w.packing == Packing::kPackedI4 && w.scale_dtype == DType::kBF16)
      c.weights[t].scales_bf16 = reinterpret_cast<const uint16_t*>(here);
    else
      c.weights[t].scales = reinterpret_cast<const float*>(here);
    parts.push_back({from, bytes, at});
    at += artifact::round_up(bytes, artifact::kAlign);
  });
  MI_TRY_VOID(read_parts(c, parts));

  MI_TRY(c.stream, ExpertStream::open(c.artifact.dir / "weights.bin", std::move(groups), c.options.expert_cache_bytes));
  c.stream->commit(*c.pool);
  for (size_t n = 0; n < m.program.size(); ++n)
    if (const auto chances = c.options.expert_chances.find(m.program[n].layer); c.stream_group[n] >= 0 && chances != c.options.expert_chances.end())
      c.stream->set_prior(size_t(c.stream_group[n]), chances->second);
  if (!c.options.expert_chances.empty()) c.stream->fill();
  c.foresight = find_foresight(c);
  const StreamStats s = c.stream->stats();
  c.weights_place = fmt::format("{} read into memory; experts read from disk{} as steps choose them, {} in memory for {} of {}",
                                human_bytes(double(c.memory.bytes())), c.stream->direct() ? "" : " through the page cache (no direct reads there)",
                                human_bytes(double(c.stream->memory().bytes())), s.held, s.experts);
  return {};
}

void place_streamed(Context& c, const Instr& i, std::span<const int32_t> experts) {
  const size_t group = size_t(c.stream_group[c.index(i)]);
  size_t matrix = 0;
  for (const Role role : artifact::expert_roles(i)) {
    Weight& w = *c.find(i, role);
    const bool scales = has_scale_matrix(*w.info);
    for (const int32_t e : experts)
      w.experts[size_t(e)] = expert_place(*w.info, c.stream->at(group, e, matrix), scales ? c.stream->at(group, e, matrix + 1) : nullptr);
    matrix += scales ? 2 : 1;
  }
}

}  // namespace mi::exec
