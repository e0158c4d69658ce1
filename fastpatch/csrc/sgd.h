// One SGD update over the tensors of a parameter group: guard and kernel.
#pragma once

#include <c10/util/MaybeOwned.h>

#include "cpu/sgd.h"
#include "cuda_proofs.h"
#include "guards.h"
#include "sgd_guards.h"

#include <vector>

namespace fastpatch {

// A parameter of a group with all that its update touches. Parameter and buffer are borrowed, as counting references to
// what Python holds costs more than the update of a small one, until own() is called: before other code can run. The
// gradient is always owned: a backward in another thread may drop it without the GIL.
struct SgdItem {
  using Tensor = c10::MaybeOwned<at::Tensor>;

  Tensor param;
  Tensor grad;
  Tensor buffer;          // undefined: no momentum, or its first step and sgd_step() is to make it
  bool first = false;     // its first step with momentum: the buffer is written, not read
  bool is_shard = false;  // of DTensors, which count versions for it
  // Found out by sgd_step(): stock updates its buffer by operations of its own, even with foreach=True.
  bool has_own_operations = true;

  void own() {
    for (Tensor* tensor : {&param, &grad, &buffer}) {
      *tensor = Tensor::owned(at::Tensor(**tensor));
    }
  }
};

// May other code run while items are updated, as it is long or observed, or buffers are made? Then own() them.
bool lets_others_run(const std::vector<SgdItem>& items);

// Judges the tensors; the caller has judged their Python objects and the thread.
Reason check_sgd_item(const SgdItem& item, Asked* asked);

CudaProofs& sgd_cuda_proofs();

// Where neither foreach nor fused is asked for, stock updates items[begin, end) as with foreach=True if all of them are
// on CUDA devices.
void settle_foreach(const std::vector<SgdItem>& items, size_t begin, size_t end, SgdHyper* hyper);

// Do the hyperparameters suit items[begin, end), which passed their check: can each dtype hold them, are they not in
// memory that the items write, and may the items be updated one by one if the request is to take all of them through
// one operation after the other?
Reason check_sgd_group(
    const std::vector<SgdItem>& items, size_t begin, size_t end, const SgdHyper& hyper, Asked* asked);

// Do items[begin, end) write to where a hyperparameter comes from? Stock reads it anew for each parameter.
bool write_hyper(const std::vector<SgdItem>& items, size_t begin, size_t end, const SgdHyper& hyper);

// Updates items[begin, end) in place, as stock's loop over them would. All must have passed the checks.
// May release the GIL, which the caller must hold.
void sgd_step(std::vector<SgdItem>& items, size_t begin, size_t end, const SgdHyper& hyper);

}  // namespace fastpatch
