#include "sgd.h"

#include "../formulas/sgd.h"
#include "launch.h"
#include "sgd_launches.h"

namespace fastpatch::cuda {
namespace launches {  // named: nvcc can't start kernels of an anonymous namespace's types

constexpr int sgd_threads = 512;  // of a block

template <class T>
struct SgdArguments {
  SgdTable table;
  SgdScalars<T> scalars;
  bool stores_grad;
};

// The slice that a block updates.
FASTPATCH_DEVICE int slice_of_block(const SgdTable& table, int block) {
  int low = 0, high = table.slices - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (table.first_block[middle] <= block) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

template <class T, bool has_momentum>
__global__ void sgd_kernel(const __grid_constant__ SgdArguments<T> arguments) {
  constexpr int width = vector_width<T>;
  const SgdTable& table = arguments.table;
  const int slice = slice_of_block(table, static_cast<int>(blockIdx.x));
  auto* const __restrict__ param = static_cast<T*>(table.param[slice]);
  auto* const __restrict__ grad = static_cast<T*>(table.grad[slice]);
  auto* const __restrict__ buffer = static_cast<T*>(table.buffer[slice]);
  const bool first = table.first_step[slice];
  const bool aligned = table.aligned[slice];
  const int64_t block_begin = (int64_t{blockIdx.x} - table.first_block[slice]) * elements_of_block;
  const int64_t block_end = block_begin + elements_of_block;
  const int64_t n = table.n[slice] < block_end ? table.n[slice] : block_end;
#pragma unroll 2
  for (int64_t begin = block_begin + int64_t{threadIdx.x} * width; begin < n; begin += int64_t{sgd_threads} * width) {
    Opmath<T> p[width], g[width], b[width] = {};
    load(p, param, begin, n, aligned);
    load(g, grad, begin, n, aligned);
    if (has_momentum && !first) {
      load(b, buffer, begin, n, aligned);
    }
#pragma unroll
    for (int i = 0; i < width; ++i) {
      sgd_update<T, has_momentum>(arguments.scalars, first, p[i], g[i], b[i]);
    }
    store(param, p, begin, n, aligned);
    if (has_momentum) {
      store(buffer, b, begin, n, aligned);
    }
    if (arguments.stores_grad) {
      store(grad, g, begin, n, aligned);
    }
  }
}

template <class T>
void start(const SgdHyper& hyper, const SgdLaunch& launch) {
  const auto& numbers = [&]() -> const auto& {
    if constexpr (std::is_same_v<T, double>) {
      return hyper.doubles;
    } else {
      return hyper.floats;
    }
  }();
  const SgdArguments<T> arguments{
      launch.table(),
      {numbers.weight_decay,
       numbers.momentum,
       numbers.one_minus_dampening,
       numbers.minus_lr,
       hyper.decay,
       hyper.nesterov,
       hyper.maximize},
      writes_grad(hyper)};
  static_assert(sizeof(arguments) <= 4096, "more than a launch may have as arguments");
  const OnDevice device(launch.device());
  device.launch(
      hyper.has_momentum ? sgd_kernel<T, true> : sgd_kernel<T, false>, launch.table().blocks(), sgd_threads, arguments);
}

}  // namespace launches

void sgd(const SgdHyper& hyper, const SgdSlice* slices, int64_t n, bool independent) {
  for_each_launch(slices, n, independent, [&](const SgdLaunch& launch) {
    switch (launch.dtype()) {
      case c10::ScalarType::Double:
        return launches::start<double>(hyper, launch);
      case c10::ScalarType::BFloat16:
        return launches::start<c10::BFloat16>(hyper, launch);
      case c10::ScalarType::Half:
        return launches::start<c10::Half>(hyper, launch);
      default:  // the guards let no other pass
        return launches::start<float>(hyper, launch);
    }
  });
}

}  // namespace fastpatch::cuda
