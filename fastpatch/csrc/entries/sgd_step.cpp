// Python calls of SGD: torch.optim.SGD.step, the outer patch point. It serves a whole step or none of it: what it can't
// serve, stock's own step takes to the inner point.
#include "../entry.h"
#include "../observe.h"
#include "../python_tensor.h"
#include "entries.h"
#include "optimizer.h"
#include "optimizer_facts.h"
#include "sgd.h"
#include "sgd_verification.h"

#include <bit>
#include <cstdint>

namespace fastpatch {
namespace {

PyObject* promote = nullptr;  // called once torch has hooked SGD.step over our bare proxy

// No closure: SGD.step(self) or SGD.step(self, None).
bool is_bare_step(const Arguments& arguments) {
  const Py_ssize_t given = PyTuple_GET_SIZE(arguments.positional);
  const bool no_keywords = arguments.keywords == nullptr || PyDict_GET_SIZE(arguments.keywords) == 0;
  return no_keywords && (given == 1 || (given == 2 && PyTuple_GET_ITEM(arguments.positional, 1) == Py_None));
}

// While an earlier group was updated without the GIL, another thread may have changed tensors of this one: what was
// judged then must not be written through now. (Stock would write, or raise, as it may.)
bool still_good(const OptimizerStep& step, const StepGroup& group) {
  for (size_t i = group.items.begin; group.items.begin > 0 && i < group.items.end; ++i) {
    Asked again;
    const Reason reason = check_sgd_item(step.items[i], &again);
    if (reason != Reason::served) {
      PyErr_Format(
          PyExc_RuntimeError,
          "fastpatch: a parameter was changed by another thread while an earlier group of its optimizer was updated "
          "(%s: %s)",
          reason_code(reason),
          reason_text(reason));
      return false;
    }
  }
  return true;
}

// What a step works on: tensors, and hyperparameters by their bits.
std::vector<std::uintptr_t> identity_of(const OptimizerStep& step) {
  std::vector<std::uintptr_t> identity;
  for (const SgdItem& item : step.items) {
    for (const auto* tensor : {&item.param, &item.grad, &item.buffer}) {
      identity.push_back(reinterpret_cast<std::uintptr_t>((*tensor)->unsafeGetTensorImpl()));
    }
  }
  for (const StepGroup& group : step.groups) {
    const auto& numbers = group.hyper.doubles;
    for (const double number :
         {numbers.weight_decay, numbers.momentum, numbers.one_minus_dampening, numbers.minus_lr}) {
      identity.push_back(std::bit_cast<std::uintptr_t>(number));
    }
    identity.push_back(group.items.end);
  }
  return identity;
}

// Hands the step over for its check, and reads it again: that runs Python code, and another thread may put other
// tensors in place; then it isn't checked. False with a Python error set.
bool begin_check(PyObject* optimizer, OptimizerStep* step, Refusal* refusal, Verification* verification) {
  step->own();
  if (!begin_verification(*step, verification)) {
    return false;
  }
  const auto before = identity_of(*step);
  const Asked asked = step->asked;
  *step = OptimizerStep();
  step->asked = asked;
  *refusal = read_step(optimizer, step);
  if (identity_of(*step) != before) {
    *verification = Verification();
  }
  return PyErr_Occurred() == nullptr;
}

// All or nothing was decided; false with a Python error set.
bool serve_groups(OptimizerStep& step, Switch state) {
  for (StepGroup& group : step.groups) {
    if (!make_states(step, group) || !still_good(step, group)) {
      return false;
    }
    sgd_step(step.items, group.items.begin, group.items.end, group.hyper);
    if (!finish_group(step, group)) {
      return false;
    }
    count_updates(state, step.items, group.items.begin, group.items.end);
  }
  return true;
}

// Stock's step, whose inner point judges anew; unless all groups are refused as a whole: then that is counted here.
PyObject* leave_to_stock(const Entry& entry, const Arguments& arguments, PyObject* optimizer, const Refusal& refusal) {
  const bool whole_group = refusal.reason != Reason::served && refusal.param < 0;
  const std::vector<Reason> reasons = whole_group ? read_refused_groups(optimizer) : std::vector<Reason>();
  for (const Reason reason : reasons) {
    sgd_target.count_fallback(reason, 1);
  }
  const PassInner pass(sgd_target, static_cast<int64_t>(reasons.size()));
  return arguments.call(entry.stock);
}

// A step without closure, of an optimizer that passed check_optimizer().
PyObject* judge_step(const Entry& entry, const Arguments& arguments, PyObject* optimizer, Switch state, bool hooked) {
  // With hooks or a profiler stock's step serves it through the inner point. Strict judges it here all the same, before
  // any group is written.
  const bool watched = hooked && (is_observed() || has_hooks(optimizer));
  if (watched && !forbids_fallback(state)) {
    return arguments.call(entry.stock);
  }
  OptimizerStep step;
  Refusal refusal = read_step(optimizer, &step);
  if (PyErr_Occurred()) {
    return nullptr;
  }
  const bool serves = refusal.reason == Reason::served && !watched;
  Verification verification;
  if (serves && Verification::is_drawn(sgd_target, state) && !begin_check(optimizer, &step, &refusal, &verification)) {
    return nullptr;
  }
  if (serves && refusal.reason == Reason::served) {
    const bool done = serve_groups(step, state) && end_verification(step, &verification);
    return done ? Py_NewRef(Py_None) : nullptr;
  }
  if (forbids_fallback(state) && refusal.reason != Reason::served && refusal.reason != Reason::optimizer) {
    return sgd_target.raise_fallback(refusal.reason);
  }
  return leave_to_stock(entry, arguments, optimizer, refusal);
}

PyObject* step(PyObject* self, const Arguments& arguments, bool hooked) {
  const Entry* entry = entry_of(self);
  if (entry == nullptr) {
    return nullptr;
  }
  const Switch state = entry->state();
  // A bare proxy that torch has hooked, and we around that: what was refused there as a whole is counted.
  const bool refused = !hooked && PassInner::has_one(sgd_target);
  if (state == Switch::off || refused || !is_bare_step(arguments)) {
    return arguments.call(entry->stock);
  }
  try {
    PyObject* optimizer = PyTuple_GET_ITEM(arguments.positional, 0);
    if (!hooked && promote != nullptr && is_hooked_over(optimizer)) {
      const Owned called(promote);
      promote = nullptr;
      const Owned result(PyObject_CallNoArgs(called.get()));
      if (!result) {
        return nullptr;
      }
    }
    Asked asked;
    if (check_optimizer(optimizer, entry->is_explicit(), &asked) == Reason::served &&
        check_thread() == Reason::served && !in_torch_function_mode() && !is_compiling()) {
      return judge_step(*entry, arguments, optimizer, state, hooked);
    }
    if (PyErr_Occurred()) {
      return nullptr;
    }
  } catch (...) {
    return raise_current_exception();
  }
  return arguments.call(entry->stock);
}

PyObject* hooked_step(PyObject* self, PyObject* args, PyObject* keywords) {
  return step(self, {args, keywords}, true);
}

PyObject* bare_step(PyObject* self, PyObject* args, PyObject* keywords) {
  return step(self, {args, keywords}, false);
}

// (optimizer, explicit)
PyObject* explain_step(PyObject*, PyObject* args) {
  PyObject* optimizer = nullptr;
  int is_explicit = 0;
  if (!PyArg_ParseTuple(args, "Op", &optimizer, &is_explicit)) {
    return nullptr;
  }
  try {
    OptimizerStep step;
    Refusal refusal{check_surroundings(&step.asked)};
    if (refusal.reason == Reason::served) {
      refusal.reason = check_optimizer(optimizer, is_explicit != 0, &step.asked);
    }
    // An optimizer that only the inner point can serve is judged by its tensors all the same.
    if (refusal.reason == Reason::served || refusal.reason == Reason::optimizer) {
      refusal = read_step(optimizer, &step);
    }
    return PyErr_Occurred() ? nullptr : explained(refusal, step.asked);
  } catch (...) {
    return raise_current_exception();
  }
}

PyObject* set_promote(PyObject*, PyObject* callback) {
  Py_XSETREF(promote, callback == Py_None ? nullptr : Py_NewRef(callback));
  Py_RETURN_NONE;
}

PyObject* set_expected(PyObject*, PyObject* proxy) {
  expect_sgd(proxy);
  Py_RETURN_NONE;
}

PyObject* setup(PyObject*, PyObject* facts) {
  if (!set_optimizer_facts(facts)) {
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyMethodDef hooked_definition{"step", as_function(hooked_step), METH_VARARGS | METH_KEYWORDS, nullptr};
PyMethodDef bare_definition{"step", as_function(bare_step), METH_VARARGS | METH_KEYWORDS, nullptr};

PyObject* hooked_entry(PyObject*, PyObject* stock) {
  return make_entry(&hooked_definition, stock, &sgd_target);
}

PyObject* bare_entry(PyObject*, PyObject* stock) {
  return make_entry(&bare_definition, stock, &sgd_target);
}

PyMethodDef methods[] = {
    {"sgd_hooked_step", hooked_entry, METH_O, "A builtin to stand in for an SGD.step that torch has hooked."},
    {"sgd_bare_step", bare_entry, METH_O, "A builtin to stand in for an SGD.step that torch has not hooked."},
    {"sgd_setup", setup, METH_O, "Takes the dict of torch.optim's objects that a step is compared with."},
    {"sgd_set_expected", set_expected, METH_O, "The proxy that stands for sgd in torch.optim.sgd, or None."},
    {"sgd_set_promote", set_promote, METH_O, "What to call when torch has hooked SGD.step over our proxy."},
    {"sgd_explain_step",
     explain_step,
     METH_VARARGS,
     "(optimizer, explicit): (reason, last guard, bits of those asked, group, parameter) for optimizer.step() as "
     "things "
     "stand."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

PyMethodDef* sgd_step_methods() {
  return methods;
}

}  // namespace fastpatch
