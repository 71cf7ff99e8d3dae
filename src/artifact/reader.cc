#include "artifact/reader.h"

#include <algorithm>

#include "artifact/json.h"
#include "artifact/validate.h"
#include "base/util.h"

namespace mi::artifact {
namespace {

Status check_segments(const LoadedArtifact& a, const LoadProgress& progress) {
  constexpr int64_t kPart = 8 << 20;  // between progress calls; small enough to redraw, large enough to stream
  const auto bytes = a.weights.bytes();
  int64_t done = 0;
  for (size_t i = 0; i < a.manifest.segments.size(); ++i) {
    const Segment& s = a.manifest.segments[i];
    Xxh3 hash;
    for (int64_t at = 0; at < s.bytes; at += kPart) {
      const int64_t part = std::min(kPart, s.bytes - at);
      hash.update(bytes.subspan(size_t(s.offset + at), size_t(part)));
      done += part;
      if (progress) progress(done, int64_t(bytes.size()));
    }
    if (hash.digest() != s.xxh3)
      return bad_input(
          "{}: segment {} of {} (bytes {} to {}) does not match its checksum: the file was damaged or changed after "
          "the build; copy or build the engine again",
          a.weights.path().string(), i, a.manifest.segments.size(), s.offset, s.offset + s.bytes);
  }
  return {};
}

}  // namespace

Result<LoadedArtifact> open_artifact(const Path& dir, bool verify_checksums, const LoadProgress& progress) {
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
  if (auto s = validate(a.manifest, int64_t(a.weights.bytes().size())); !s.ok())
    return s.error().with_context(json_path.string());
  if (verify_checksums) MI_TRY_VOID(check_segments(a, progress));
  return a;
}

}  // namespace mi::artifact
