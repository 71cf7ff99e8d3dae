#pragma once
// How experts are read from weights.bin one by one: whole pages, reads of bounded size, neighbours in one read. Shared by
// the executor and by whoever says what an order of experts is worth.

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "artifact/types.h"

namespace mi::artifact {

inline constexpr int64_t kReadPage = 4096;  // what direct reads are aligned to
// Most bytes of a read. Eight readers, parts of this size: 2.6 GB/s of a disk that gives one thread 1.6.
inline constexpr int64_t kReadPart = int64_t(512) << 10;
// Most bytes of neighbours that are read together, where the others of eight readers have nothing to do meanwhile. Four experts of
// 16 KB a matrix that stood together: 0.5 to 0.65 of the time of four reads; of 32 KB, in reads of up to 512: 0.85 to 1.1.
inline constexpr int64_t kReadTogether = int64_t(64) << 10;

// The expert at place s has the bytes [offset + s * stride, + bytes).
struct ExpertMatrix {
  int64_t offset = 0, stride = 0, bytes = 0;
};

struct PageRange {
  int64_t begin = 0, bytes = 0;
  int64_t end() const { return begin + bytes; }
};
// Of the expert at this place, with what shares its first and last page.
inline PageRange pages_of(const ExpertMatrix& m, int64_t place) {
  const int64_t at = m.offset + place * m.stride, begin = at / kReadPage * kReadPage;
  return {begin, (at + m.bytes + kReadPage - 1) / kReadPage * kReadPage - begin};
}

// The roles whose matrices an instruction reads of each expert that its route chooses; none for other ops.
std::span<const Role> expert_roles(const Instr& i);
const WeightTensor& tensor_of(const Manifest& m, const Instr& i, Role role);  // precondition: it has one
// What it reads of an expert: each role's matrix, and behind it the matrix of scales where it is int4.
std::vector<ExpertMatrix> expert_matrices(const Manifest& m, const Instr& i);
bool has_scale_matrix(const WeightTensor& w);

// The reads of some experts, by ascending place: calls f(matrix, pages, first, count), where pages are a part of the matrix of
// experts[first], or (count > 1) all of the matrix of experts[first] to experts[first + count - 1]. Neighbours of which two
// fit into kReadTogether are read together; all matrices of an expert, or of such neighbours, come before those of the next.
template <typename F>
void each_read(std::span<const ExpertMatrix> matrices, std::span<const int32_t> places, F f) {
  const bool together = std::all_of(matrices.begin(), matrices.end(), [](const ExpertMatrix& m) { return 2 * (m.bytes + kReadPage) <= kReadTogether; });
  for (size_t begin = 0, end; begin < places.size(); begin = end) {
    for (end = begin + 1; together && end < places.size() && places[end] == places[end - 1] + 1;) ++end;
    for (size_t m = 0; m < matrices.size(); ++m)
      for (size_t first = begin, count; first < end; first += count) {
        PageRange pages = pages_of(matrices[m], places[first]);
        for (count = 1; first + count < end; ++count) {
          const int64_t to = pages_of(matrices[m], places[first + count]).end();
          if (to - pages.begin > kReadTogether) break;
          pages.bytes = to - pages.begin;
        }
        for (int64_t from = 0; from < pages.bytes; from += kReadPart)
          f(m, PageRange{pages.begin + from, std::min(kReadPart, pages.bytes - from)}, first, count);
      }
  }
}

}  // namespace mi::artifact
