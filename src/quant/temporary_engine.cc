#include "quant/temporary_engine.h"

namespace mi::quant {

Result<TemporaryEngine> build_temporary_engine(const ir::MirDir& mir, const Path& beside, compiler::BuildOptions b) {
  MI_TRY(OutputDir dir, OutputDir::create(beside, true));
  TemporaryEngine t{std::move(dir)};
  b.output = t.path();
  b.scratch = true;
  MI_TRY(auto report, compiler::build_engine(mir, b));
  return t;
}

Result<TemporaryEngine> build_temporary_engine(const ir::MirDir& mir, const Path& beside, int opt_level,
                                               const std::string& precision) {
  compiler::BuildOptions b;
  b.opt_level = opt_level;
  b.precision = precision;
  return build_temporary_engine(mir, beside, std::move(b));
}

Result<TemporaryEngine> build_temporary_engine(const Path& mir, const Path& beside, int opt_level,
                                               const std::string& precision) {
  MI_TRY(const ir::MirDir opened, ir::MirDir::open(mir));
  return build_temporary_engine(opened, beside, opt_level, precision);
}

}  // namespace mi::quant
