// What a step reads of an optimizer's groups, parameters and states, and writes back to the states.
#include "optimizer.h"

#include <algorithm>
#include <cmath>

#include "../python_tensor.h"
#include "numbers.h"
#include "optimizer_facts.h"
#include "sgd.h"
#include "sharded.h"

namespace fastpatch {
namespace {

bool is_sequence(PyObject* object) {
  return object != nullptr && (PyList_CheckExact(object) || PyTuple_CheckExact(object));
}

bool is_none_or_false(PyObject* object) {
  return object == Py_None || object == Py_False;
}

// bool, or an int standing for one.
bool parse_flag(PyObject* object, bool* flag) {
  if (PyBool_Check(object) || PyLong_CheckExact(object)) {
    *flag = PyObject_IsTrue(object) == 1;
    return true;
  }
  return false;
}

// A defaultdict(dict), as Optimizer makes it?
bool makes_dicts(PyObject* states) {
  if (Py_TYPE(states) != optimizer_facts().defaultdict) {
    return false;
  }
  const Owned factory(PyObject_GetAttrString(states, "default_factory"));
  return factory.get() == reinterpret_cast<PyObject*>(&PyDict_Type);
}

PyObject* look_up_state(PyObject* states, PyObject* param) {
  if (optimizer_facts().hash_is_id) {
    return _PyDict_GetItem_KnownHash(states, param, reinterpret_cast<Py_hash_t>(param));
  }
  return PyDict_GetItemWithError(states, param);
}

// The momentum buffer that a parameter's state holds; None where there is none.
Reason look_up_buffer(PyObject* state, PyObject** buffer) {
  *buffer = Py_None;
  if (state == nullptr) {
    return Reason::served;
  }
  if (!PyDict_CheckExact(state)) {
    return Reason::optimizer;
  }
  PyObject* found = get(state, names().momentum_buffer);
  *buffer = found == nullptr ? Py_None : found;
  return Reason::served;
}

// Reading DTensors runs Python code: all that was read is owned from here on.
Reason read_dtensors(PyObject* param, PyObject* grad, PyObject* buffer, SgdItem* item, OptimizerStep* step) {
  if (step->sharded.empty()) {
    step->own();
  }
  ShardedParam sharded{step->items.size(), Owned::borrow(param), Owned::borrow(grad), Owned::borrow(buffer)};
  const Reason reason = read_shards(param, grad, buffer, item, &step->asked);
  if (reason == Reason::served) {
    item->own();
    step->sharded.push_back(std::move(sharded));
  }
  return reason;
}

Reason read_param(PyObject* param, bool has_momentum, OptimizerStep* step) {
  Asked& asked = step->asked;
  asked.ask(SgdGuard::param_kind);
  const bool sharded = exact_tensor(param) == nullptr;
  if (C10_UNLIKELY(sharded && !is_dtensor(param))) {
    return why_not_exact(param);
  }
  const at::Tensor& tensor = any_tensor(param);
  // A copy before anything is asked of it: a backward in another thread may put another one in its place.
  at::Tensor grad = tensor.unsafeGetTensorImpl()->grad();
  if (!grad.defined()) {
    asked.ask(SgdGuard::leaf);
    return tensor.is_leaf() || tensor.retains_grad() ? Reason::served : Reason::non_leaf;
  }
  asked.ask(SgdGuard::grad_kind);
  PyObject* const face = subclass_face(grad);
  if (C10_UNLIKELY((face != nullptr) != sharded)) {
    return face == nullptr ? Reason::placements : why_not_exact(face);
  }
  PyObject* state = has_momentum ? look_up_state(step->states.get(), param) : nullptr;
  if (state != nullptr) {
    asked.ask(SgdGuard::state);
  }
  PyObject* buffer;
  Reason reason = look_up_buffer(state, &buffer);
  if (reason != Reason::served) {
    return reason;
  }
  SgdItem item;
  item.first = has_momentum && buffer == Py_None;
  reason = sharded ? read_dtensors(param, face, buffer, &item, step)
                   : read_tensors(tensor, std::move(grad), buffer, &item, &asked);
  if (reason == Reason::served) {
    if (!step->sharded.empty()) {
      item.own();
    }
    if (item.first) {
      step->first_steps.push_back({step->items.size(), Owned::borrow(param), Owned::borrow(state), {}});
    }
    step->items.push_back(std::move(item));
  }
  return reason;
}

Reason read_hyper(PyObject* group, SgdHyper* hyper) {
  if (!PyDict_CheckExact(group)) {
    return Reason::optimizer;
  }
  return parse_hyper(hyper_objects(group), hyper);
}

Refusal read_group(PyObject* group, OptimizerStep* step) {
  SgdHyper hyper{};
  step->asked.ask(SgdGuard::hyperparameters);
  const Reason reason = read_hyper(group, &hyper);
  if (reason != Reason::served) {
    return {reason};
  }
  step->asked.ask(SgdGuard::lists);
  PyObject* params = get(group, names().params);
  if (!is_sequence(params)) {
    return {Reason::optimizer};
  }
  const size_t begin = step->items.size();
  const size_t first_begin = step->first_steps.size();
  const size_t sharded_begin = step->sharded.size();
  step->items.reserve(begin + static_cast<size_t>(PySequence_Fast_GET_SIZE(params)));
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(params); ++i) {
    const Reason why = read_param(PySequence_Fast_GET_ITEM(params, i), hyper.has_momentum, step);
    if (why != Reason::served) {
      return {why, -1, i};
    }
  }
  settle_foreach(step->items, begin, step->items.size(), &hyper);
  const Reason order = check_sgd_group(step->items, begin, step->items.size(), hyper, &step->asked);
  if (order != Reason::served) {
    return {order};
  }
  step->groups.push_back(
      {Owned::borrow(group),
       hyper,
       {begin, step->items.size()},
       {first_begin, step->first_steps.size()},
       {sharded_begin, step->sharded.size()}});
  return {};
}

}  // namespace

Reason read_tensors(const at::Tensor& param, at::Tensor grad, PyObject* buffer, SgdItem* item, Asked* asked) {
  item->param = SgdItem::Tensor::borrowed(param);
  item->grad = SgdItem::Tensor::owned(std::move(grad));
  if (buffer != Py_None) {
    asked->ask(SgdGuard::buffer_kind);
    if (exact_tensor(buffer) == nullptr) {
      return Reason::momentum_buffer;
    }
    item->buffer = SgdItem::Tensor::borrowed(*exact_tensor(buffer));
  }
  return check_sgd_item(*item, asked);
}

HyperObjects hyper_objects(PyObject* group) {
  const Names& n = names();
  return {
      get(group, n.lr),
      get(group, n.momentum),
      get(group, n.dampening),
      get(group, n.weight_decay),
      get(group, n.nesterov),
      get(group, n.maximize),
      get(group, n.foreach_),
      get(group, n.fused)};
}

Reason parse_hyper(const HyperObjects& objects, SgdHyper* hyper) {
  for (PyObject* object :
       {objects.lr, objects.momentum, objects.dampening, objects.weight_decay, objects.nesterov, objects.maximize}) {
    if (object == nullptr) {
      return Reason::arguments;
    }
  }
  if (objects.foreach_ == nullptr || (objects.foreach_ != Py_None && !PyBool_Check(objects.foreach_))) {
    return Reason::arguments;
  }
  if (objects.fused == nullptr || !is_none_or_false(objects.fused)) {
    return Reason::fused;
  }
  double lr = 0, momentum = 0, dampening = 0, weight_decay = 0;
  const struct {
    PyObject* object;
    double* value;
    const void** memory;
  } numbers[] = {
      {objects.lr, &lr, &hyper->tensors[0]},
      {objects.momentum, &momentum, nullptr},
      {objects.dampening, &dampening, nullptr},
      {objects.weight_decay, &weight_decay, &hyper->tensors[1]}};
  for (const auto& number : numbers) {
    const Reason reason = check_number(number.object, number.value, number.memory);
    if (reason != Reason::served) {
      return reason;
    }
  }
  if (!parse_flag(objects.nesterov, &hyper->nesterov) || !parse_flag(objects.maximize, &hyper->maximize)) {
    return Reason::hyperparameter;
  }
  const double minus_lr = PyLong_CheckExact(objects.lr) ? 0.0 - lr : -lr;  // -0 is 0 for an int
  hyper->doubles = {weight_decay, momentum, 1.0 - dampening, minus_lr};
  const auto rounded = [](double number) { return static_cast<float>(number); };
  hyper->floats = {rounded(weight_decay), rounded(momentum), rounded(1.0 - dampening), rounded(minus_lr)};
  hyper->foreach = objects.foreach_ == Py_True;
  hyper->chooses_foreach = objects.foreach_ == Py_None && objects.fused == Py_None;
  hyper->decay = weight_decay != 0.0;
  hyper->has_momentum = momentum != 0.0;
  hyper->largest = std::max(std::abs(lr), std::abs(weight_decay));
  if (hyper->has_momentum) {
    hyper->largest = std::max({hyper->largest, std::abs(1.0 - dampening), hyper->nesterov ? std::abs(momentum) : 0.0});
  }
  return Reason::served;
}

std::vector<Reason> read_refused_groups(PyObject* self) {
  const Owned dict = instance_dict(self);
  PyObject* groups = dict ? get(dict.get(), names().param_groups) : nullptr;
  std::vector<Reason> reasons;
  for (Py_ssize_t i = 0; is_sequence(groups) && i < PySequence_Fast_GET_SIZE(groups); ++i) {
    SgdHyper hyper{};
    const Reason reason = read_hyper(PySequence_Fast_GET_ITEM(groups, i), &hyper);
    if (reason == Reason::served || reason == Reason::arguments || reason == Reason::optimizer) {
      return {};
    }
    reasons.push_back(reason);
  }
  return has_hooks(self) ? std::vector<Reason>() : reasons;
}

namespace {

Refusal read_step_once(PyObject* self, OptimizerStep* step) {
  step->asked.ask(SgdGuard::containers);
  const Owned dict = instance_dict(self);
  PyObject* groups = dict ? get(dict.get(), names().param_groups) : nullptr;
  PyObject* states = dict ? get(dict.get(), names().state) : nullptr;
  // A plain dict raises at a missing state as it does in stock's step; a state that a factory other than dict() makes
  // may hold anything.
  const bool known = states != nullptr && (PyDict_CheckExact(states) || makes_dicts(states));
  if (!is_sequence(groups) || !known) {
    return {Reason::optimizer};
  }
  step->states = Owned::borrow(states);
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(groups); ++i) {
    Refusal refusal = read_group(PySequence_Fast_GET_ITEM(groups, i), step);
    if (refusal.reason != Reason::served) {
      refusal.group = i;
      return refusal;
    }
  }
  for (size_t i = 1; i < step->groups.size(); ++i) {
    step->asked.ask(SgdGuard::later_groups);
    const StepGroup& group = step->groups[i];
    if (write_hyper(step->items, 0, group.items.begin, group.hyper)) {
      return {Reason::tensor_hyperparameter, static_cast<Py_ssize_t>(i)};
    }
  }
  if (lets_others_run(step->items)) {
    step->own();
  }
  return {};
}

}  // namespace

Refusal read_step(PyObject* self, OptimizerStep* step) {
  const Asked asked = step->asked;
  Refusal refusal = read_step_once(self, step);
  while (C10_UNLIKELY(refusal.reason == Reason::cuda_unproven) && sgd_target.prove_on_cuda()) {
    *step = OptimizerStep();
    step->asked = asked;
    refusal = read_step_once(self, step);
  }
  return refusal;
}

bool make_states(OptimizerStep& step, const StepGroup& group) {
  size_t sharded = group.sharded.begin;
  for (size_t i = group.first_steps.begin; i < group.first_steps.end; ++i) {
    FirstStep& first = step.first_steps[i];
    SgdItem& item = step.items[first.item];
    if (!first.state) {
      first.state = Owned(PyObject_GetItem(step.states.get(), first.param.get()));
      if (!first.state) {
        return false;
      }
    }
    // A parameter that an earlier group of this step holds too has its first step behind it by now.
    PyObject* buffer = PyDict_CheckExact(first.state.get()) ? get(first.state.get(), names().momentum_buffer) : nullptr;
    const bool is_made = buffer != nullptr && buffer != Py_None;
    if (!item.is_shard) {
      if (is_made && exact_tensor(buffer) != nullptr) {
        item.buffer = SgdItem::Tensor::owned(at::Tensor(*exact_tensor(buffer)));
        item.first = false;
      }
      continue;
    }
    while (step.sharded[sharded].item != first.item) {
      ++sharded;
    }
    ShardedParam& tensors = step.sharded[sharded];
    if (is_made) {
      item.first = false;
      first.buffer = Owned::borrow(buffer);
      tensors.buffer = Owned::borrow(buffer);
      Asked again;
      if (read_shards(tensors.param.get(), tensors.grad.get(), buffer, &item, &again) != Reason::served) {
        PyErr_SetString(
            PyExc_RuntimeError, "fastpatch: a momentum buffer was changed during its optimizer's first step");
        return false;
      }
      item.own();
    } else {
      first.buffer = make_sharded_buffer(tensors.grad.get(), &item);
      if (!first.buffer) {
        return false;
      }
    }
  }
  return true;
}

bool finish_group(OptimizerStep& step, const StepGroup& group) {
  for (size_t i = group.sharded.begin; i < group.sharded.end; ++i) {
    const ShardedParam& sharded = step.sharded[i];
    count_versions_of_dtensors(sharded.param.get(), sharded.buffer.get(), step.items[sharded.item], group.hyper);
  }
  for (size_t i = group.first_steps.begin; i < group.first_steps.end; ++i) {
    FirstStep& first = step.first_steps[i];
    if (!first.buffer) {
      first.buffer = Owned(wrap(*step.items[first.item].buffer));
    }
    if (!first.buffer || PyObject_SetItem(first.state.get(), names().momentum_buffer, first.buffer.get()) < 0) {
      return false;
    }
  }
  return true;
}

}  // namespace fastpatch
