#pragma once
// For tests of this room: a tiny model on disk, seeded sequences, a folder that goes away.

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "base/temp_dir.h"
#include "base/util.h"
#include "compiler/testing.h"
#include "ir/testing.h"
#include "quant/config.h"
#include "quant/piece_engine.h"

namespace mi::quant::testing {

using Change = std::function<void(const std::string&, std::vector<float>&)>;

// A dense layer and two of experts (compiler/testing.h), without a tokenizer: calibration is then seeded ids.
inline Path write_tiny(const Path& folder, const std::string& matrices = "bf16", const Change& change = {},
                       const std::function<std::string(std::string)>& edit = {}) {
  const Path dir = folder / "mir";
  const std::string text = compiler::testing::tiny_mir(matrices);
  const Status s = compiler::testing::write_tiny_mir(dir, edit ? edit(text) : text, change);
  EXPECT_TRUE(s.ok()) << (s.ok() ? "" : s.error().message());
  std::filesystem::remove_all(dir / "tokenizer");
  return dir;
}

inline Sequences random_ids(const std::vector<int64_t>& lengths, int64_t vocab, uint64_t seed = 5) {
  Sequences s;
  uint64_t at = 0;
  for (int64_t n : lengths) {
    s.emplace_back();
    for (int64_t i = 0; i < n; ++i) s.back().push_back(int32_t(random_u64(seed, at++) % uint64_t(vocab)));
  }
  return s;
}

inline QuantConfig recipe(const std::string& yaml) {
  auto c = parse_quant_config("quant: {" + yaml + "}", "q.yaml");
  EXPECT_TRUE(c.ok()) << (c.ok() ? "" : c.error().message());
  return c.ok() ? *c : QuantConfig{};
}

// Every file of a folder, by its name in it.
inline std::map<std::string, std::string> files_of(const Path& dir) {
  std::map<std::string, std::string> files;
  for (const auto& e : std::filesystem::recursive_directory_iterator(dir))
    if (e.is_regular_file()) files[std::filesystem::relative(e.path(), dir).string()] = read_file(e.path()).value();
  return files;
}

}  // namespace mi::quant::testing
