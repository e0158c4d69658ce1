"""``torch.optim.SGD.step`` and the function ``sgd`` behind it."""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from typing import Any

import torch
from torch.optim import optimizer as _optimizer

from .._difference import bits_differ
from .._patching import PatchPoint, StepPatchPoint, is_own_of_torch
from ._explanation import Explanation, Question
from ._replay import Replay
from ._sgd_replay import Group, SgdReplay
from ._target import Target, native

# torch.optim.sgd, the module, is hidden by an attribute of torch.optim in some releases.
_sgd_module = sys.modules["torch.optim.sgd"]
_SGD: type[torch.optim.SGD] = _sgd_module.SGD


def _own(function: Any) -> Any:
    """The function if it is torch's own, else something that equals nothing: then no step is served as a whole."""
    original = getattr(function, "_torchdynamo_orig_callable", function)  # what torch.compile puts in its place
    return original if is_own_of_torch(original) else object()


class SgdTarget(Target):
    name = "sgd"

    def __init__(self) -> None:
        super().__init__()
        self._step = StepPatchPoint(
            _SGD,
            native("sgd_hooked_step"),
            native("sgd_bare_step"),
            native("sgd_set_promote"),
            "torch.optim:SGD.step",
        )
        # Reached by steps that were taken before SGD.step was patched, and by every step that has to run its hooks.
        self._function = PatchPoint(
            _sgd_module, "sgd", native("sgd_inner"), "torch.optim.sgd:sgd", on_change=native("sgd_set_expected")
        )

    @property
    def points(self) -> tuple[PatchPoint, ...]:
        return self._step, self._function

    def prepare(self) -> None:
        from .. import _native

        tensor = torch.empty(0, device="cpu")
        _native.sgd_setup(
            {
                "SGD": _SGD,
                "defaultdict": defaultdict,
                "init_group": _own(_SGD._init_group),
                "step_code": _own(torch.optim.Optimizer._optimizer_step_code),
                "eval_frame_callback": torch._C._dynamo.eval_frame.get_eval_frame_callback,
                "globals": vars(_sgd_module),
                "single_tensor": _own(_sgd_module._single_tensor_sgd),
                "global_pre_hooks": _optimizer._global_optimizer_pre_hooks,
                "global_post_hooks": _optimizer._global_optimizer_post_hooks,
                "hash_is_id": hash(tensor) == id(tensor) and torch.nn.Parameter.__hash__ is torch.Tensor.__hash__,
            }
        )

    def prove(self) -> str | None:
        from .. import _native

        ours = _native.sgd_inner(self._function.stock)
        _native.set_live(ours, True)
        for nesterov in (False, True):
            for size in (1, 7, 8, 67):
                if self._differs(ours, size, nesterov):
                    return f"parameter or momentum buffer of {size} elements, nesterov={nesterov}"
        return None

    def _differs(self, ours: Any, size: int, nesterov: bool) -> bool:
        results = []
        for function in (self._function.stock, ours):
            param = torch.linspace(-0.7, 0.9, size, dtype=torch.float32, device="cpu")
            buffers: list[torch.Tensor | None] = [None]
            with torch.no_grad():
                for step in range(3):
                    function(
                        [param],
                        [param * -0.37 + 0.1 * step],
                        buffers,
                        foreach=False,
                        weight_decay=0.013,
                        momentum=0.9,
                        lr=0.1,
                        dampening=0.0 if nesterov else 0.3,
                        nesterov=nesterov,
                        maximize=False,
                    )
            results.append((param, buffers[0]))
        return any(bits_differ(stock, ours) for stock, ours in zip(*results, strict=True))

    def prove_on(self, device: torch.device, dtype: torch.dtype) -> str | None:
        from .. import _native

        ours = _native.sgd_inner(self._function.stock)
        _native.set_live(ours, True)
        for nesterov, decay, maximize in ((False, 0.013, False), (True, 0.0, False), (True, 0.013, True)):
            for foreach in (None, False):  # stock's own choice, and one by one, as in a group with CPU tensors
                options = {"nesterov": nesterov, "weight_decay": decay, "maximize": maximize, "foreach": foreach}
                # Single elements, whole and broken vectors, one block of threads and several: in one group.
                runs = [self._run(function, (1, 67, 20_000), device, dtype, options)
                        for function in (self._function.stock, ours)]  # fmt: skip
                if any(bits_differ(*pair) for pair in zip(*runs, strict=True)):
                    told = ", ".join(f"{name}={value}" for name, value in options.items())
                    return f"a parameter, gradient or momentum buffer, {told}"
        return None

    @staticmethod
    def _run(
        function: Any, sizes: tuple[int, ...], device: torch.device, dtype: torch.dtype, options: dict[str, Any]
    ) -> list[torch.Tensor]:  # fmt: skip
        """Parameters, their last gradients and momentum buffers after three steps."""
        params = [torch.linspace(-0.7, 0.9, size, dtype=dtype, device=device) for size in sizes]
        buffers: list[torch.Tensor | None] = [None] * len(sizes)
        grads: list[torch.Tensor] = []
        with torch.no_grad():
            for step in range(3):
                grads = [param * -0.37 + 0.1 * step for param in params]
                function(
                    params, grads, buffers,
                    momentum=0.9, lr=0.1, dampening=0.0 if options["nesterov"] else 0.3, **options,
                )  # fmt: skip
        return [*params, *grads, *(buffer for buffer in buffers if buffer is not None)]

    def replay(self, kind: str, *arguments: Any) -> Replay:
        from .. import _native

        ours = _native.sgd_inner(self._function.stock)
        _native.set_live(ours, True)
        (given,) = arguments
        tensors = [tensor for items, _ in given for item in items for tensor in item]
        groups = [Group(len(items), {**options, "fused": False}) for items, options in given]
        return SgdReplay(self._function.stock, ours, tensors, groups)

    def owns(self, fn: Any) -> bool:
        return self._optimizer_of(fn) is not None or self._function.sees(fn) or self._function.is_original(fn)

    @staticmethod
    def _optimizer_of(fn: Any) -> torch.optim.SGD | None:
        """The optimizer whose ``step`` this is, also where an LR scheduler has put its own function in its place."""
        owner = getattr(fn, "__self__", None)
        if isinstance(owner, _SGD) and getattr(fn, "__name__", "") == "step":
            return owner
        if getattr(fn, "_wrapped_by_lr_sched", False):
            # The scheduler's function holds the optimizer in its closure, weakly.
            cells = [cell.cell_contents for cell in getattr(fn, "__closure__", None) or ()]
            owners = [cell() for cell in cells if isinstance(cell, weakref.ref)]
            return next((owner for owner in owners if isinstance(owner, _SGD)), None)
        return None

    def is_explicit(self, fn: Any) -> bool:
        return super().is_explicit(fn) or super().is_explicit(self._optimizer_of(fn))

    def questions(self) -> tuple[Question, ...]:
        from .. import _native

        return _native.sgd_guards()

    def explain(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation:
        from .. import _native

        optimizer = self._optimizer_of(fn)
        if optimizer is None and not self._function.sees(fn):
            return self.unseen()
        if optimizer is None:
            reason, last, asked, group, param = _native.sgd_explain(*args, **kwargs)
        else:
            reason, last, asked, group, param = _native.sgd_explain_step(optimizer, self.is_explicit(optimizer))
        place = ", ".join(f"{word} {i}" for word, i in (("group", group), ("parameter", param)) if i >= 0)
        return self.explanation(reason, last, asked, f"{place}: " if place and reason != "served" else "")


TARGET = SgdTarget()
