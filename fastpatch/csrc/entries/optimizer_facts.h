// The objects of torch.optim that optimizers are compared with, and the names of their attributes and keys.
#pragma once

#include "../owned.h"

namespace fastpatch {

struct OptimizerFacts {
  PyTypeObject* sgd = nullptr;
  PyObject* init_group = nullptr;
  PyObject* step_code = nullptr;
  PyObject* global_pre_hooks = nullptr;
  PyObject* global_post_hooks = nullptr;
  PyTypeObject* defaultdict = nullptr;
  PyObject* globals = nullptr;              // of module torch.optim.sgd
  PyObject* single_tensor = nullptr;        // its _single_tensor_sgd
  PyObject* eval_frame_callback = nullptr;  // torch._dynamo's function that tells what compiles frames now
  bool hash_is_id = false;                  // Tensor.__hash__ is id(), so a look-up needn't call it
};

const OptimizerFacts& optimizer_facts();

// Takes them from a dict with these names as keys. False with a Python error set.
bool set_optimizer_facts(PyObject* facts);

// Is the loop over single tensors, which the kernel stands for, still stock's?
bool loop_is_stock();

// Does torch.compile look at every frame that starts now, stock's step too, and so may give it other roundings?
bool is_compiling();

// The object that `sgd` of module torch.optim.sgd has to be, our proxy; nullptr while there is none.
void expect_sgd(PyObject* proxy);

// Interned once: a look-up then compares pointers.
struct Names {
  PyObject* param_groups = PyUnicode_InternFromString("param_groups");
  PyObject* params = PyUnicode_InternFromString("params");
  PyObject* lr = PyUnicode_InternFromString("lr");
  PyObject* momentum = PyUnicode_InternFromString("momentum");
  PyObject* dampening = PyUnicode_InternFromString("dampening");
  PyObject* weight_decay = PyUnicode_InternFromString("weight_decay");
  PyObject* nesterov = PyUnicode_InternFromString("nesterov");
  PyObject* maximize = PyUnicode_InternFromString("maximize");
  PyObject* fused = PyUnicode_InternFromString("fused");
  PyObject* defaults = PyUnicode_InternFromString("defaults");
  PyObject* differentiable = PyUnicode_InternFromString("differentiable");
  PyObject* state = PyUnicode_InternFromString("state");
  PyObject* momentum_buffer = PyUnicode_InternFromString("momentum_buffer");
  PyObject* grad_scale = PyUnicode_InternFromString("grad_scale");
  PyObject* found_inf = PyUnicode_InternFromString("found_inf");
  PyObject* _init_group = PyUnicode_InternFromString("_init_group");
  PyObject* _optimizer_step_code = PyUnicode_InternFromString("_optimizer_step_code");
  PyObject* _optimizer_step_pre_hooks = PyUnicode_InternFromString("_optimizer_step_pre_hooks");
  PyObject* _optimizer_step_post_hooks = PyUnicode_InternFromString("_optimizer_step_post_hooks");
  PyObject* step = PyUnicode_InternFromString("step");
  PyObject* foreach_ = PyUnicode_InternFromString("foreach");
  PyObject* sgd = PyUnicode_InternFromString("sgd");
  PyObject* _single_tensor_sgd = PyUnicode_InternFromString("_single_tensor_sgd");
};

const Names& names();

// Borrowed; nullptr if absent.
inline PyObject* get(PyObject* dict, PyObject* name) {
  return PyDict_GetItemWithError(dict, name);
}

// The object's __dict__; empty if it has none.
Owned instance_dict(PyObject* self);

}  // namespace fastpatch
