// The check of served calls against stock: of a share of them, while anybody wants that.
#pragma once

#include "entry.h"
#include "owned.h"

namespace fastpatch {

class Verification {
 public:
  // Is this call, which will be served, one to be checked?
  static bool is_drawn(const Target& target, Switch state) {
    return C10_UNLIKELY(is_wanted_.load(std::memory_order_relaxed)) && draw(target, state);
  }

  // Hands over what the call is given, before it is served. Runs Python code: what was judged must be judged again.
  // Steals the tuple of arguments. False with a Python error set.
  bool begin(const Target& target, const char* kind, PyObject* arguments);

  // Hands over the results (stolen), if begin() took the call; they may be changed into stock's. False with a Python
  // error set.
  bool end(PyObject* results);

  explicit operator bool() const {
    return static_cast<bool>(end_);
  }

  // From now on is_drawn() asks for the target's rate.
  static void want() {
    is_wanted_ = true;
  }
  // verify(target's name, kind, *arguments) returns what is called with the results, or None.
  static void set_verifier(PyObject* verify);

 private:
  static bool draw(const Target& target, Switch state);
  static inline std::atomic<bool> is_wanted_{false};

  Owned end_;
};

}  // namespace fastpatch
