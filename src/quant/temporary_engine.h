#pragma once
// An engine built for one comparison and removed with it: calibration runs the float graph, reports and verify run two
// engines.

#include "base/file.h"
#include "base/result.h"
#include "compiler/build.h"
#include "ir/mir_dir.h"

namespace mi::quant {

struct TemporaryEngine {
  OutputDir dir;  // never committed: removed with the object. A loaded engine outlives its files
  Path path() const { return dir.path() / "engine"; }
};

// `beside`: a name that is free, or left over from a run that was killed. Of b, the output and scratch are set here.
Result<TemporaryEngine> build_temporary_engine(const ir::MirDir& mir, const Path& beside, compiler::BuildOptions b);
// opt_level and precision as in compiler::BuildOptions; 0 and "fp32" give the plain float graph.
Result<TemporaryEngine> build_temporary_engine(const ir::MirDir& mir, const Path& beside, int opt_level,
                                               const std::string& precision);
Result<TemporaryEngine> build_temporary_engine(const Path& mir, const Path& beside, int opt_level,
                                               const std::string& precision);

}  // namespace mi::quant
