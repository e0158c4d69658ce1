// Stands in for csrc/cuda/launch.h: kernels run at once, on the CPU.
#pragma once

#include <type_traits>

#include "threads.h"

namespace fastpatch::cuda {

// What was launched since the test asked last.
struct Launch {
  int device;
  int64_t blocks;
  int threads;
};

inline std::vector<Launch> launched;

class OnDevice {
 public:
  explicit OnDevice(int device) : device_(device) {}

  template <class... Parameters>
  void launch(
      void (*kernel)(Parameters...), int64_t blocks, int threads, std::type_identity_t<Parameters>... arguments) const {
    if (blocks < 1 || blocks > INT32_MAX || threads < 1 || threads > 1024) {
      std::fprintf(stderr, "CUDA refuses %ld blocks of %d threads\n", static_cast<long>(blocks), threads);
      std::abort();
    }
    launched.push_back({device_, blocks, threads});
    gridDim.x = static_cast<unsigned>(blocks);
    blockDim.x = static_cast<unsigned>(threads);
    std::vector<unsigned> order(static_cast<size_t>(blocks));
    std::iota(order.begin(), order.end(), 0U);
    std::shuffle(order.begin(), order.end(), Block::running().random);
    for (const unsigned block : order) {
      blockIdx.x = block;
      Block::running().run(threads, [&] { kernel(arguments...); });
    }
  }

 private:
  int device_;
};

}  // namespace fastpatch::cuda
