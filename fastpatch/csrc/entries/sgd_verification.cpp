#include "sgd_verification.h"

#include "../python_tensor.h"
#include "optimizer_facts.h"
#include "sgd.h"

namespace fastpatch {
namespace {

// A list of made(i) for all places; nullptr with an error set.
template <class Make>
PyObject* list_of(Places places, const Make& made) {
  Owned list(PyList_New(static_cast<Py_ssize_t>(places.end - places.begin)));
  for (size_t i = places.begin; list && i < places.end; ++i) {
    PyObject* item = made(i);
    if (item == nullptr) {
      return nullptr;
    }
    PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i - places.begin), item);
  }
  return list.release();
}

PyObject* wrap_buffer(const SgdItem& item) {
  return item.buffer->defined() ? wrap(*item.buffer) : Py_NewRef(Py_None);
}

// Of one group: ([(parameter, gradient, buffer or None), ...], {option: value}).
PyObject* described(const std::vector<SgdItem>& items, Places places, const HyperObjects& hyper, bool foreach) {
  PyObject* tensors = list_of(places, [&](size_t i) {
    const SgdItem& item = items[i];
    // A first buffer of DTensors is made already, but not filled.
    PyObject* buffer = item.first ? Py_NewRef(Py_None) : wrap_buffer(item);
    return Py_BuildValue("NNN", wrap(*item.param), wrap(*item.grad), buffer);
  });
  return Py_BuildValue(
      "N{sOsOsOsOsOsOsO}",
      tensors,
      "lr",
      hyper.lr,
      "momentum",
      hyper.momentum,
      "dampening",
      hyper.dampening,
      "weight_decay",
      hyper.weight_decay,
      "nesterov",
      hyper.nesterov,
      "maximize",
      hyper.maximize,
      "foreach",
      foreach ? Py_True : Py_False);
}

PyObject* buffers_of(const std::vector<SgdItem>& items, Places places) {
  return list_of(places, [&](size_t i) { return wrap_buffer(items[i]); });
}

Places all_groups(const OptimizerStep& step) {
  return {0, step.groups.size()};
}

}  // namespace

bool begin_verification(const OptimizerStep& step, Verification* verification) {
  PyObject* groups = list_of(all_groups(step), [&](size_t i) {
    const StepGroup& group = step.groups[i];
    return described(step.items, group.items, hyper_objects(group.options.get()), group.hyper.foreach);
  });
  return verification->begin(sgd_target, "step", Py_BuildValue("(N)", groups));
}

bool end_verification(const OptimizerStep& step, Verification* verification) {
  return !*verification || verification->end(list_of(all_groups(step), [&](size_t i) {
    return buffers_of(step.items, step.groups[i].items);
  }));
}

bool begin_verification(
    const std::vector<SgdItem>& items,
    Places places,
    const HyperObjects& hyper,
    bool foreach,
    Verification* verification) {
  return verification->begin(sgd_target, "step", Py_BuildValue("([N])", described(items, places, hyper, foreach)));
}

bool end_verification(const std::vector<SgdItem>& items, Places places, Verification* verification) {
  return !*verification || verification->end(Py_BuildValue("[N]", buffers_of(items, places)));
}

}  // namespace fastpatch
