// libFuzzer: a GGUF file up to its graph's numbers: the header, the config and tokenizer that its keys give, the blocks
// of its tensors.
#include <cstring>

#include "base/check.h"
#include "model/arch.h"
#include "model/formats/gguf_blocks.h"
#include "model/gguf_import.h"

namespace {

constexpr int64_t kMostValues = 1 << 16;  // of a tensor; larger ones teach nothing and take time

void read_blocks(std::span<const std::byte> bytes, const mi::model::GgufHeader::Tensor& t) {
  using namespace mi::model::formats;
  MI_CHECK(t.begin <= bytes.size() && t.bytes <= bytes.size() - t.begin, "{}", t.name);
  const auto count = mi::shape_count(t.shape);
  if (!can_read_gguf(t.type) || !count || *count == 0 || *count > kMostValues) return;
  const int64_t cols = t.shape.empty() ? 1 : t.shape.back(), rows = *count / cols;
  const GgufRows m{t.type, bytes.data() + t.begin, rows, cols};
  std::vector<float> all(static_cast<size_t>(*count)), last(static_cast<size_t>(cols));
  dequantize_rows(m, 0, rows, all.data());
  dequantize_rows(m, rows - 1, 1, last.data());
  MI_CHECK(std::memcmp(last.data(), all.data() + (rows - 1) * cols, size_t(cols) * 4) == 0, "{}", t.name);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(data), size);
  const auto header = mi::model::read_gguf_bytes(bytes, "fuzz");
  if (!header.ok()) return 0;
  for (const auto& t : header->tensors) read_blocks(bytes, t);
  auto model = mi::model::read_gguf_model(*header, "fuzz");
  if (!model.ok()) return 0;
  auto config = mi::model::Config::create(model->config, "fuzz", model->recipe.keys, model->recipe.text_config);
  if (!config.ok()) return 0;
  auto arch = mi::model::resolve_arch(model->recipe, *config);
  if (arch.ok()) (void)mi::model::follow_gguf(*model, &*arch);
  return 0;
}
