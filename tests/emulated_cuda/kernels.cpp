// The CUDA kernels and all that launches them, compiled for the CPU, behind functions that ctypes can call.
#include "threads.h"

#include "cuda/losses.cu"
#include "cuda/sgd.cu"

using namespace fastpatch;

namespace {

cuda::LossKernels kernels_of(int loss) {
  cuda::LossKernels (*const all[])() = {cuda::smooth_l1_loss_kernels, cuda::huber_loss_kernels, cuda::l1_loss_kernels};
  return all[loss]();
}

// One parameter, as ctypes hands it over.
struct Slice {
  char* param;
  char* grad;
  char* buffer;
  int64_t n;
  int32_t dtype;
  int32_t device;
  int32_t first;
};

std::vector<SgdSlice> slices_of(const Slice* slices, int64_t count) {
  std::vector<SgdSlice> all;
  for (int64_t i = 0; i < count; ++i) {
    const Slice& slice = slices[i];
    all.push_back(
        {slice.param,
         slice.grad,
         slice.buffer,
         slice.n,
         static_cast<c10::ScalarType>(slice.dtype),
         slice.device,
         slice.first != 0,
         false});
  }
  return all;
}

}  // namespace

extern "C" {

void loss_values(const cuda::LossRows* rows, int loss, void* output) {
  kernels_of(loss).values(*rows, output);
}

int64_t loss_blocks(int64_t n) {
  return cuda::blocks_of_sum(n);
}

void loss_reduced(const cuda::LossRows* rows, int loss, int mean, void* partials, void* output) {
  kernels_of(loss).reduced(*rows, mean != 0, partials, output);
}

void loss_gradient(const cuda::LossRows* rows, int loss, const void* grad, int one, int mean, void* grad_input) {
  kernels_of(loss).gradient(*rows, grad, one != 0, mean != 0, grad_input);
}

// hyper: weight_decay, momentum, dampening, lr
void sgd(
    const double* hyper, int nesterov, int maximize, int foreach, const Slice* slices, int64_t n, int independent) {
  const double numbers[] = {hyper[0], hyper[1], 1.0 - hyper[2], -hyper[3]};
  SgdHyper all{};
  all.doubles = {numbers[0], numbers[1], numbers[2], numbers[3]};
  all.floats = {
      static_cast<float>(numbers[0]),
      static_cast<float>(numbers[1]),
      static_cast<float>(numbers[2]),
      static_cast<float>(numbers[3])};
  all.decay = numbers[0] != 0;
  all.has_momentum = numbers[1] != 0;
  all.nesterov = nesterov != 0;
  all.maximize = maximize != 0;
  all.foreach = foreach != 0;
  const auto converted = slices_of(slices, n);
  cuda::sgd(all, converted.data(), n, independent != 0);
}

// For each slice of each launch six numbers: the launch, its device and dtype, the address of the parameter, its size,
// and its first block; then one of zeros but for the launch and, last, all its blocks. Returns how many rows there are.
int64_t sgd_plan(const Slice* slices, int64_t n, int independent, int64_t* rows) {
  const auto converted = slices_of(slices, n);
  int64_t launches = 0, written = 0;
  cuda::for_each_launch(converted.data(), n, independent != 0, [&](const cuda::SgdLaunch& launch) {
    const cuda::SgdTable& table = launch.table();
    for (int i = 0; i <= table.slices; ++i) {
      const bool last = i == table.slices;
      int64_t* const row = rows + 6 * written++;
      row[0] = launches;
      row[1] = last ? 0 : launch.device();
      row[2] = last ? 0 : static_cast<int64_t>(launch.dtype());
      row[3] = last ? 0 : reinterpret_cast<int64_t>(table.param[i]);
      row[4] = last ? 0 : table.n[i];
      row[5] = table.first_block[i];
    }
    ++launches;
  });
  return written;
}

int64_t sgd_slice_of_block(const Slice* slices, int64_t n, int64_t block) {
  const auto converted = slices_of(slices, n);
  int64_t found = -1;
  cuda::for_each_launch(converted.data(), n, true, [&](const cuda::SgdLaunch& launch) {
    found = cuda::launches::slice_of_block(launch.table(), static_cast<int>(block));
  });
  return found;
}

// Launches since the last call, and sets the order of threads and blocks from now on.
int64_t take_launches(unsigned seed) {
  const auto count = static_cast<int64_t>(cuda::launched.size());
  cuda::launched.clear();
  Block::running().random.seed(seed);
  return count;
}
}
