#include "sgd.h"

#include <algorithm>
#include <atomic>
#include <bitset>

#include <ATen/Parallel.h>
#include <ATen/native/BinaryOps.h>

#include "capability.h"
#include "cuda/sgd.h"
#include "empty_tensors.h"
#include "grain.h"
#include "memory_ranges.h"
#include "observe.h"
#include "release_gil.h"

namespace fastpatch {
namespace {

SgdKernel kernel() {
  static const auto chosen = FASTPATCH_CHOOSE(sgd_kernel(), at::native::add_stub.AVX512 != nullptr);
  return chosen;
}

// From so many elements on, some 0.3 ms, other Python threads run during an update.
constexpr int64_t releasing = 32 * grain;

bool independent(const std::vector<SgdSlice>& slices, bool grad_is_written) {
  std::vector<Touched> ranges;
  ranges.reserve(slices.size() * 3);
  for (const SgdSlice& slice : slices) {
    const auto bytes = slice.n * static_cast<int64_t>(c10::elementSize(slice.dtype));
    ranges.push_back({{slice.param, slice.param + bytes}, true});
    ranges.push_back({{slice.grad, slice.grad + bytes}, grad_is_written});
    if (slice.buffer != nullptr) {
      ranges.push_back({{slice.buffer, slice.buffer + bytes}, true});
    }
  }
  return independent(ranges);
}

SgdSlice part_of(const SgdSlice& slice, int64_t from, int64_t to) {
  const int64_t skip = from * static_cast<int64_t>(c10::elementSize(slice.dtype));
  SgdSlice part = slice;
  part.param += skip;
  part.grad += skip;
  part.buffer += slice.buffer == nullptr ? 0 : skip;
  part.n = to - from;
  return part;
}

// Elements [begin, end) of all slices laid end to end; of each slice the bounds are moved down to whole units.
void run_share(const std::vector<SgdSlice>& slices, const SgdHyper& hyper, int64_t begin, int64_t end) {
  int64_t offset = 0;
  for (const SgdSlice& slice : slices) {
    const auto place = [&](int64_t bound) {
      const int64_t i = std::clamp<int64_t>(bound - offset, 0, slice.n);
      return i == slice.n ? i : i - i % sgd_unit;
    };
    const int64_t from = place(begin);
    const int64_t to = place(end);
    if (from < to) {
      kernel()(hyper, part_of(slice, from, to));
    }
    offset += slice.n;
    if (offset >= end) {
      return;
    }
  }
}

// How many threads a parallel region really gets: $OMP_THREAD_LIMIT and $OMP_DYNAMIC may allow fewer than PyTorch asks
// for.
int64_t threads_of_a_region() {
  std::atomic<int64_t> threads{0};
  at::parallel_for(0, at::get_num_threads() * grain, grain, [&](int64_t, int64_t) { ++threads; });
  return threads;
}

// Where stock divides a parameter among its threads, a reduced type has single numbers at the end of each share.
std::vector<SgdSlice> as_stock_divides(const std::vector<SgdSlice>& slices) {
  const auto is_divided = [](const SgdSlice& slice) {
    return (slice.dtype == at::kBFloat16 || slice.dtype == at::kHalf) && slice.n > grain;
  };
  if (std::none_of(slices.begin(), slices.end(), is_divided)) {
    return slices;
  }
  const int64_t threads = threads_of_a_region();
  std::vector<SgdSlice> shares;
  shares.reserve(slices.size() + static_cast<size_t>(threads));
  for (const SgdSlice& slice : slices) {
    const int64_t share =
        is_divided(slice) ? at::divup(slice.n, std::min(threads, at::divup(slice.n, grain))) : slice.n;
    for (int64_t begin = 0; begin < slice.n; begin += share) {
      shares.push_back(part_of(slice, begin, std::min(slice.n, begin + share)));
    }
  }
  return shares;
}

// Only where stock itself would enter a parallel region, that is for one parameter at least: in a forked child such a
// region may hang (OpenMP's threads aren't forked), and nobody shall meet that who wouldn't without us.
bool stock_is_parallel(const std::vector<SgdSlice>& slices) {
  const bool large = std::any_of(slices.begin(), slices.end(), [](const SgdSlice& slice) { return slice.n > grain; });
  return large && at::get_num_threads() > 1 && !at::in_parallel_region();
}

// Flushing of denormals is a setting of each thread, and may differ among those of the pool.
bool may_flush_denormals() {
#if defined(__SSE__)
  constexpr unsigned flush_or_zero = 0x8040;  // FTZ and DAZ
  return (__builtin_ia32_stmxcsr() & flush_or_zero) != 0;
#else
  return false;
#endif
}

void run_on_cpu(const std::vector<SgdSlice>& slices, const SgdHyper& hyper, int64_t total) {
  if (!stock_is_parallel(slices)) {
    for (const SgdSlice& slice : slices) {
      kernel()(hyper, slice);
    }
  } else if (!may_flush_denormals() && independent(slices, writes_grad(hyper))) {
    const std::vector<SgdSlice> shares = as_stock_divides(slices);
    at::parallel_for(0, total, grain, [&](int64_t begin, int64_t end) { run_share(shares, hyper, begin, end); });
  } else {
    // Parameter by parameter, each element by the thread that stock gives it to.
    for (const SgdSlice& slice : slices) {
      at::parallel_for(
          0, slice.n, grain, [&](int64_t begin, int64_t end) { kernel()(hyper, part_of(slice, begin, end)); });
    }
  }
}

// The elements of all, and how many parameters are on CUDA devices. What those and the others write is apart.
void run(const std::vector<SgdSlice>& slices, const SgdHyper& hyper, int64_t total, size_t on_cuda) {
  if (C10_LIKELY(on_cuda == 0)) {
    return run_on_cpu(slices, hyper, total);
  }
  std::vector<SgdSlice> parts[2];
  total = 0;
  for (const SgdSlice& slice : slices) {
    const bool on_cpu = slice.device == sgd_on_cpu;
    parts[on_cpu].push_back(slice);
    total += on_cpu ? slice.n : 0;
  }
  const auto& cuda_slices = parts[false];
  cuda::sgd(
      hyper,
      cuda_slices.data(),
      static_cast<int64_t>(cuda_slices.size()),
      independent(cuda_slices, writes_grad(hyper)));
  run_on_cpu(parts[true], hyper, total);
}

// Stock's first buffer is a clone of the gradient as it stands after maximize and weight decay.
at::Tensor first_buffer(const SgdItem& item, const SgdHyper& hyper) {
  const at::Tensor& grad = *item.grad;
  // On CUDA devices stock's foreach makes those like the gradient too.
  const bool is_computed = (hyper.decay || hyper.maximize) && !(hyper.foreach && grad.is_cuda());
  return is_computed ? empty_elementwise(grad, hyper.decay ? *item.param : grad)
                     : empty_strided_like(grad, grad.scalar_type());
}

// The dtypes of which a buffer is still to be made.
constexpr auto all_dtypes = static_cast<size_t>(at::ScalarType::NumOptions);
using Dtypes = std::bitset<2 * all_dtypes>;

// Of the CPU, or of CUDA.
size_t dtype_of(const SgdItem& item) {
  return static_cast<size_t>(item.param->scalar_type()) + (item.param->is_cuda() ? all_dtypes : 0);
}

Dtypes dtypes_at_first_step(const std::vector<SgdItem>& items, size_t begin, size_t end) {
  Dtypes dtypes;
  for (size_t i = begin; i < end; ++i) {
    const size_t dtype = dtype_of(items[i]);
    dtypes[dtype] = dtypes[dtype] || items[i].first;
  }
  return dtypes;
}

}  // namespace

bool lets_others_run(const std::vector<SgdItem>& items) {
  int64_t total = 0;
  for (const SgdItem& item : items) {
    total += item.param->numel();
    if (item.first || total >= releasing || item.param->is_cuda()) {
      return true;
    }
  }
  return is_observed();
}

void sgd_step(std::vector<SgdItem>& items, size_t begin, size_t end, const SgdHyper& hyper) {
  const ObservedRange range("fastpatch::sgd");
#ifdef FASTPATCH_DEBUG
  for (size_t i = begin; i < end; ++i) {
    Asked asked;
    TORCH_INTERNAL_ASSERT(check_sgd_item(items[i], &asked) == Reason::served);
  }
#endif
  std::vector<SgdSlice> slices;
  slices.reserve(end - begin);
  // Stock's foreach=True multiplies all buffers of a dtype at once, unless one of them is still to be made.
  const Dtypes apart = hyper.foreach ? dtypes_at_first_step(items, begin, end) : Dtypes();
  // All memory is had before the first write: running out of it leaves nothing half done.
  for (size_t i = begin; i < end; ++i) {
    SgdItem& item = items[i];
    item.has_own_operations = !hyper.foreach || apart[dtype_of(item)];
    if (item.first && !item.buffer->defined()) {
      item.buffer = SgdItem::Tensor::owned(first_buffer(item, hyper));
    }
    // Read only, unless writes_grad(hyper).
    void* const grad =
        writes_grad(hyper) ? item.grad->mutable_data_ptr() : const_cast<void*>(item.grad->const_data_ptr());
    slices.push_back(
        {static_cast<char*>(item.param->mutable_data_ptr()),
         static_cast<char*>(grad),
         hyper.has_momentum ? static_cast<char*>(item.buffer->mutable_data_ptr()) : nullptr,
         item.param->numel(),
         item.param->scalar_type(),
         item.param->is_cuda() ? static_cast<int>(item.param->device().index()) : sgd_on_cpu,
         item.first,
         !item.has_own_operations});
  }
  int64_t total = 0;
  size_t on_cuda = 0;
  for (size_t i = begin; i < end; ++i) {
    const SgdItem& item = items[i];
    total += item.param->numel();
    on_cuda += item.param->is_cuda() ? 1 : 0;
    if (item.is_shard) {
      continue;
    }
    // As often as stock's in-place operations do: buf.mul_().add_(), param.add_().
    item.param->unsafeGetTensorImpl()->bump_version();
    if (hyper.has_momentum && !item.first) {
      item.buffer->unsafeGetTensorImpl()->bump_version();
      item.buffer->unsafeGetTensorImpl()->bump_version();
    }
    if (writes_grad(hyper)) {
      item.grad->unsafeGetTensorImpl()->bump_version();
    }
  }
  // The items own their tensors. A launch waits while a device's queue is full, perhaps for another thread's kernels.
  const ReleaseGil release(total >= releasing || on_cuda > 0);
  run(slices, hyper, total, on_cuda);
}

}  // namespace fastpatch
