// Calls of the function sgd of module torch.optim.sgd, parsed and judged.
#pragma once

#include "../entry.h"
#include "../owned.h"
#include "../sgd.h"
#include "optimizer.h"

namespace fastpatch {

// Places among its parameters.
enum SgdArgument {
  params,
  grads,
  buffers,
  has_sparse_grad,
  foreach_,
  fused,
  grad_scale,
  found_inf,
  weight_decay,
  momentum,
  lr,
  dampening,
  nesterov,
  maximize,
  argument_count
};

const ParameterNames& sgd_argument_names();
HyperObjects hyper_of(PyObject* const* bound);

// Judges all but the single parameters; argument_count objects are bound.
Reason parse_sgd(const Arguments& arguments, PyObject** bound, SgdHyper* hyper, Asked* asked);

// The objects at one place of the three lists.
struct Place {
  PyObject* param;
  PyObject* grad;
  PyObject* buffer;  // None: no momentum, or its first step
};

// The lists as they were when the call came: reading DTensors runs Python code.
class Lists {
 public:
  Lists(PyObject* const* bound, bool has_momentum)
      : params_(PyList_AsTuple(bound[params])),
        grads_(PyList_AsTuple(bound[grads])),
        buffers_(has_momentum ? PyList_AsTuple(bound[buffers]) : nullptr),
        complete_(params_ && grads_ && (buffers_ || !has_momentum)) {}

  // False with a Python error set.
  explicit operator bool() const {
    return complete_;
  }
  size_t size() const {
    return static_cast<size_t>(PyTuple_GET_SIZE(params_.get()));
  }
  Place operator[](size_t i) const {
    const auto at = [i](const Owned& list) { return PyTuple_GET_ITEM(list.get(), static_cast<Py_ssize_t>(i)); };
    return {at(params_), at(grads_), buffers_ ? at(buffers_) : Py_None};
  }

 private:
  Owned params_;
  Owned grads_;
  Owned buffers_;
  bool complete_;
};

// One place of the three lists, or why it can't be served; after the self-test on its device if that wasn't made yet.
Reason judge_place(const Place& place, bool has_momentum, SgdItem* item, Asked* asked);

// Will stock update all parameters as with foreach=True, though nobody asked for it?
bool stock_chooses_foreach(const Lists& lists, const SgdHyper& hyper);

}  // namespace fastpatch
