#include "tools/expert_replay.h"

#include <algorithm>
#include <chrono>

#include "artifact/expert_reads.h"
#include "base/util.h"
#include "exec/expert_stream.h"

namespace mi::tools {
namespace {

using artifact::ExpertProfile;
using exec::ExpertStream;

constexpr double kSeconds = 3;       // of both orders together
constexpr int64_t kTokens = 32;      // of one order, then the other
constexpr double kShare = 0.25;      // of the experts in memory
constexpr int64_t kMostMemory = int64_t(256) << 20;  // of one order

// The instructions whose experts are in another order, and the layer of the profile that chooses them.
struct Replay {
  std::vector<ExpertStream::Group> groups;
  std::vector<const ExpertProfile::Layer*> chosen;
  int64_t bytes = 0;

  Replay(const artifact::Manifest& m, const ExpertProfile& p) {
    for (const artifact::Instr& i : m.program) {
      if (artifact::expert_roles(i).empty()) continue;
      const artifact::WeightTensor& w = artifact::tensor_of(m, i, artifact::expert_roles(i)[0]);
      const auto l = std::find_if(p.layers.begin(), p.layers.end(), [&](const auto& x) { return x.layer == i.layer; });
      if (w.expert_slots.empty() || l == p.layers.end()) continue;
      groups.push_back({w.experts, l->k, artifact::expert_matrices(m, i), w.expert_slots});
      chosen.push_back(&*l);
      for (const artifact::ExpertMatrix& x : groups.back().matrices) bytes += x.bytes * w.experts;
    }
  }
  double run(ExpertStream& s, int64_t from, int64_t to) const {
    const auto start = std::chrono::steady_clock::now();
    for (int64_t t = from; t < to; ++t)
      for (size_t g = 0; g < groups.size(); ++g) s.each_part(g, chosen[g]->of(t), [](std::span<const int32_t>) {});
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
};

// All parts, were each as long as their median: what else the machine does lengthens some of them by much.
double from_median(std::vector<double> parts) {
  std::sort(parts.begin(), parts.end());
  return parts[parts.size() / 2] * double(parts.size());
}

}  // namespace

Result<compiler::OrderReplay> replay_order(const Path& weights, const artifact::Manifest& m, const ExpertProfile& p) {
  const Replay learnt(m, p);
  Replay as_is = learnt;
  for (ExpertStream::Group& g : as_is.groups) g.places.clear();
  const int64_t memory = std::min(kMostMemory, int64_t(kShare * double(learnt.bytes)));
  std::unique_ptr<ExpertStream> streams[2];
  for (const bool second : {false, true}) {
    auto s = ExpertStream::open(weights, second ? learnt.groups : as_is.groups, memory);
    if (!s.ok()) return compiler::OrderReplay{0, 0, 0, 0, 0, "not measured: " + s.error().message()};
    streams[second] = std::move(s).value();
  }
  compiler::OrderReplay r;
  std::vector<double> seconds[2];
  double all = 0;
  for (int64_t t = p.half(); t < p.tokens && all < kSeconds; t += kTokens) {
    const int64_t end = std::min(p.tokens, t + kTokens);
    for (const bool second : {t / kTokens % 2 == 0, t / kTokens % 2 != 0}) {
      seconds[second].push_back((second ? learnt : as_is).run(*streams[second], t, end));
      all += seconds[second].back();
    }
    r.tokens += end - t;
  }
  r.as_is = from_median(seconds[0]);
  r.learnt = from_median(seconds[1]);
  r.as_is_reads = streams[0]->stats().reads;
  r.learnt_reads = streams[1]->stats().reads;
  r.how = fmt::format("{}, memory for {} of {} experts, {:.0f} % of those wanted were there", streams[0]->direct() ? "past the page cache" : "through the page cache, for there are no direct reads here",
                      streams[0]->stats().held, streams[0]->stats().experts, 100 * streams[0]->stats().hit_rate());
  return r;
}

}  // namespace mi::tools
