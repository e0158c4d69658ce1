// What SGD.step(self) reads of a torch.optim.SGD object: hooks, groups, hyperparameters, parameters, state.
#pragma once

#include "../sgd.h"
#include "../owned.h"

#include <vector>

namespace fastpatch {

// Hyperparameters as Python objects; nullptr where a group lacks one.
struct HyperObjects {
  PyObject* lr;
  PyObject* momentum;
  PyObject* dampening;
  PyObject* weight_decay;
  PyObject* nesterov;
  PyObject* maximize;
  PyObject* foreach_;
  PyObject* fused;
};

// Those of a parameter group, which must be a dict.
HyperObjects hyper_objects(PyObject* group);

Reason parse_hyper(const HyperObjects& objects, SgdHyper* hyper);

// The item of plain tensors, of which `first` is set; buffer may be None. Or why it can't be served.
Reason read_tensors(const at::Tensor& param, at::Tensor grad, PyObject* buffer, SgdItem* item, Asked* asked);

// Places in one of OptimizerStep's vectors.
struct Places {
  size_t begin;
  size_t end;
};

struct StepGroup {
  Owned options;  // the dict
  SgdHyper hyper;
  Places items;  // its parameters with a gradient
  Places first_steps;
  Places sharded;
};

// An item without a buffer, in a group that has momentum.
struct FirstStep {
  size_t item;
  Owned param;
  Owned state;   // optimizer.state[param], empty where that isn't made yet
  Owned buffer;  // the made one, where it is a DTensor
};

// A DTensor, whose shards an item holds.
struct ShardedParam {
  size_t item;
  Owned param;
  Owned grad;
  Owned buffer;  // None while there is none
};

struct OptimizerStep {
  Owned states;  // optimizer.state
  std::vector<StepGroup> groups;
  std::vector<SgdItem> items;
  std::vector<FirstStep> first_steps;
  std::vector<ShardedParam> sharded;
  Asked asked;

  void own() {
    for (SgdItem& item : items) {
      item.own();
    }
  }
};

// Why a step can't be served as a whole, and where; -1 where it is no single group or parameter.
struct Refusal {
  Reason reason = Reason::served;
  Py_ssize_t group = -1;
  Py_ssize_t param = -1;
};

// Is self an SGD whose step() does what stock's does: no own _init_group, attributes in the instance, no gradient
// scaling, not differentiable? Of another one (Reason::optimizer) no guard is asked here: the inner point may serve it.
Reason check_optimizer(PyObject* self, bool is_explicit, Asked* asked);

// Hooks of this optimizer or of all, or somebody's own _optimizer_step_code.
bool has_hooks(PyObject* self);

// Has torch put its hooks around the proxy that is (or was) SGD.step?
bool is_hooked_over(PyObject* self);

// Is every group refused as a whole? Then the reasons, one each; else (or with hooks) nothing.
std::vector<Reason> read_refused_groups(PyObject* self);

// Reads and judges all groups; changes nothing. May set a Python error.
Refusal read_step(PyObject* self, OptimizerStep* step);

// optimizer.state[param] for the group's parameters, made where missing, in stock's order.
bool make_states(OptimizerStep& step, const StepGroup& group);

// What is left to do after sgd_step(): puts the buffers that were made into the states, and counts versions of
// DTensors.
bool finish_group(OptimizerStep& step, const StepGroup& group);

}  // namespace fastpatch
