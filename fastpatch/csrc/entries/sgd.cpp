// Python calls of SGD: the function sgd of module torch.optim.sgd, the inner patch point. It judges each parameter, and
// it alone counts fallbacks.
#include "../sgd.h"

#include "../entry.h"
#include "../owned.h"
#include "../python_tensor.h"
#include "entries.h"
#include "optimizer_facts.h"
#include "sgd.h"
#include "sgd_call.h"
#include "sgd_verification.h"
#include "sharded.h"

namespace fastpatch {

Target sgd_target{"sgd", sgd_cuda_proofs()};

void count_updates(Switch state, const std::vector<SgdItem>& items, size_t begin, size_t end) {
  int64_t on_cuda = 0;
  for (size_t i = begin; i < end; ++i) {
    on_cuda += items[i].param->is_cuda() ? 1 : 0;
  }
  sgd_target.count_fast(state, static_cast<int64_t>(end - begin), on_cuda);
}

Reason check_surroundings(Asked* asked) {
  asked->ask(SgdGuard::mode);
  if (in_torch_function_mode()) {
    return Reason::torch_function;  // the mode is to see every operation of the step
  }
  asked->ask(SgdGuard::thread);
  const Reason thread = check_thread();
  if (thread != Reason::served) {
    return thread;
  }
  asked->ask(SgdGuard::eager);
  return is_compiling() ? Reason::compiling : Reason::served;
}

PyObject* explained(const Refusal& refusal, const Asked& asked) {
  return Py_BuildValue("siInn", reason_code(refusal.reason), asked.last, asked.guards, refusal.group, refusal.param);
}

namespace {

// Hands places [begin, end) to stock, and takes the buffers it made even when it raises half-way.
bool call_stock(PyObject* stock, PyObject* const* bound, bool has_momentum, Py_ssize_t begin, Py_ssize_t end) {
  const bool part = end - begin < PyList_GET_SIZE(bound[params]);
  Owned parts[3];
  for (const int list : {params, grads, buffers}) {
    const bool whole = list != buffers || has_momentum;
    parts[list] = Owned(whole ? PyList_GetSlice(bound[list], begin, end) : PyList_New(0));
    if (!parts[list]) {
      return false;
    }
  }
  const Owned keywords(PyDict_New());
  const Owned positional(PyTuple_Pack(3, parts[0].get(), parts[1].get(), parts[2].get()));
  if (!keywords || !positional) {
    return false;
  }
  for (int name = buffers + 1; name < argument_count; ++name) {
    if (bound[name] != nullptr && PyDict_SetItem(keywords.get(), sgd_argument_names()[name], bound[name]) < 0) {
      return false;
    }
  }
  // Stock's default looks at all parameters: with a CPU tensor among them, as the served ones are, it is the plain
  // loop.
  for (const int request : {foreach_, fused}) {
    if (part && PyDict_SetItem(keywords.get(), sgd_argument_names()[request], Py_False) < 0) {
      return false;
    }
  }
  const Owned result(PyObject_Call(stock, positional.get(), keywords.get()));
  for (Py_ssize_t i = begin; has_momentum && i < end && i < PyList_GET_SIZE(bound[buffers]); ++i) {
    PyObject* made = PyList_GET_ITEM(parts[buffers].get(), i - begin);
    Py_INCREF(made);
    PyList_SetItem(bound[buffers], i, made);
  }
  return static_cast<bool>(result);
}

// Serves places [begin, end); puts first buffers into the list of them.
bool call_fast(
    Switch state,
    std::vector<SgdItem>& items,
    const Lists& lists,
    PyObject* made_buffers,
    const SgdHyper& hyper,
    size_t begin,
    size_t end) {
  std::vector<Owned> made(end - begin);  // the first buffers of DTensors
  for (size_t i = begin; i < end; ++i) {
    if (items[i].is_shard && items[i].first) {
      made[i - begin] = make_sharded_buffer(lists[i].grad, &items[i]);
      if (!made[i - begin]) {
        return false;
      }
    }
  }
  sgd_step(items, begin, end, hyper);
  for (size_t i = begin; i < end; ++i) {
    if (items[i].is_shard) {
      count_versions_of_dtensors(lists[i].param, lists[i].buffer, items[i], hyper);
    }
    if (items[i].first) {
      Owned& buffer = made[i - begin];
      PyObject* given = buffer ? Py_NewRef(buffer.get()) : wrap(*items[i].buffer);
      if (given == nullptr || PyList_SetItem(made_buffers, static_cast<Py_ssize_t>(i), given) < 0) {
        return false;
      }
    }
  }
  count_updates(state, items, begin, end);
  return true;
}

PyObject* refuse_group(const Entry& entry, Switch state, Reason reason, const Arguments& arguments) {
  if (forbids_fallback(state)) {
    return sgd_target.raise_fallback(reason);
  }
  sgd_target.count_fallback(reason, 1);
  return arguments.call(entry.stock);
}

// Judges each place, and returns why all of them have to go to stock. A Python error may be set.
Reason judge_places(
    const Lists& lists,
    const SgdHyper& hyper,
    Switch state,
    std::vector<SgdItem>* items,
    std::vector<Reason>* reasons,
    Asked* asked) {
  for (size_t i = 0; i < lists.size(); ++i) {
    const Reason reason = judge_place(lists[i], hyper.has_momentum, &(*items)[i], asked);
    if (PyErr_Occurred() || (reason != Reason::served && (hyper.foreach || forbids_fallback(state)))) {
      return reason;
    }
    (*reasons)[i] = reason;
    (*items)[i].own();
  }
  return check_sgd_group(*items, 0, items->size(), hyper, asked);
}

PyObject* serve_places(
    const Entry& entry, Switch state, PyObject* const* bound, SgdHyper hyper, const Arguments& arguments) {
  const Lists lists(bound, hyper.has_momentum);
  if (!lists) {
    return nullptr;
  }
  hyper.foreach = hyper.foreach || stock_chooses_foreach(lists, hyper);
  const size_t n = lists.size();
  std::vector<SgdItem> items(n);
  std::vector<Reason> reasons(n);
  Asked asked;
  const Reason whole = judge_places(lists, hyper, state, &items, &reasons, &asked);
  if (PyErr_Occurred()) {
    return nullptr;
  }
  if (whole != Reason::served) {
    return refuse_group(entry, state, whole, arguments);
  }
  // Once other code has run tensors may have changed.
  bool others_ran = false;
  const auto is_served = [&](size_t i) {
    if (others_ran && reasons[i] == Reason::served) {
      reasons[i] = check_sgd_item(items[i], &asked);
    }
    return reasons[i] == Reason::served;
  };
  // In order, in runs: stock's loop is sequential, and an exception must leave what it would leave.
  for (size_t begin = 0, end; begin < n; begin = end) {
    const bool fast = is_served(begin);
    for (end = begin + 1; end < n && is_served(end) == fast; ++end) {
    }
    Verification verification;
    if (fast && Verification::is_drawn(sgd_target, state)) {
      if (!begin_verification(items, {begin, end}, hyper_of(bound), hyper.foreach, &verification)) {
        return nullptr;
      }
      others_ran = true;
      size_t i = begin;
      for (; i < end && is_served(i); ++i) {
      }
      if (i < end && begin == 0) {
        return refuse_group(entry, state, reasons[i], arguments);  // stock may still have all of it
      }
      if (i < end) {
        end = begin;
        continue;
      }
    }
    for (size_t i = begin; !fast && i < end; ++i) {
      sgd_target.count_fallback(reasons[i], 1);
    }
    const bool done =
        fast
            ? call_fast(state, items, lists, bound[buffers], hyper, begin, end)
            : call_stock(
                  entry.stock, bound, hyper.has_momentum, static_cast<Py_ssize_t>(begin), static_cast<Py_ssize_t>(end));
    others_ran = true;
    if (!done || !end_verification(items, {begin, end}, &verification)) {
      return nullptr;
    }
  }
  Py_RETURN_NONE;
}

PyObject* inner(PyObject* self, PyObject* args, PyObject* keywords) {
  const Entry* entry = entry_of(self);
  if (entry == nullptr) {
    return nullptr;
  }
  const Arguments arguments{args, keywords};
  const Switch state = entry->state();
  if (state == Switch::off || PassInner::take(sgd_target)) {
    return arguments.call(entry->stock);
  }
  try {
    PyObject* bound[argument_count];
    SgdHyper hyper{};
    Asked asked;
    const Reason reason = parse_sgd(arguments, bound, &hyper, &asked);
    if (PyErr_Occurred()) {
      return nullptr;
    }
    return reason == Reason::served ? serve_places(*entry, state, bound, hyper, arguments)
                                    : refuse_group(*entry, state, reason, arguments);
  } catch (...) {
    return raise_current_exception();
  }
}

PyObject* explain_function(PyObject*, PyObject* args, PyObject* keywords) {
  try {
    PyObject* bound[argument_count];
    SgdHyper hyper{};
    Asked asked;
    Reason reason = parse_sgd({args, keywords}, bound, &hyper, &asked);
    Py_ssize_t place = -1;
    if (reason == Reason::served) {
      const Lists lists(bound, hyper.has_momentum);
      hyper.foreach = hyper.foreach || (lists && stock_chooses_foreach(lists, hyper));
      std::vector<SgdItem> items(lists ? lists.size() : 0);
      for (size_t i = 0; reason == Reason::served && i < items.size(); ++i) {
        reason = judge_place(lists[i], hyper.has_momentum, &items[i], &asked);
        items[i].own();
        place = static_cast<Py_ssize_t>(i);
      }
      if (reason == Reason::served) {
        reason = check_sgd_group(items, 0, items.size(), hyper, &asked);
        place = -1;
      }
    }
    return PyErr_Occurred() ? nullptr : explained({reason, -1, place}, asked);
  } catch (...) {
    return raise_current_exception();
  }
}

PyObject* guards(PyObject*, PyObject*) {
  using enum Reason;
  return table_of_guards({FASTPATCH_SGD_GUARDS(FASTPATCH_GUARD_LINE)});
}

PyMethodDef inner_definition{"sgd", as_function(inner), METH_VARARGS | METH_KEYWORDS, nullptr};

PyObject* inner_entry(PyObject*, PyObject* stock) {
  return make_entry(&inner_definition, stock, &sgd_target);
}

PyMethodDef methods[] = {
    {"sgd_inner", inner_entry, METH_O, "A builtin to stand in for torch.optim.sgd.sgd."},
    {"sgd_explain",
     as_function(explain_function),
     METH_VARARGS | METH_KEYWORDS,
     "(reason, last guard, bits of those asked, -1, place) for a call with the arguments of torch.optim.sgd.sgd."},
    {"sgd_guards", guards, METH_NOARGS, "The guards of SGD in order: ((question, codes), ...)."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

PyMethodDef* sgd_methods() {
  return methods;
}

}  // namespace fastpatch
