#include "result_memory.h"

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <unordered_map>

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>

namespace fastpatch {
namespace {

// Smaller memory is recycled by malloc, mostly.
constexpr int64_t least_kept = int64_t{512} << 10;
constexpr uintptr_t huge_page = uintptr_t{2} << 20;

// Best effort: without huge pages memory only comes more slowly.
void ask_for_huge_pages(void* data, size_t n) {
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + huge_page - 1) & ~(huge_page - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + n) & ~(huge_page - 1);
  if (begin < end) {
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  }
}

// torch's own memory, and its size.
struct Block {
  at::DataPtr memory;
  int64_t n;
};

class ResultAllocator final : public c10::Allocator {
 public:
  at::DataPtr allocate(size_t n) override {
    Block* block = take(static_cast<int64_t>(n));
    if (block == nullptr) {
      block = fresh(n);
    }
    // Its own context, as copy-on-write storage demands it of plain memory.
    void* const data = block->memory.get();
    return {data, data, give_back, at::Device(at::DeviceType::CPU)};
  }

  void copy_data(void* to, const void* from, size_t n) const override {
    default_copy_data(to, from, n);
  }

  void keep(bool keep) {
    const std::lock_guard<std::mutex> lock(mutex_);
    keep_ = keep;
    if (!keep) {
      drop_until(0);
    }
  }

  int64_t kept() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return kept_bytes_;
  }

  std::mutex& mutex() {
    return mutex_;
  }

 private:
  static void give_back(void* data);

  Block* fresh(size_t n) {
    try {
      auto block = std::make_unique<Block>(Block{c10::GetCPUAllocator()->allocate(n), static_cast<int64_t>(n)});
      ask_for_huge_pages(block->memory.get(), n);
      const std::lock_guard<std::mutex> lock(mutex_);
      in_use_.emplace(block->memory.get(), block.get());
      most_used_ = std::max(most_used_, used_bytes_);  // not before: what can't be had was never in use
      return block.release();
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex_);
      used_bytes_ -= static_cast<int64_t>(n);
      drop_until(0);  // whoever tries again, with us or with stock, finds what we had kept
      throw;
    }
  }

  // A kept block of this size, or nullptr after having made room for a new one.
  Block* take(int64_t n) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Block* found = nullptr;
    for (size_t i = 0; i < count_ && found == nullptr; ++i) {
      if (kept_[i]->n == n) {
        found = remove(i);
      }
    }
    used_bytes_ += n;
    if (found == nullptr) {
      drop_until(std::max(most_used_ - used_bytes_, int64_t{0}));
    } else {
      in_use_.emplace(found->memory.get(), found);
    }
    return found;
  }

  void put(void* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto at = in_use_.find(data);
    Block* const block = at->second;
    in_use_.erase(at);
    used_bytes_ -= block->n;
    if (!keep_ || block->n < least_kept || block->n > most_kept) {
      delete block;
      return;
    }
    drop_until(most_kept - block->n);
    if (count_ == kept_.size()) {
      delete remove(0);
    }
    kept_[count_++] = block;
    kept_bytes_ += block->n;
  }

  // The longest kept go first.
  void drop_until(int64_t bytes) {
    while (count_ > 0 && kept_bytes_ > bytes) {
      delete remove(0);
    }
  }

  Block* remove(size_t i) {
    Block* const block = kept_[i];
    std::copy(kept_.begin() + i + 1, kept_.begin() + count_, kept_.begin() + i);
    --count_;
    kept_bytes_ -= block->n;
    return block;
  }

  std::mutex mutex_;
  bool keep_ = false;
  std::unordered_map<void*, Block*> in_use_;
  std::array<Block*, 16> kept_{};
  size_t count_ = 0;
  int64_t kept_bytes_ = 0;
  int64_t used_bytes_ = 0;
  int64_t most_used_ = 0;
};

// Lives as long as the process: a result may end at its very end.
ResultAllocator& allocator() {
  static ResultAllocator* const only = [] {
    auto* made = new ResultAllocator();
    // A fork must not take a lock along that another thread holds.
    pthread_atfork(
        [] { allocator().mutex().lock(); }, [] { allocator().mutex().unlock(); }, [] { allocator().mutex().unlock(); });
    return made;
  }();
  return *only;
}

void ResultAllocator::give_back(void* data) {
  allocator().put(data);
}

constexpr c10::DispatchKeySet cpu_key(c10::DispatchKey::CPU);

bool is_large(int64_t numel, at::ScalarType dtype) {
  return numel * static_cast<int64_t>(c10::elementSize(dtype)) >= least_kept;
}

}  // namespace

at::Tensor empty_result(at::IntArrayRef sizes, at::ScalarType dtype) {
  if (is_large(c10::multiply_integers(sizes), dtype)) {
    return at::Tensor(at::detail::empty_generic(sizes, &allocator(), cpu_key, dtype, std::nullopt));
  }
  return at::Tensor(at::detail::empty_cpu(sizes, dtype));
}

at::Tensor empty_result(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  if (is_large(c10::multiply_integers(sizes), dtype)) {
    return at::Tensor(at::detail::empty_strided_generic(sizes, strides, &allocator(), cpu_key, dtype));
  }
  return at::Tensor(at::detail::empty_strided_cpu(sizes, strides, dtype));
}

void keep_result_memory(bool keep) {
  allocator().keep(keep);
}

int64_t kept_result_memory() {
  return allocator().kept();
}

}  // namespace fastpatch
