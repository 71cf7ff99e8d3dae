#include "quant/smooth.h"

#include <algorithm>
#include <cmath>

namespace mi::quant {
namespace {

// The matrices of node n that multiply input 0, or nothing when n reads it in another way.
std::vector<int32_t> matrices_on_input(const ir::Node& n, ir::ValueId v) {
  std::vector<int32_t> out;
  if ((n.op != Op::kLinear && n.op != Op::kExpertLinear) || n.in[0] != v) return out;
  if (std::count(n.in.begin(), n.in.end(), v) != 1) return out;
  for (const ir::WeightUse& u : n.weights)
    if (u.role == Role::kWeight) out.insert(out.end(), u.weights.begin(), u.weights.end());
  return out;
}

}  // namespace

std::vector<SmoothSite> smooth_sites(const ir::Graph& g, std::vector<std::string>* skipped) {
  std::vector<SmoothSite> sites;
  for (const ir::Block& b : g.blocks) {
    for (const ir::Node& norm : b.nodes) {
      if (norm.op != Op::kRmsNorm) continue;
      const NormParams& p = std::get<NormParams>(norm.params);
      const ir::Value& v = b.values[size_t(norm.out[0])];
      if (p.groups != 1 || v.type.elem != Elem::kF32) continue;
      std::vector<int32_t> readers;
      std::string other;
      for (const ir::Node& n : b.nodes) {
        if (std::find(n.in.begin(), n.in.end(), norm.out[0]) == n.in.end()) continue;
        const std::vector<int32_t> m = matrices_on_input(n, norm.out[0]);
        if (m.empty()) other = std::string(op_name(n.op));
        readers.insert(readers.end(), m.begin(), m.end());
      }
      if (readers.empty() && other.empty()) continue;
      if (!other.empty() || std::find(b.outputs.begin(), b.outputs.end(), norm.out[0]) != b.outputs.end()) {
        // A full-width QK norm has clamp, rope or attention behind it and is no smoothing site; say so once per block.
        if (skipped)
          skipped->push_back(fmt::format("not smoothed: {} of {}, which {} reads", v.name, b.name,
                                         other.empty() ? "the next layer" : other));
        continue;
      }
      for (int32_t layer : b.layers) {
        SmoothSite s;
        s.layer = layer;
        s.value = v.name;
        s.plus_one = p.plus_one;
        s.channels = v.type.cols;
        s.norm_weight = ir::full_name(b.weights[size_t(norm.weights[0].weights[0])].name, layer);
        for (int32_t w : readers) s.readers.push_back(ir::full_name(b.weights[size_t(w)].name, layer));
        sites.push_back(std::move(s));
      }
    }
  }
  return sites;
}

std::vector<float> smooth_scales(const std::vector<float>& act_max, const std::vector<float>& weight_max,
                                 double alpha) {
  MI_CHECK_EQ(act_max.size(), weight_max.size());
  std::vector<float> s(act_max.size(), 1.0f);
  for (size_t j = 0; j < s.size(); ++j) {
    if (!(act_max[j] > 0) || !(weight_max[j] > 0)) continue;
    const double v = std::pow(double(act_max[j]), alpha) / std::pow(double(weight_max[j]), 1.0 - alpha);
    s[j] = float(std::clamp(v, 1e-5, 1e5));
  }
  return s;
}

}  // namespace mi::quant
