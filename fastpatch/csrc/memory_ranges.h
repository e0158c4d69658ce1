// Which memory tensors occupy, and whether updates of it depend on each other.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace fastpatch {

struct Range {
  const char* begin;
  const char* end;
};

inline Range memory_of(const at::Tensor& tensor) {
  const char* begin = static_cast<const char*>(tensor.const_data_ptr());
  return {begin, begin + tensor.nbytes()};
}

inline bool overlap(const Range& a, const Range& b) {
  return a.begin < b.end && b.begin < a.end;
}

struct Touched : Range {
  bool written;
};

// Does no range that is written overlap with another one? Then it doesn't matter in which order they are touched. Sorts
// them.
bool independent(std::vector<Touched>& ranges);

}  // namespace fastpatch
