#include "cuda_proofs.h"

#include <utility>

namespace fastpatch {
namespace {

constexpr uint8_t known = 1;

thread_local int unknown_device = -1;
thread_local bool is_proving = false;

uint8_t bit_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return 2;
    case at::kDouble:
      return 4;
    case at::kBFloat16:
      return 8;
    case at::kHalf:
      return 16;
    default:
      return 0;
  }
}

}  // namespace

Reason CudaProofs::check(const at::Tensor& tensor) const {
  if (!built_) {
    return Reason::cuda_not_built;
  }
  if (is_proving) {
    return Reason::served;
  }
  const auto device = static_cast<size_t>(tensor.device().index());
  const uint8_t bits = device < most_devices ? known_[device].load(std::memory_order_acquire) : known;
  if (bits == 0) {
    unknown_device = static_cast<int>(device);
  }
  return (bits & bit_of(tensor.scalar_type())) != 0 ? Reason::served : Reason::cuda_unproven;
}

void CudaProofs::set(int device, const std::vector<at::ScalarType>& dtypes) {
  uint8_t bits = known;
  for (const at::ScalarType dtype : dtypes) {
    bits |= bit_of(dtype);
  }
  if (device >= 0 && static_cast<size_t>(device) < most_devices) {
    known_[static_cast<size_t>(device)].store(bits, std::memory_order_release);
  }
}

bool CudaProofs::is_known(int device) const {
  return device >= 0 && static_cast<size_t>(device) < most_devices && known_[static_cast<size_t>(device)].load() != 0;
}

int CudaProofs::take_unknown() {
  return std::exchange(unknown_device, -1);
}

void CudaProofs::set_proving(bool proving) {
  is_proving = proving;
}

}  // namespace fastpatch
