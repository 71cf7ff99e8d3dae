#include "artifact/reader.h"

#include <algorithm>
#include <atomic>

#include "artifact/json.h"
#include "artifact/validate.h"
#include "base/util.h"

namespace mi::artifact {
namespace {

constexpr int64_t kPart = 4 << 20;  // of a segment: between progress calls, and what the hash finds still in a cache

Error wrong_checksum(const LoadedArtifact& a, size_t segment) {
  const Segment& s = a.manifest.segments[segment];
  return bad_input(
      "{}: segment {} of {} (bytes {} to {}) does not match its checksum: the file was damaged or changed after "
      "the build; copy or build the engine again",
      (a.dir / "weights.bin").string(), segment, a.manifest.segments.size(), s.offset, s.offset + s.bytes);
}

// part(begin, bytes) brings a part of weights.bin into memory; every segment's parts come in order, from one thread.
template <class Part>
Status each_segment(const LoadedArtifact& a, bool verify_checksums, const ParallelFor& parallel, const LoadProgress& progress, const Part& part) {
  const std::vector<Segment>& segments = a.manifest.segments;
  const int64_t total = int64_t(a.bytes.size());
  std::vector<Status> results(segments.size());
  std::atomic<int64_t> done = 0;
  int64_t told = 0;   // by worker 0
  const auto tell = [&](int64_t sum) {
    if (progress && sum > told) progress(told = sum, total);
  };
  parallel(int64_t(segments.size()), [&](int64_t task, int worker) {
    const Segment& s = segments[size_t(task)];
    Xxh3 hash;
    for (int64_t at = 0; at < s.bytes; at += kPart) {
      const int64_t n = std::min(kPart, s.bytes - at);
      const Result<std::span<const std::byte>> bytes = part(s.offset + at, n);
      if (!bytes.ok()) {
        results[size_t(task)] = bytes.error();
        return;
      }
      if (verify_checksums) hash.update(*bytes);
      const int64_t sum = done.fetch_add(n) + n;
      if (worker == 0) tell(sum);
    }
    if (verify_checksums && hash.digest() != s.xxh3) results[size_t(task)] = wrong_checksum(a, size_t(task));
  });
  for (const Status& s : results)
    if (!s.ok()) return s;
  tell(done);
  return {};
}

}  // namespace

Result<LoadedArtifact> open_artifact(const Path& dir) {
  const Path json_path = dir / "engine.json", bin_path = dir / "weights.bin";
  std::error_code ec;
  if (!std::filesystem::is_directory(dir, ec))
    return bad_input("{}: not an engine directory; 'metainfer build' makes one", dir.string());
  if (!std::filesystem::exists(json_path, ec)) {
    if (std::filesystem::exists(dir / "model.mir", ec))
      return bad_input("{}: this is a MIR directory, not an engine; run 'metainfer build --model {}' first",
                       dir.string(), dir.string());
    return bad_input("{}: no engine.json in this directory; 'metainfer build' makes an engine", dir.string());
  }
  LoadedArtifact a;
  a.dir = dir;
  MI_TRY(auto text, read_file(json_path, kMaxManifestBytes));
  MI_TRY(a.manifest, parse_manifest(text, json_path.string()));
  MI_TRY(a.weights, MappedFile::open(bin_path));
  a.bytes = a.weights.bytes();
  if (auto s = validate(a.manifest, int64_t(a.bytes.size())); !s.ok())
    return s.error().with_context(json_path.string());
  return a;
}

Status verify_weights(const LoadedArtifact& a, const ParallelFor& parallel, const LoadProgress& progress) {
  return each_segment(a, true, parallel, progress, [&](int64_t begin, int64_t n) -> Result<std::span<const std::byte>> {
    a.weights.populate(size_t(begin), size_t(n));
    return a.bytes.subspan(size_t(begin), size_t(n));
  });
}

Status read_weights(LoadedArtifact* a, std::span<std::byte> to, bool verify_checksums, const ParallelFor& parallel,
                    const LoadProgress& progress) {
  MI_CHECK_EQ(to.size(), a->bytes.size());
  MI_TRY(const FileReader file, FileReader::open(a->dir / "weights.bin"));
  MI_TRY_VOID(each_segment(*a, verify_checksums, parallel, progress,
                           [&](int64_t begin, int64_t n) -> Result<std::span<const std::byte>> {
                             const std::span<std::byte> part = to.subspan(size_t(begin), size_t(n));
                             MI_TRY_VOID(file.read_at(size_t(begin), part));
                             return std::span<const std::byte>(part);
                           }));
  a->weights = MappedFile();
  a->bytes = to;
  return {};
}

}  // namespace mi::artifact
