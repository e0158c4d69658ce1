// Python calls of the losses, parsed and judged.
#pragma once

#include <ATen/core/Tensor.h>

#include "../entry.h"
#include "../losses.h"

namespace fastpatch {

struct LossTarget : Target {
  LossTarget(LossName loss, const char* name, std::initializer_list<const char*> outer_names, const char* threshold)
      : Target(name, cuda_proofs_of(loss)),
        loss(loss),
        outer(outer_names, static_cast<int>(outer_names.size())),
        inner({"input", "target", "reduction", threshold}, 4),
        threshold(outer.find(inner[3], 0)),
        reduction(outer.find(inner[2], 0)),
        size_average(outer.find(PyUnicode_InternFromString("size_average"), 0)),
        reduce(outer.find(PyUnicode_InternFromString("reduce"), 0)),
        weight(outer.find(PyUnicode_InternFromString("weight"), 0)) {}

  LossName loss;
  bool keeps_memory = false;
  // Functions in Python; None where torch's own function isn't as they expect it.
  PyObject* warn_of_legacy_arguments = Py_None;
  PyObject* describe_sizes = Py_None;
  ParameterNames outer;
  ParameterNames inner;
  // Places among the outer parameters, -1 where there is none.
  int threshold;
  int reduction;
  int size_average;
  int reduce;
  int weight;
};

// A call, and what stock warns of: deprecated arguments, and operands of different sizes.
struct ParsedLossCall : LossCall {
  PyObject* size_average = nullptr;
  PyObject* reduce = nullptr;
  PyObject* tensors[2] = {nullptr, nullptr};

  bool is_legacy() const {
    return size_average != nullptr || reduce != nullptr;
  }
  bool broadcasts() const {
    return input->sizes() != target->sizes();
  }
};

using LossParse = Reason (*)(const LossTarget&, const Arguments&, ParsedLossCall*);

// Calls of the function in torch.nn.functional, and of the builtin in torch._C._nn behind it.
Reason parse_outer_loss(const LossTarget& target, const Arguments& arguments, ParsedLossCall* call);
Reason parse_inner_loss(const LossTarget& target, const Arguments& arguments, ParsedLossCall* call);

// Parses a call and checks it.
Reason judge_loss(LossParse parse, const LossTarget& target, const Arguments& arguments, ParsedLossCall* call);

bool are_expandable(at::IntArrayRef a, at::IntArrayRef b);

// The operands as views of one size, as stock's function in Python expands them; recorded if autograd records.
struct Expanded {
  at::Tensor input;
  at::Tensor target;

  // Their sizes must be expandable.
  explicit Expanded(const LossCall& call);
};

}  // namespace fastpatch
