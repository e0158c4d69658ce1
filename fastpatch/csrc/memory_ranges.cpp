#include "memory_ranges.h"

#include <algorithm>

namespace fastpatch {

bool independent(std::vector<Touched>& ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const Touched& a, const Touched& b) { return a.begin < b.begin; });
  const char* last_end = nullptr;  // of all ranges so far
  const char* last_written_end = nullptr;
  for (const Touched& range : ranges) {
    if (range.begin == range.end) {
      continue;
    }
    if (range.begin < last_written_end || (range.written && range.begin < last_end)) {
      return false;
    }
    last_end = std::max(last_end, range.end);
    if (range.written) {
      last_written_end = std::max(last_written_end, range.end);
    }
  }
  return true;
}

}  // namespace fastpatch
