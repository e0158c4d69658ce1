// DTensor parameters (torch.distributed.tensor), as FSDP2 makes them: each process updates the shard that it holds.
#pragma once

#include "../sgd.h"
#include "../owned.h"

namespace fastpatch {

bool is_dtensor(PyObject* object);

// The item of a DTensor's shards, which it owns; buffer may be None. Refuses other gradients and buffers than DTensors
// that are divided in the same way over the same mesh, without pending sums.
Reason read_shards(PyObject* param, PyObject* grad, PyObject* buffer, SgdItem* item, Asked* asked);

// A first buffer as stock makes it, whose shard the item gets. Empty with a Python error set.
Owned make_sharded_buffer(PyObject* grad, SgdItem* item);

// Stock's operations on DTensors count versions of these, never of their shards, and its operations on lists of
// DTensors (foreach=True) none. For an item that sgd_step() has updated.
void count_versions_of_dtensors(PyObject* param, PyObject* buffer, const SgdItem& item, const SgdHyper& hyper);

}  // namespace fastpatch
