// The way of a Python call through a patch point: is the target switched on here and now, may the call be served,
// who is counted. Targets supply the parsing and the serving.
#pragma once

#include "asked.h"
#include "cuda_proofs.h"
#include "reasons.h"

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include <torch/csrc/python_headers.h>

namespace fastpatch {

// inherit: this scope says nothing about the target. proof: strict and uncounted, for the self-test of enable().
enum class Switch : long { inherit = 0, off = 1, on = 2, strict = 3, proof = 4 };

inline bool forbids_fallback(Switch state) {
  return state == Switch::strict || state == Switch::proof;
}

// What the compiled side knows of a target.
struct Target {
  Target(const char* name, CudaProofs& cuda);
  virtual ~Target() = default;

  // Here and now: the innermost scope of this context that says something, else the process-wide switch, but no less
  // than what an entry has anyhow.
  Switch state(Switch least = Switch::off) const;
  // All units, and those of them whose tensors were on CUDA devices.
  void count_fast(Switch state, int64_t units, int64_t on_cuda) {
    if (state != Switch::proof) {
      fast.fetch_add(units, std::memory_order_relaxed);
      if (C10_UNLIKELY(on_cuda != 0)) {
        fast_on_cuda.fetch_add(on_cuda, std::memory_order_relaxed);
      }
    }
  }
  // The first one of a reason is told with the user's line that caused it; that may run Python code.
  void count_fallback(Reason reason, int64_t units) {
    if (fallback[static_cast<int>(reason)].fetch_add(units, std::memory_order_relaxed) == 0) {
      tell_first_fallback(reason);
    }
  }
  // Sets fastpatch.FallbackError, returns nullptr.
  PyObject* raise_fallback(Reason reason) const;
  // After a call was refused as unproven: makes the proof on its device, if it wasn't made yet. Is it worth judging the
  // call again? May set a Python error.
  bool prove_on_cuda() const;
  // Of what share of the served calls is checked against stock, here and now: see verification.h.
  double verify_rate() const;

  const char* name;
  CudaProofs& cuda;
  size_t index = 0;  // into a scope's list of switches
  std::atomic<Switch> process{Switch::off};
  std::atomic<double> process_verify_rate{0.0};
  std::atomic<int64_t> fast{0};
  std::atomic<int64_t> fast_on_cuda{0};
  std::atomic<int64_t> fallback[static_cast<int>(Reason::count)]{};

 private:
  void tell_first_fallback(Reason reason) const;
};

std::vector<Target*>& all_targets();

// By its name; nullptr, with an error set, if there is none.
Target* find_target(PyObject* name);

// A patch point's own data, behind the builtin that is its __call__.
struct Entry {
  PyObject* stock;  // what it replaced
  bool live;        // false once the patch point was taken out: pass everything through
  Target* target;
  Switch least = Switch::off;  // more than that: used explicitly, in no patch point, on without enable()

  bool is_explicit() const {
    return least != Switch::off;
  }
  Switch state() const {
    return live ? target->state(least) : Switch::off;
  }
};

// A function with keywords as a method table holds it.
inline PyCFunction as_function(PyCFunctionWithKeywords function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

// A new builtin with an entry of its own, and the way back.
PyObject* make_entry(PyMethodDef* definition, PyObject* stock, Target* target);
Entry* entry_of(PyObject* self);  // nullptr, with an error set, if self isn't an entry's capsule

// ((question, (code, ...)), ...) of a table of guards; nullptr with an error set.
PyObject* table_of_guards(const std::vector<GuardLine>& lines);

// The parameters of a Python function, in order; the first `max_positional` may come by position. Interned, so that
// looking up a keyword mostly compares pointers.
class ParameterNames {
 public:
  ParameterNames(std::initializer_list<const char*> names, int max_positional);
  int size() const {
    return static_cast<int>(names_.size());
  }
  int max_positional() const {
    return max_positional_;
  }
  PyObject* operator[](int i) const {
    return names_[i];
  }
  // The place of a keyword, -1 if there is none. Callers name arguments in order, so the search starts at `hint`.
  int find(PyObject* keyword, int hint) const;

 private:
  std::vector<PyObject*> names_;
  int max_positional_;
};

// The arguments of one call, as a proxy hands them on: a tuple, and a dict or nullptr.
struct Arguments {
  PyObject* positional;
  PyObject* keywords;

  PyObject* call(PyObject* function) const {
    return PyObject_Call(function, positional, keywords);
  }
  // Puts each argument at the place of its name (borrowed; nullptr where absent). False for what doesn't fit: stock
  // words the error.
  bool bind(const ParameterNames& names, PyObject** bound) const;
};

// While stock runs after an outer refusal, the inner patch point that it reaches must not judge the same call again.
// Only as many passes as stock will take: whatever user code calls from within decides anew.
class PassInner {
 public:
  explicit PassInner(const Target& target, int64_t passes = 1);
  ~PassInner();
  PassInner(const PassInner&) = delete;
  PassInner& operator=(const PassInner&) = delete;
  static bool take(const Target& target);
  // Would take() find one?
  static bool has_one(const Target& target);

 private:
  int64_t& left_;
  int64_t saved_;
};

// fastpatch._native's context variable of scopes and fastpatch.FallbackError; what makes the proof of a target (name,
// CUDA device); and what is told of the first fallback of a reason (name, code, line).
void set_scope_variable(PyObject* variable);
void set_cuda_prover(PyObject* prove);
void set_first_fallback(PyObject* told);
void set_fallback_error(PyObject* type);

}  // namespace fastpatch
