#include "quant/temporary_engine.h"

#include "compiler/build.h"

namespace mi::quant {

Result<TemporaryEngine> build_temporary_engine(const Path& mir, const Path& beside, int opt_level,
                                               const std::string& precision) {
  MI_TRY(OutputDir dir, OutputDir::create(beside, true));
  TemporaryEngine t{std::move(dir)};
  compiler::BuildOptions b;
  b.model = mir;
  b.output = t.path();
  b.opt_level = opt_level;
  b.precision = precision;
  MI_TRY(auto report, compiler::build_engine(b));
  return t;
}

}  // namespace mi::quant
