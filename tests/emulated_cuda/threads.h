// CUDA's threads on the CPU, for tests that run kernels: the blocks of a grid one after the other, the threads of a
// block as coroutines, in any order, each until it ends or waits for the others.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#include <ucontext.h>

#define __global__
#define __device__
#define __grid_constant__
#define __shared__ static  // one block runs at a time

struct Index {
  unsigned x;
};

inline Index threadIdx, blockIdx, gridDim, blockDim;

class Block {
 public:
  static Block& running() {
    static Block block;
    return block;
  }

  void run(int threads, const std::function<void()>& body) {
    body_ = &body;
    threads_.resize(static_cast<size_t>(threads));
    for (Thread& thread : threads_) {
      thread.stack.resize(stack_bytes);
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = thread.stack.data();
      thread.context.uc_stack.ss_size = stack_bytes;
      thread.context.uc_link = &scheduler_;
      thread.ended = false;
      makecontext(&thread.context, start, 0);
    }
    size_t ended = 0;
    while (ended < threads_.size()) {
      ended = run_until_barrier();
      if (ended != 0 && ended != threads_.size()) {
        std::fprintf(stderr, "%zu threads of a block ended while others wait for them\n", ended);
        std::abort();
      }
    }
  }

  void wait() {
    swapcontext(&threads_[current_].context, &scheduler_);
  }

  std::mt19937 random{0};

 private:
  static constexpr size_t stack_bytes = 64 << 10;

  struct Thread {
    ucontext_t context;
    std::vector<char> stack;
    bool ended = true;
  };

  static void start() {
    Block& block = running();
    (*block.body_)();
    block.threads_[block.current_].ended = true;
  }

  // How many have ended.
  size_t run_until_barrier() {
    std::vector<size_t> order(threads_.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::shuffle(order.begin(), order.end(), random);
    for (const size_t thread : order) {
      current_ = thread;
      threadIdx.x = static_cast<unsigned>(thread);
      swapcontext(&scheduler_, &threads_[thread].context);
    }
    return static_cast<size_t>(
        std::count_if(threads_.begin(), threads_.end(), [](const Thread& thread) { return thread.ended; }));
  }

  std::vector<Thread> threads_;
  ucontext_t scheduler_{};
  size_t current_ = 0;
  const std::function<void()>* body_ = nullptr;
};

inline void __syncthreads() {
  Block::running().wait();
}
