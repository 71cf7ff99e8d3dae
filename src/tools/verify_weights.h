#pragma once
// The matrices of an engine against the MIR that it was made of, one by one: what an engine stands for, q times scale, is
// the model's matrix, rounded. A wrong scale shows here even where outputs hide it: the norm behind q and k takes a factor
// out again, and a small part of a layer drowns in what rounding does to the rest.
//
// Smoothing is taken out first. What a norm was divided by, its readers were multiplied by: engine and model both have the
// norm. Between an activation's up and down no number tells the factors, so there up's rows are measured and down has to
// have the inverse; a factor that is wrong then is that of down, or of up.

#include "artifact/reader.h"
#include "hw/thread_pool.h"
#include "ir/mir_dir.h"
#include "tools/verify_judge.h"

namespace mi::tools {

// A row for each matrix: rms(difference) / rms(the model's), of experts the worst one's, which is named when it is out of
// limits. A matrix can be good as a whole and one output of it wrong: every row's length along the model's has to be right
// within what rounding explains (the row's own step), else the worst row is named, "attn.o.weight row 17". Of an up and a
// down that smoothing tied together, a row of up is seen as a column of down.
// Rows of float matrices and each number of norms and biases have to be the model's own, within float's precision; a norm
// that smoothing divided is judged by its readers.
// An embedding table that is also the head is two tensors of an engine: both are judged, as embed.weight and
// lm_head.weight.
Status judge_weights(const artifact::LoadedArtifact& a, const ir::MirDir& mir, Judge* judge, hw::ThreadPool& pool);

}  // namespace mi::tools
