// Lets other Python threads run for as long as it lives. What is worked on must be held by C++ then: another thread may
// drop the last Python reference.
#pragma once

#include <torch/csrc/python_headers.h>

namespace fastpatch {

class ReleaseGil {
 public:
  explicit ReleaseGil(bool release) : state_(release ? PyEval_SaveThread() : nullptr) {}
  ~ReleaseGil() {
    if (state_ != nullptr) {
      PyEval_RestoreThread(state_);
    }
  }
  ReleaseGil(const ReleaseGil&) = delete;
  ReleaseGil& operator=(const ReleaseGil&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace fastpatch
