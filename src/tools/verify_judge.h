#pragma once
// Collects the rows of a verification and decides which are out of limits (verify.h says what is judged how).

#include <cstdint>
#include <span>
#include <string>

#include "artifact/types.h"
#include "tools/trace.h"
#include "tools/verify.h"

namespace mi::tools {

// The precision by which an engine is judged: its own, but one that counts as fp32 because most of its matrices are
// float rounds too where some are not.
std::string judged_precision(const artifact::Manifest& m);

class Judge {
 public:
  // precision and kv_type: of the engine (judged_precision) and of its options. Only fp32 with a cache of f32 keeps
  // a float graph's numbers; any other engine rounds.
  Judge(const std::string& precision, const std::string& kv_type, VerifyLimits limits);

  // Rows come in model order: the first one out of limits is named.
  void row(std::string what, double found, double limit, std::string unit, bool judged = true);
  void hidden(const std::string& what, std::span<const float> found, std::span<const float> reference);
  // Of an engine that rounds: what a layer adds to the reference's residual stream when it is fed that stream, so that
  // errors of the layers before it do not count.
  void alone(const std::string& what, std::span<const float> found, std::span<const float> reference,
             std::span<const float> before);
  // weights may be empty.
  void routing(const std::string& what, const Trace::Routing& found, std::span<const int32_t> ids,
               std::span<const float> weights);
  // judged false: the divergence is only added to the mean, which kl_over_all() judges.
  void logits(const std::string& what, std::span<const float> found, std::span<const float> reference, int64_t vocab,
              bool judged = true);
  void kl_over_all();
  // A weight: the numbers that are not the same or neighbours (1 ulp).
  void weight(const std::string& what, std::span<const float> found, std::span<const float> reference);

  bool rounds() const { return rounds_; }
  VerifyReport report;

 private:
  bool rounds_;
  VerifyLimits limits_;
  double max_alone_ = 0;
};

}  // namespace mi::tools
