#include "quant/temporary_engine.h"

#include "compiler/build.h"

namespace mi::quant {

Result<TemporaryEngine> build_temporary_engine(const ir::MirDir& mir, const Path& beside, int opt_level,
                                               const std::string& precision) {
  MI_TRY(OutputDir dir, OutputDir::create(beside, true));
  TemporaryEngine t{std::move(dir)};
  compiler::BuildOptions b;
  b.output = t.path();
  b.opt_level = opt_level;
  b.precision = precision;
  b.scratch = true;
  MI_TRY(auto report, compiler::build_engine(mir, b));
  return t;
}

Result<TemporaryEngine> build_temporary_engine(const Path& mir, const Path& beside, int opt_level,
                                               const std::string& precision) {
  MI_TRY(const ir::MirDir opened, ir::MirDir::open(mir));
  return build_temporary_engine(opened, beside, opt_level, precision);
}

}  // namespace mi::quant
