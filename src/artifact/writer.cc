#include "artifact/writer.h"

#include <array>
#include <optional>

#include "artifact/json.h"
#include "artifact/layout.h"
#include "artifact/validate.h"
#include "base/util.h"

namespace mi::artifact {

struct ArtifactWriter::Impl {
  Path dir;
  int64_t segment_bytes = 0;
  FileWriter file;
  std::vector<Segment> segments;  // ended ones
  int64_t segment_begin = 0;
  std::optional<Xxh3> hash;  // of the segment being written

  Impl(Path d, int64_t s, FileWriter f) : dir(std::move(d)), segment_bytes(s), file(std::move(f)) { hash.emplace(); }
  int64_t offset() const { return int64_t(file.offset()); }

  Status write(std::span<const std::byte> bytes) {
    hash->update(bytes);
    return file.write(bytes);
  }
  Status pad(int64_t alignment) {
    static constexpr std::array<std::byte, 4096> kZeros{};
    for (int64_t left = round_up(offset(), alignment) - offset(); left > 0;) {
      const int64_t part = std::min<int64_t>(left, int64_t(kZeros.size()));
      MI_TRY_VOID(write(std::span(kZeros).first(size_t(part))));
      left -= part;
    }
    return {};
  }
  void end_segment() {
    segments.push_back({segment_begin, offset() - segment_begin, hash->digest()});
    segment_begin = offset();
    hash.emplace();
  }
};

ArtifactWriter::ArtifactWriter(std::unique_ptr<Impl> i) : impl_(std::move(i)) {}
ArtifactWriter::ArtifactWriter(ArtifactWriter&&) noexcept = default;
ArtifactWriter::~ArtifactWriter() = default;

Result<ArtifactWriter> ArtifactWriter::create(const Path& dir, int64_t segment_bytes) {
  MI_CHECK(segment_bytes > 0);
  MI_TRY(auto file, FileWriter::create(dir / "weights.bin"));
  return ArtifactWriter(std::make_unique<Impl>(dir, segment_bytes, std::move(file)));
}

Status ArtifactWriter::begin_tensor(int64_t bytes) {
  MI_TRY_VOID(impl_->pad(kAlign));
  const int64_t now = impl_->offset() - impl_->segment_begin;
  if (now > 0 && now + bytes > impl_->segment_bytes) {
    MI_TRY_VOID(impl_->pad(kSegmentAlign));
    impl_->end_segment();
  }
  return {};
}

Result<int64_t> ArtifactWriter::align() {
  MI_TRY_VOID(impl_->pad(kAlign));
  return impl_->offset();
}

Status ArtifactWriter::write(std::span<const std::byte> bytes) { return impl_->write(bytes); }
int64_t ArtifactWriter::offset() const { return impl_->offset(); }

Status ArtifactWriter::finish(Manifest& manifest, Keep keep) {
  MI_TRY_VOID(impl_->pad(kAlign));
  if (impl_->offset() > impl_->segment_begin) impl_->end_segment();
  MI_TRY_VOID(impl_->file.finish(keep));
  manifest.segments = impl_->segments;
  manifest.memory.weight_bytes = impl_->offset();
  manifest.format_version = needed_format_version(manifest);
  // What the executor would refuse must not leave the compiler: the model has a form that the engine file cannot hold.
  if (auto s = validate(manifest, impl_->offset()); !s.ok())
    return s.error().with_context("the compiled program breaks a rule of the engine format");
  return write_file(impl_->dir / "engine.json", manifest_text(manifest));
}

}  // namespace mi::artifact
