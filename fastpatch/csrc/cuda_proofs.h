// Which CUDA devices a target has proved itself on. Nothing is served on a device before a few small calls of the
// target were compared with stock there, which the first call on it asks for: enable() must not start CUDA, as a
// process that forks later couldn't use it any more.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "reasons.h"

namespace fastpatch {

class CudaProofs {
 public:
  // `built`: does the library have the target's kernels for CUDA?
  explicit CudaProofs(bool built) : built_(built) {}

  // May a plain CUDA tensor of a served dtype be served on its device?
  Reason check(const at::Tensor& tensor) const;

  // The outcome: the dtypes in which the target equalled stock; none of them after a failure. Unless the device has no
  // place here, and stays unproved.
  void set(int device, const std::vector<at::ScalarType>& dtypes);
  bool is_known(int device) const;
  bool is_built() const {
    return built_;
  }

  // The device of which check() said in this thread that nothing is known of it, once; -1 if it didn't.
  static int take_unknown();

  // In the thread that makes the proof everything is served.
  static void set_proving(bool proving);

 private:
  static constexpr size_t most_devices = 64;

  bool built_;
  std::array<std::atomic<uint8_t>, most_devices> known_{};  // bits: known, and one for each dtype
};

}  // namespace fastpatch
