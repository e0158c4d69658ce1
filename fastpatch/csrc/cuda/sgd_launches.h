// Which slices go into which launch of the SGD kernel: plain C++.
#pragma once

#include <algorithm>
#include <vector>

#include "../formulas/sgd_request.h"
#include "vectors.h"

namespace fastpatch::cuda {

// A launch's arguments are at most 4 KiB, whatever the driver. 104 slices of 36 bytes leave room for the scalars.
constexpr int most_slices = 104;
constexpr int64_t elements_of_block = 16384;

// The slices of one launch: a table of blocks' first numbers, in which a block looks up what it updates.
struct SgdTable {
  void* param[most_slices];
  void* grad[most_slices];
  void* buffer[most_slices];
  int64_t n[most_slices];
  int32_t first_block[most_slices + 1];  // beyond the last slice: all blocks
  bool first_step[most_slices];
  bool aligned[most_slices];
  int32_t slices;

  int64_t blocks() const {
    return first_block[slices];
  }
};

inline int64_t blocks_of_slice(int64_t n) {
  return (n + elements_of_block - 1) / elements_of_block;
}

inline bool is_aligned(const SgdSlice& slice) {
  return is_aligned(slice.param, vector_bytes) && is_aligned(slice.grad, vector_bytes) &&
         (slice.buffer == nullptr || is_aligned(slice.buffer, vector_bytes));
}

// Takes slices of one device and dtype until a launch is full.
class SgdLaunch {
 public:
  SgdLaunch(int device, c10::ScalarType dtype) : device_(device), dtype_(dtype) {
    clear();
  }

  bool takes(const SgdSlice& slice) const {
    return slice.device == device_ && slice.dtype == dtype_;
  }
  bool has_room_for(const SgdSlice& slice) const {
    return table_.slices < most_slices && table_.blocks() + blocks_of_slice(slice.n) <= INT32_MAX;
  }
  void add(const SgdSlice& slice) {
    const int i = table_.slices++;
    table_.param[i] = slice.param;
    table_.grad[i] = slice.grad;
    table_.buffer[i] = slice.buffer;
    table_.n[i] = slice.n;
    table_.first_step[i] = slice.first;
    table_.aligned[i] = is_aligned(slice);
    table_.first_block[i + 1] = table_.first_block[i] + static_cast<int32_t>(blocks_of_slice(slice.n));
  }
  void clear() {
    table_.slices = 0;
    table_.first_block[0] = 0;
  }
  int device() const {
    return device_;
  }
  c10::ScalarType dtype() const {
    return dtype_;
  }
  const SgdTable& table() const {
    return table_;
  }

 private:
  int device_;
  c10::ScalarType dtype_;
  SgdTable table_;
};

// Calls start(launch) for one launch after the other, until each slice was in one. Independent slices share launches;
// others are updated in their order, each by a launch of its own.
template <class Start>
void for_each_launch(const SgdSlice* slices, int64_t n, bool independent, const Start& start) {
  std::vector<SgdLaunch> open;
  for (int64_t i = 0; i < n; ++i) {
    const SgdSlice& slice = slices[i];
    if (slice.n == 0) {
      continue;
    }
    auto found = std::find_if(open.begin(), open.end(), [&](const SgdLaunch& launch) { return launch.takes(slice); });
    if (found == open.end()) {
      found = open.emplace(open.end(), slice.device, slice.dtype);
    }
    if (!found->has_room_for(slice)) {
      start(*found);
      found->clear();
    }
    found->add(slice);
    if (!independent) {
      start(*found);
      found->clear();
    }
  }
  for (const SgdLaunch& launch : open) {
    if (launch.table().slices > 0) {
      start(launch);
    }
  }
}

}  // namespace fastpatch::cuda
