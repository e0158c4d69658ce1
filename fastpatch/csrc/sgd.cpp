#include "sgd.h"

#include <algorithm>

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/native/BinaryOps.h>

#include "capability.h"
#include "grain.h"
#include "observe.h"
#include "release_gil.h"

namespace fastpatch {
namespace {

SgdKernel kernel() {
  static const auto chosen = FASTPATCH_CHOOSE(sgd_kernel(), at::native::add_stub.AVX512 != nullptr);
  return chosen;
}

struct Range {
  const char* begin;
  const char* end;
};

Range memory_of(const at::Tensor& tensor) {
  const char* begin = static_cast<const char*>(tensor.const_data_ptr());
  return {begin, begin + tensor.numel() * static_cast<int64_t>(sizeof(float))};
}

bool overlap(const Range& a, const Range& b) {
  return a.begin < b.end && b.begin < a.end;
}

// Stock's loop takes the parameters one after the other. In parallel that is only the same if no parameter writes
// what another one reads or writes.
bool independent(const std::vector<SgdSlice>& slices) {
  struct Touched : Range {
    bool written;
  };
  std::vector<Touched> ranges;
  ranges.reserve(slices.size() * 3);
  for (const SgdSlice& slice : slices) {
    const auto add = [&](const float* data, bool written) {
      if (data != nullptr && slice.n > 0) {
        ranges.push_back(
            {{reinterpret_cast<const char*>(data), reinterpret_cast<const char*>(data + slice.n)}, written});
      }
    };
    add(slice.param, true);
    add(slice.grad, false);
    add(slice.buffer, true);
  }
  std::sort(ranges.begin(), ranges.end(), [](const Touched& a, const Touched& b) { return a.begin < b.begin; });
  const char* last_end = nullptr;  // of all ranges so far
  const char* last_written_end = nullptr;
  for (const Touched& range : ranges) {
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

// Elements [begin, end) of all slices laid end to end.
void run_share(const std::vector<SgdSlice>& slices, const SgdHyper& hyper, int64_t begin, int64_t end) {
  int64_t offset = 0;
  for (const SgdSlice& slice : slices) {
    const int64_t from = std::max<int64_t>(begin - offset, 0);
    const int64_t to = std::min(end - offset, slice.n);
    if (from < to) {
      float* const buffer = slice.buffer == nullptr ? nullptr : slice.buffer + from;
      kernel()(hyper, {slice.param + from, slice.grad + from, buffer, to - from, slice.first});
    }
    offset += slice.n;
    if (offset >= end) {
      return;
    }
  }
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

void run(const std::vector<SgdSlice>& slices, const SgdHyper& hyper, int64_t total) {
  if (!stock_is_parallel(slices)) {
    for (const SgdSlice& slice : slices) {
      kernel()(hyper, slice);
    }
  } else if (!may_flush_denormals() && independent(slices)) {
    at::parallel_for(0, total, grain, [&](int64_t begin, int64_t end) { run_share(slices, hyper, begin, end); });
  } else {
    // Parameter by parameter, each element by the thread that stock gives it to.
    for (const SgdSlice& slice : slices) {
      const std::vector<SgdSlice> one{slice};
      at::parallel_for(0, slice.n, grain, [&](int64_t begin, int64_t end) { run_share(one, hyper, begin, end); });
    }
  }
}

// Stock's first buffer is a clone of the gradient as it stands after maximize and weight decay.
at::Tensor first_buffer(const SgdItem& item, const SgdHyper& hyper) {
  if (hyper.decay || hyper.maximize) {
    return empty_elementwise(item.grad, hyper.decay ? item.param : item.grad);
  }
  return at::Tensor(at::detail::empty_strided_cpu(item.grad.sizes(), item.grad.strides(), at::kFloat));
}

}  // namespace

Reason check_sgd_item(const SgdItem& item) {
  Reason reason = check_float32(item.param);
  if (reason == Reason::served) {
    if (item.grad.layout() == at::kSparse) {
      return Reason::sparse_grad;
    }
    reason = check_float32(item.grad);
  }
  if (reason != Reason::served) {
    return reason;
  }
  if (item.param.sizes() != item.grad.sizes()) {
    return Reason::shape_mismatch;
  }
  // A first buffer's strides derive from the gradient's.
  reason = check_memory(item.param, item.grad, /*exact=*/!item.buffer.defined());
  if (reason != Reason::served) {
    return reason;
  }
  const Range param = memory_of(item.param);
  const Range grad = memory_of(item.grad);
  if (overlap(param, grad)) {
    return Reason::overlap;
  }
  if (!item.buffer.defined()) {
    return Reason::served;
  }
  if (check_float32(item.buffer) != Reason::served || item.buffer.sizes() != item.param.sizes()) {
    return Reason::momentum_buffer;
  }
  reason = check_memory(item.param, item.buffer, /*exact=*/false);
  if (reason != Reason::served) {
    return reason;
  }
  const Range buffer = memory_of(item.buffer);
  return overlap(buffer, param) || overlap(buffer, grad) ? Reason::overlap : Reason::served;
}

void sgd_step(std::vector<SgdItem>& items, size_t begin, size_t end, const SgdHyper& hyper) {
  const ObservedRange range("fastpatch::sgd");
  std::vector<SgdSlice> slices;
  slices.reserve(end - begin);
  // All memory is had before the first write: running out of it leaves nothing half done.
  for (size_t i = begin; i < end; ++i) {
    SgdItem& item = items[i];
    const bool first = hyper.has_momentum && !item.buffer.defined();
    if (first) {
      item.buffer = first_buffer(item, hyper);
    }
    float* const buffer = hyper.has_momentum ? item.buffer.mutable_data_ptr<float>() : nullptr;
    slices.push_back(
        {item.param.mutable_data_ptr<float>(), item.grad.const_data_ptr<float>(), buffer, item.param.numel(), first});
  }
  int64_t total = 0;
  for (size_t i = begin; i < end; ++i) {
    const SgdItem& item = items[i];
    total += item.param.numel();
    // As often as stock's in-place operations do: buf.mul_().add_(), param.add_().
    item.param.unsafeGetTensorImpl()->bump_version();
    if (hyper.has_momentum && !slices[i - begin].first) {
      item.buffer.unsafeGetTensorImpl()->bump_version();
      item.buffer.unsafeGetTensorImpl()->bump_version();
    }
  }
  const ReleaseGil release(total >= grain);  // the items hold the tensors
  run(slices, hyper, total);
}

}  // namespace fastpatch
