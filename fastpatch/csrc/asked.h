// Which guards a call was asked. Each target has a table of its guards, in the order in which its code asks them; the
// code notes which one it asks, so that explain() tells what was passed, what refused, and what wasn't reached.
#pragma once

#include <cstdint>
#include <vector>

#include "reasons.h"

namespace fastpatch {

struct Asked {
  uint32_t guards = 0;  // bits
  int last = 0;         // the one that refuses, if the call is refused

  template <class Guard>
  void ask(Guard guard) {
    last = static_cast<int>(guard);
    guards |= uint32_t{1} << last;
  }
  // Then these.
  void add(const Asked& later) {
    last = later.last;
    guards |= later.guards;
  }
};

// A line of such a table.
struct GuardLine {
  const char* question;  // what holds where it is passed
  std::vector<Reason> reasons;
};

#define FASTPATCH_GUARD_NAME(guard, ...) guard,
#define FASTPATCH_GUARD_LINE(guard, question, ...) {question, {__VA_ARGS__}},

}  // namespace fastpatch
