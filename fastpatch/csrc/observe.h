// What the profiler and other observers of torch's operators see of us.
#pragma once

#include <memory>

namespace fastpatch {

// Is any observer (profiler, execution trace) listening on this thread?
bool is_observed();

// Names a range of time for them; free when nobody listens.
class ObservedRange {
 public:
  explicit ObservedRange(const char* name);
  ~ObservedRange();
  ObservedRange(const ObservedRange&) = delete;
  ObservedRange& operator=(const ObservedRange&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fastpatch
