#include "model/view.h"

#include <algorithm>
#include <cstring>

namespace mi::model {
namespace {

template <typename T>
void gather_as(const StridedView& v, int64_t begin, int64_t n, T* out) {
  const auto src = [&](int64_t element) {
    return v.data + element * int64_t(sizeof(T));
  };  // a file's data need not be aligned
  const size_t rank = v.dim.size();
  const int64_t cols = v.dim[rank - 1], step = v.stride[rank - 1];
  int64_t row = begin / cols, col = begin % cols;
  while (n > 0) {
    int64_t at = 0, rest = row;
    for (size_t d = rank - 1; d-- > 0;) {
      at += rest % v.dim[d] * v.stride[d];
      rest /= v.dim[d];
    }
    const int64_t take = std::min(n, cols - col);
    if (step == 1) {
      std::memcpy(out, src(at + col), size_t(take) * sizeof(T));
    } else {
      for (int64_t i = 0; i < take; ++i) std::memcpy(out + i, src(at + (col + i) * step), sizeof(T));
    }
    out += take;
    n -= take;
    col = 0;
    ++row;
  }
}

// Whole rows of a transposed matrix: neighbouring rows lie beside each other in the source, so it is walked column by
// column.
template <typename T>
void gather_transposed(const StridedView& v, int64_t first_row, int64_t rows, T* out) {
  const size_t rank = v.dim.size();
  const int64_t cols = v.dim[rank - 1], per_matrix = v.dim[rank - 2];
  while (rows > 0) {
    int64_t at = 0, rest = first_row / per_matrix;
    for (size_t d = rank - 2; d-- > 0;) {
      at += rest % v.dim[d] * v.stride[d];
      rest /= v.dim[d];
    }
    const int64_t r0 = first_row % per_matrix, take = std::min({rows, per_matrix - r0, int64_t(32)});
    const std::byte* base = v.data + (at + r0 * v.stride[rank - 2]) * int64_t(sizeof(T));
    const int64_t col_bytes = v.stride[rank - 1] * int64_t(sizeof(T)),
                  row_bytes = v.stride[rank - 2] * int64_t(sizeof(T));
    for (int64_t k = 0; k < cols; ++k)
      for (int64_t r = 0; r < take; ++r)
        std::memcpy(out + r * cols + k, base + k * col_bytes + r * row_bytes, sizeof(T));
    out += take * cols;
    first_row += take;
    rows -= take;
  }
}

template <typename T>
void gather_any(const StridedView& v, int64_t begin, int64_t n, T* out) {
  const size_t rank = v.dim.size();
  if (rank >= 2 && v.stride[rank - 1] != 1 && begin % v.dim[rank - 1] == 0 && n % v.dim[rank - 1] == 0)
    gather_transposed(v, begin / v.dim[rank - 1], n / v.dim[rank - 1], out);
  else
    gather_as(v, begin, n, out);
}

Result<int64_t> integer(const Json& j, Config* c, const std::string& what) {
  if (j.is_number_integer()) return j.get<int64_t>();
  if (c && j.is_string()) return c->eval(j.get<std::string>());
  return bad_input("{}: ops: expected an integer or an expression", what);
}

Result<ViewOp> parse_op(const Json& j, Config* c, const std::string& what) {
  using Kind = ViewOp::Kind;
  if (j == "transpose") return ViewOp{Kind::kTranspose, {}};
  if (j == "squeeze") return ViewOp{Kind::kSqueeze, {}};
  if (j.is_object() && j.size() == 1) {
    const std::string name = j.begin().key();
    const Json list = j.begin()->is_array() ? *j.begin() : Json::array({*j.begin()});
    std::vector<int64_t> args;
    for (const Json& e : list) {
      MI_TRY(const int64_t v, integer(e, c, what));
      args.push_back(v);
    }
    if (name == "orient" && args.size() == 2) return ViewOp{Kind::kOrient, args};
    if (name == "half" && args.size() == 1 && (args[0] == 0 || args[0] == 1)) return ViewOp{Kind::kHalf, args};
    if (name == "every" && args.size() == 2 && args[0] > 0 && args[1] >= 0 && args[1] < args[0])
      return ViewOp{Kind::kEvery, args};
    if (name == "rows" && args.size() == 2 && args[0] >= 0 && args[1] > 0) return ViewOp{Kind::kRows, args};
    if (name == "reshape" && !args.empty() && args.size() <= 4) return ViewOp{Kind::kReshape, args};
  }
  return bad_input(
      "{}: ops: {} is none of transpose, squeeze, orient, half, every, rows, reshape, or its numbers are wrong", what,
      dump_json(j));
}

constexpr const char* kNames[] = {"transpose", "orient", "half", "every", "rows", "reshape", "squeeze"};

}  // namespace

int64_t StridedView::count() const {
  int64_t n = 1;
  for (int64_t d : dim) n *= d;
  return n;
}

bool StridedView::contiguous() const {
  int64_t expected = 1;
  for (size_t d = dim.size(); d-- > 0;) {
    if (dim[d] != 1 && stride[d] != expected) return false;
    expected *= dim[d];
  }
  return true;
}

StridedView view_of(const TensorView& t) {
  StridedView v{t.data, t.dtype, t.shape, std::vector<int64_t>(t.shape.size(), 1)};
  for (size_t d = v.dim.size(); d-- > 1;) v.stride[d - 1] = v.stride[d] * v.dim[d];
  return v;
}

Result<std::vector<ViewOp>> parse_view_ops(const Json& ops, Config* c, const std::string& what) {
  std::vector<ViewOp> out;
  for (const Json& j : ops) {
    MI_TRY(ViewOp op, parse_op(j, c, what));
    out.push_back(std::move(op));
  }
  return out;
}

std::string ops_text(const std::vector<ViewOp>& ops) {
  std::string s;
  for (const ViewOp& op : ops) {
    s += (s.empty() ? "" : ", ") + std::string(kNames[size_t(op.kind)]);
    for (int64_t a : op.args) s += fmt::format(" {}", a);
  }
  return s;
}

Json ops_json(const std::vector<ViewOp>& ops) {
  Json out = Json::array();
  for (const ViewOp& op : ops) {
    const std::string name = kNames[size_t(op.kind)];
    if (op.args.empty()) out.push_back(name);
    else out.push_back({{name, op.args}});
  }
  return out;
}

Result<StridedView> apply(const std::vector<ViewOp>& ops, StridedView v, bool is_vector) {
  const auto skip = [&v](int64_t elements) {
    if (v.data) v.data += elements * int64_t(dtype_bytes(v.dtype));
  };
  for (const ViewOp& op : ops) {
    const size_t rank = v.dim.size(), least = is_vector ? 1 : 2;
    const std::string shape = shape_text(v.dim);
    if (rank < least && op.kind != ViewOp::Kind::kReshape) return bad_input("has shape {}, too few dimensions", shape);
    const size_t row = rank - least;
    switch (op.kind) {
      case ViewOp::Kind::kOrient: {
        const int64_t n = op.args[0], k = op.args[1];
        if (rank < 2) return bad_input("has shape {}, expected a matrix", shape);
        if (n == k)
          return bad_input(
              "has shape {}: with {} rows and {} columns wanted the shape cannot tell whether it is stored [out, in] "
              "or [in, out]; say so in a recipe "
              "(--family-file; transpose, or no orient)",
              shape, n, k);
        if (v.dim[rank - 2] == n && v.dim[rank - 1] == k) break;
        if (v.dim[rank - 2] != k || v.dim[rank - 1] != n)
          return bad_input("has shape {}, expected [.., {}, {}] or [.., {}, {}]", shape, n, k, k, n);
        std::swap(v.dim[rank - 1], v.dim[rank - 2]);
        std::swap(v.stride[rank - 1], v.stride[rank - 2]);
        break;
      }
      case ViewOp::Kind::kTranspose:
        if (rank < 2) return bad_input("has shape {}, expected a matrix", shape);
        std::swap(v.dim[rank - 1], v.dim[rank - 2]);
        std::swap(v.stride[rank - 1], v.stride[rank - 2]);
        break;
      case ViewOp::Kind::kHalf:
        if (v.dim[row] % 2 != 0)
          return bad_input("has shape {}, whose {} rows do not divide into halves", shape, v.dim[row]);
        v.dim[row] /= 2;
        skip(op.args[0] * v.dim[row] * v.stride[row]);
        break;
      case ViewOp::Kind::kEvery:
        if (v.dim[row] % op.args[0] != 0)
          return bad_input("has shape {}, whose {} rows are no multiple of {}", shape, v.dim[row], op.args[0]);
        v.dim[row] /= op.args[0];
        skip(op.args[1] * v.stride[row]);
        v.stride[row] *= op.args[0];
        break;
      case ViewOp::Kind::kRows:
        if (op.args[0] > v.dim[row] || op.args[1] > v.dim[row] - op.args[0])
          return bad_input("has shape {}, which holds no rows {} to {}", shape, op.args[0],
                           op.args[0] + op.args[1] - 1);
        v.dim[row] = op.args[1];
        skip(op.args[0] * v.stride[row]);
        break;
      case ViewOp::Kind::kReshape: {
        const auto n = shape_count(op.args);
        if (!v.contiguous() || !n || *n != v.count())
          return bad_input("has shape {}, which cannot become {}", shape, shape_text(op.args));
        v.dim = op.args;
        v.stride.assign(v.dim.size(), 1);
        for (size_t d = v.dim.size(); d-- > 1;) v.stride[d - 1] = v.stride[d] * v.dim[d];
        break;
      }
      case ViewOp::Kind::kSqueeze:
        for (size_t d = rank; d-- > 0;)
          if (v.dim[d] == 1 && v.dim.size() > 1) {
            v.dim.erase(v.dim.begin() + int64_t(d));
            v.stride.erase(v.stride.begin() + int64_t(d));
          }
        break;
    }
  }
  return v;
}

void gather(const StridedView& v, int64_t begin, int64_t n, std::byte* out) {
  if (n == 0) return;
  switch (dtype_bytes(v.dtype)) {
    case 1:
      return gather_any(v, begin, n, reinterpret_cast<uint8_t*>(out));
    case 2:
      return gather_any(v, begin, n, reinterpret_cast<uint16_t*>(out));
    case 4:
      return gather_any(v, begin, n, reinterpret_cast<uint32_t*>(out));
    default:
      return gather_any(v, begin, n, reinterpret_cast<uint64_t*>(out));
  }
}

}  // namespace mi::model
