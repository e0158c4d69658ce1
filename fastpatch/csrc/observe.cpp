#include "observe.h"

#include <ATen/record_function.h>

namespace fastpatch {

struct ObservedRange::Impl {
  at::RecordFunction record{at::RecordScope::FUNCTION};
};

bool is_observed() {
  return at::hasCallbacks();
}

ObservedRange::ObservedRange(const char* name) {
  if (is_observed()) {
    impl_ = std::make_unique<Impl>();
    if (impl_->record.isActive()) {
      impl_->record.before(name);
    }
  }
}

ObservedRange::~ObservedRange() = default;

}  // namespace fastpatch
