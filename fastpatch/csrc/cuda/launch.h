// Starting kernels: on a tensor's device, on the stream that is current there.
#pragma once

#include <cstdint>
#include <type_traits>

// The part of a kernel's code that tests compile for the CPU is all but this.
#ifdef FASTPATCH_EMULATED_LAUNCH
#include FASTPATCH_EMULATED_LAUNCH
#else

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace fastpatch::cuda {

class OnDevice {
 public:
  explicit OnDevice(int device)
      : guard_(static_cast<c10::DeviceIndex>(device)),
        stream_(c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device))) {}

  // Errors of the launch are raised here, those of the kernel by whoever synchronises next.
  template <class... Parameters>
  void launch(
      void (*kernel)(Parameters...), int64_t blocks, int threads, std::type_identity_t<Parameters>... arguments) const {
    void* places[] = {&arguments...};
    const dim3 grid(static_cast<unsigned>(blocks));
    const dim3 block(static_cast<unsigned>(threads));
    C10_CUDA_CHECK(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, places, 0, stream_));
  }

 private:
  c10::cuda::CUDAGuard guard_;
  cudaStream_t stream_;
};

}  // namespace fastpatch::cuda

#endif
