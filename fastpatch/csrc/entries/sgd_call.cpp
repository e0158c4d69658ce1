#include "sgd_call.h"

#include <c10/core/GradMode.h>

#include "../python_tensor.h"
#include "optimizer_facts.h"
#include "sgd.h"
#include "sharded.h"

namespace fastpatch {
namespace {

Reason parse_place(const Place& place, bool has_momentum, SgdItem* item, Asked* asked) {
  asked->ask(SgdGuard::param_kind);
  item->first = has_momentum && place.buffer == Py_None;
  if (is_dtensor(place.param)) {
    return read_shards(place.param, place.grad, place.buffer, item, asked);
  }
  if (exact_tensor(place.param) == nullptr) {
    return why_not_exact(place.param);
  }
  asked->ask(SgdGuard::grad_kind);
  if (exact_tensor(place.grad) == nullptr) {
    return why_not_exact(place.grad);
  }
  return read_tensors(*exact_tensor(place.param), *exact_tensor(place.grad), place.buffer, item, asked);
}

}  // namespace

const ParameterNames& sgd_argument_names() {
  static const ParameterNames names(
      {"params",
       "d_p_list",
       "momentum_buffer_list",
       "has_sparse_grad",
       "foreach",
       "fused",
       "grad_scale",
       "found_inf",
       "weight_decay",
       "momentum",
       "lr",
       "dampening",
       "nesterov",
       "maximize"},
      weight_decay);
  return names;
}

HyperObjects hyper_of(PyObject* const* bound) {
  return {
      bound[lr],
      bound[momentum],
      bound[dampening],
      bound[weight_decay],
      bound[nesterov],
      bound[maximize],
      bound[foreach_] == nullptr ? Py_None : bound[foreach_],
      bound[fused] == nullptr ? Py_None : bound[fused]};
}

Reason parse_sgd(const Arguments& arguments, PyObject** bound, SgdHyper* hyper, Asked* asked) {
  asked->ask(SgdGuard::signature);
  if (!arguments.bind(sgd_argument_names(), bound)) {
    return Reason::arguments;
  }
  if (!loop_is_stock()) {
    return Reason::optimizer;
  }
  for (const int list : {params, grads, buffers}) {
    if (bound[list] == nullptr || !PyList_CheckExact(bound[list])) {
      return Reason::arguments;
    }
  }
  Reason reason = check_surroundings(asked);
  if (reason != Reason::served) {
    return reason;
  }
  asked->ask(SgdGuard::scaling);
  for (const int scalar : {grad_scale, found_inf}) {
    if (bound[scalar] != nullptr && bound[scalar] != Py_None) {
      return Reason::grad_scale;
    }
  }
  asked->ask(SgdGuard::recording);
  if (at::GradMode::is_enabled()) {
    return Reason::differentiable;
  }
  asked->ask(SgdGuard::hyperparameters);
  reason = parse_hyper(hyper_of(bound), hyper);
  if (reason != Reason::served) {
    return reason;
  }
  asked->ask(SgdGuard::lists);
  const Py_ssize_t n = PyList_GET_SIZE(bound[params]);
  if (PyList_GET_SIZE(bound[grads]) != n || (hyper->has_momentum && PyList_GET_SIZE(bound[buffers]) != n)) {
    return Reason::arguments;
  }
  return Reason::served;
}

Reason judge_place(const Place& place, bool has_momentum, SgdItem* item, Asked* asked) {
  Reason reason = parse_place(place, has_momentum, item, asked);
  while (C10_UNLIKELY(reason == Reason::cuda_unproven) && sgd_target.prove_on_cuda()) {
    *item = SgdItem();
    reason = parse_place(place, has_momentum, item, asked);
  }
  return reason;
}

bool stock_chooses_foreach(const Lists& lists, const SgdHyper& hyper) {
  for (size_t i = 0; hyper.chooses_foreach && i < lists.size(); ++i) {
    PyObject* const param = lists[i].param;
    const bool is_plain = exact_tensor(param) != nullptr || is_dtensor(param);
    if (!is_plain || !any_tensor(param).is_cuda()) {
      return false;
    }
  }
  return hyper.chooses_foreach && lists.size() > 0;
}

}  // namespace fastpatch
