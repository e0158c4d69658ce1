#include "sharded.h"

#include <cstring>

#include <ATen/core/grad_mode.h>

#include "../python_tensor.h"

namespace fastpatch {
namespace {

// Modules and types that are there only if the user imported torch.distributed.tensor.
PyObject* attribute_of_module(const char* module_name, const char* name) {
  const Owned module_string(PyUnicode_FromString(module_name));
  const Owned module(module_string ? PyImport_GetModule(module_string.get()) : nullptr);
  PyObject* found = module ? PyObject_GetAttrString(module.get(), name) : nullptr;
  if (found == nullptr) {
    PyErr_Clear();
  }
  return found;
}

struct Names {
  PyObject* local_tensor = PyUnicode_InternFromString("_local_tensor");
  PyObject* spec = PyUnicode_InternFromString("_spec");
  PyObject* mesh = PyUnicode_InternFromString("mesh");
  PyObject* placements = PyUnicode_InternFromString("placements");
  PyObject* shard_order = PyUnicode_InternFromString("shard_order");
  PyObject* detach = PyUnicode_InternFromString("detach");
  PyObject* clone = PyUnicode_InternFromString("clone");
};

const Names& names() {
  static const Names made;
  return made;
}

// Empty, without a Python error, where there is no such attribute.
Owned attribute(PyObject* object, PyObject* name) {
  Owned value(PyObject_GetAttr(object, name));
  if (!value) {
    PyErr_Clear();
  }
  return value;
}

bool equal(PyObject* a, PyObject* b) {
  if (a == b) {
    return true;
  }
  const int result = a == nullptr || b == nullptr ? 0 : PyObject_RichCompareBool(a, b, Py_EQ);
  if (result < 0) {
    PyErr_Clear();
  }
  return result == 1;
}

// Whether every element is whole in its place: no placement but these, a sum over processes above all.
bool are_plain_placements(PyObject* placements) {
  static PyObject* plain[3];  // not initialised under C++'s guard, which would be held while Python code runs
  if (plain[2] == nullptr) {
    constexpr auto* module = "torch.distributed.tensor.placement_types";
    plain[0] = attribute_of_module(module, "Shard");
    plain[1] = attribute_of_module(module, "Replicate");
    plain[2] = attribute_of_module(module, "_StridedShard");
  }
  if (placements == nullptr || !PyTuple_CheckExact(placements)) {
    return false;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(placements); ++i) {
    auto* type = reinterpret_cast<PyObject*>(Py_TYPE(PyTuple_GET_ITEM(placements, i)));
    if (type != plain[0] && type != plain[1] && type != plain[2]) {
      return false;
    }
  }
  return true;
}

// Are two DTensors divided alike? `spec` says how.
bool same_division(PyObject* spec, PyObject* other) {
  if (spec == other) {
    return true;
  }
  for (PyObject* name : {names().mesh, names().placements, names().shard_order}) {
    const Owned one = attribute(spec, name);
    const Owned two = attribute(other, name);
    if (!equal(one.get(), two.get())) {
      return false;
    }
  }
  return true;
}

// The shard of a DTensor that is divided as `spec` says.
Reason read_shard(PyObject* object, PyObject* spec, SgdItem::Tensor* shard) {
  const Owned own_spec = attribute(object, names().spec);
  if (!own_spec || !same_division(spec, own_spec.get())) {
    return Reason::placements;
  }
  const Owned local = attribute(object, names().local_tensor);
  if (!local || exact_tensor(local.get()) == nullptr) {
    return Reason::subclass;
  }
  *shard = SgdItem::Tensor::owned(at::Tensor(*exact_tensor(local.get())));
  return Reason::served;
}

}  // namespace

bool is_dtensor(PyObject* object) {
  static PyObject* dtensor = nullptr;
  PyTypeObject* type = Py_TYPE(object);
  if (dtensor == nullptr) {
    if (std::strcmp(type->tp_name, "DTensor") != 0) {
      return false;
    }
    dtensor = attribute_of_module("torch.distributed.tensor", "DTensor");
  }
  return reinterpret_cast<PyObject*>(type) == dtensor && is_tensor(object);
}

Reason read_shards(PyObject* param, PyObject* grad, PyObject* buffer, SgdItem* item, Asked* asked) {
  if (buffer != Py_None) {
    asked->ask(SgdGuard::buffer_kind);
    if (!is_dtensor(buffer)) {
      return Reason::momentum_buffer;
    }
  }
  asked->ask(SgdGuard::division);
  if (!is_dtensor(grad)) {
    return Reason::placements;
  }
  const Owned spec = attribute(param, names().spec);
  const Owned placements = spec ? attribute(spec.get(), names().placements) : Owned();
  if (!are_plain_placements(placements.get())) {
    return Reason::placements;
  }
  for (PyObject* other : {grad, buffer}) {
    if (other != Py_None && (any_tensor(param).sizes() != any_tensor(other).sizes() ||
                             any_tensor(param).strides() != any_tensor(other).strides())) {
      return Reason::placements;
    }
  }
  const struct {
    PyObject* object;
    SgdItem::Tensor* shard;
  } all[] = {{param, &item->param}, {grad, &item->grad}, {buffer, &item->buffer}};
  for (const auto& one : all) {
    const Reason reason = one.object == Py_None ? Reason::served : read_shard(one.object, spec.get(), one.shard);
    if (reason != Reason::served) {
      return reason;
    }
  }
  item->is_shard = true;
  return check_sgd_item(*item, asked);
}

Owned make_sharded_buffer(PyObject* grad, SgdItem* item) {
  const at::NoGradGuard unrecorded;
  const Owned detached(PyObject_CallMethodNoArgs(grad, names().detach));
  Owned buffer(detached ? PyObject_CallMethodNoArgs(detached.get(), names().clone) : nullptr);
  if (!buffer) {
    return buffer;
  }
  const Owned local(PyObject_GetAttr(buffer.get(), names().local_tensor));
  if (!local || exact_tensor(local.get()) == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "fastpatch: the clone of a DTensor has no plain local tensor");
    return {};
  }
  item->buffer = SgdItem::Tensor::owned(at::Tensor(*exact_tensor(local.get())));
  return buffer;
}

void count_versions_of_dtensors(PyObject* param, PyObject* buffer, const SgdItem& item, const SgdHyper& hyper) {
  if (!hyper.foreach) {
    any_tensor(param).unsafeGetTensorImpl()->bump_version();
  }
  if (hyper.has_momentum && !item.first && item.has_own_operations) {
    any_tensor(buffer).unsafeGetTensorImpl()->bump_version();
    any_tensor(buffer).unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace fastpatch
