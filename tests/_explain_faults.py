"""Calls with faults, each of which one guard refuses: for every guard that this machine can meet."""

import collections
import contextlib
import itertools
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fastpatch
from fastpatch.targets import TARGETS

CSRC = Path(fastpatch.__file__).parent / "csrc"


class Overrides(torch.Tensor):
    """torch.Tensor's own __torch_function__ applies."""


class Plain(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Fault:
    """What a call is given in place of what is served.

    Attributes:
        guard: the guard that refuses it, by its name in C++.
        reason: the code.
        given: what takes which place in the call; two faults of one call are of different places.
    """

    guard: str
    reason: str
    given: dict[str, Any] = field(repr=False)  # a tensor beyond its storage must not be read


def fault(guard, reason, **given):
    return Fault(guard, reason, given)


def guard_names(header):
    """The names in C++, in their order."""
    return re.findall(r"^  X\((\w+),", (CSRC / header).read_text(), re.MULTILINE)


def refusing(explanation):
    """The place, in the native library's table, of the guard that refuses."""
    [name] = [guard.name for guard in explanation.guards if guard.verdict == "refused"]
    return [question for question, _ in TARGETS[explanation.target].questions()].index(name)


def pairs(faults):
    for one, two in itertools.combinations(faults, 2):
        if one.guard != two.guard and not set(one.given) & set(two.given):
            yield one, two


def ones(*sizes, dtype=torch.float32):
    return torch.ones(*sizes, dtype=dtype)


def gaps(dtype=torch.float32):
    return ones(6, dtype=dtype)[::2]


def shrunk():
    tensor = ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def negated():
    return ones(3, dtype=torch.complex64).conj().imag


def of_inference():
    with torch.inference_mode():
        return ones(3)


# -------------------------------------------------------------------------------------------------------- the losses


def loss_faults(threshold, inner):
    huber = threshold == "delta"
    given = [
        fault("signature", "arguments", nonsense=1),
        fault("kinds", "arguments", target=[1.0]),
        fault("kinds", "subclass", target=ones(3).as_subclass(Plain)),
        fault("kinds", "torch_function", input=ones(3).as_subclass(Overrides)),
        fault("reduction", "arguments", reduction=7 if inner else "average"),
        fault("threshold", threshold, **{threshold: -1.0}),
        fault("thread", "inference_mode", thread=torch.inference_mode),
        fault("thread", "forward_ad", thread=forward_ad.dual_level),
        fault("thread", "dispatch_mode", thread=Dispatches),
        fault("tensors", "layout", target=ones(3).to_sparse()),
        fault("tensors", "device", input=ones(3).to("meta")),
        fault("tensors", "lazy_negation", target=negated()),
        fault("tensors", "inference_tensor", input=of_inference()),
        fault("shapes", "shape_mismatch", target=ones(2)),
        fault("shapes", "shape_mismatch", input=ones(2)),
        fault("dtypes", "dtype", target=ones(3).bool()),
        fault("dtypes", "dtype", input=ones(3).double()),
        fault("dtypes", "complex", input=ones(3, dtype=torch.complex64)),
        fault("precision", threshold, **{threshold: 1e-45}),
        fault("order", "strides", input=gaps(torch.float32 if huber else torch.float16)),
        fault("memory", "storage", target=shrunk()),
        fault("memory", "storage", input=shrunk()),
    ]
    if not inner:
        given += [
            fault("weights", "weight", weight=ones(3)),
            fault("weights", "subclass", weight=ones(3).as_subclass(Plain)),
        ] if huber else [fault("reduction", "legacy_arguments", reduce=0)]  # fmt: skip
    return given


def explain_loss(fn, inner, threshold, faults):
    keywords = {"reduction": 1, threshold: 1.0} if inner else {}
    keywords |= {"input": ones(3), "target": ones(3)}
    for one in faults:
        keywords |= one.given
    with keywords.pop("thread", contextlib.nullcontext)():
        return fastpatch.explain(fn, **keywords)


# --------------------------------------------------------------------------------------------- the function sgd


SHARED = ones(3)
TWICE = ones(3), ones(3), ones(3)
MIXED = torch.ones(3), torch.ones(3), torch.ones(3)
HALVES = tuple(ones(3, dtype=torch.float16) for _ in range(3))
SGD_FUNCTION_FAULTS = [
    fault("signature", "arguments", nonsense=1),
    fault("mode", "torch_function", mode=Functions),
    fault("thread", "inference_mode", thread=torch.inference_mode),
    fault("thread", "forward_ad", thread=forward_ad.dual_level),
    fault("eager", "compiling", compiling=True),
    fault("scaling", "grad_scale", grad_scale=ones(())),
    fault("recording", "differentiable", recording=torch.enable_grad),
    fault("hyperparameters", "fused", fused=True),
    fault("hyperparameters", "tensor_hyperparameter", lr=ones(1)),
    fault("hyperparameters", "hyperparameter", dampening=float("nan")),
    fault("hyperparameters", "arguments", foreach=3),
    fault("lists", "arguments", longer=True),
    fault("param_kind", "subclass", param=ones(3).as_subclass(Plain)),
    fault("param_kind", "torch_function", param=ones(3).as_subclass(Overrides)),
    fault("param_kind", "arguments", param=3),
    fault("grad_kind", "subclass", grad=ones(3).as_subclass(Plain)),
    fault("grad_kind", "arguments", grad=None),
    fault("buffer_kind", "momentum_buffer", buffer=ones(3).as_subclass(Plain)),
    fault("param_tensor", "layout", param=ones(3).to_sparse()),
    fault("param_tensor", "complex", param=ones(3, dtype=torch.complex64)),
    fault("param_tensor", "dtype", param=ones(3, dtype=torch.int32)),
    fault("grad_tensor", "sparse_grad", grad=ones(3).to_sparse()),
    fault("grad_tensor", "lazy_negation", grad=negated()),
    fault("grad_tensor", "inference_tensor", grad=of_inference()),
    fault("alike", "dtype", grad=ones(3).double()),
    fault("alike", "dtype", param=ones(3).double()),
    fault("alike", "shape_mismatch", grad=ones(2)),
    fault("order", "strides", grad=gaps()),
    fault("order", "strides", param=gaps()),
    fault("order", "storage", param=shrunk()),
    fault("apart", "overlap", param=SHARED, grad=SHARED),
    fault("buffer", "momentum_buffer", buffer=ones(3).double()),
    fault("buffer", "strides", buffer=gaps()),
    fault("buffer", "storage", buffer=shrunk()),
    fault("precision", "hyperparameter", second=HALVES, momentum=1e6, nesterov=True),
    fault("hyper_memory", "tensor_hyperparameter", third=MIXED, weight_decay=MIXED[0][0]),
    fault("foreach_order", "foreach", foreach=True, fourth=TWICE, fifth=TWICE),
]  # fmt: skip


@contextlib.contextmanager
def compiling(wanted):
    """As if torch.compile looked at every frame that starts."""
    if not wanted:
        yield
        return
    module = torch._C._dynamo.eval_frame
    real, module.get_eval_frame_callback = module.get_eval_frame_callback, lambda: True
    try:
        TARGETS["sgd"].prepare()
        yield
    finally:
        module.get_eval_frame_callback = real
        TARGETS["sgd"].prepare()


def explain_function(faults):
    call = {"param": ones(3), "grad": ones(3), "buffer": ones(3), "momentum": 0.9, "lr": 0.1, "weight_decay": 0.1}
    call |= {"dampening": 0.0, "nesterov": False, "maximize": False, "foreach": False}
    for one in faults:
        call |= one.given
    places = [tuple(call.pop(name) for name in ("param", "grad", "buffer"))]
    places += [call.pop(name, tuple(ones(3) for _ in range(3))) for name in ("second", "third", "fourth", "fifth")]
    params, grads, buffers = map(list, zip(*places, strict=True))
    grads += [ones(3)] * call.pop("longer", False)
    surroundings = [call.pop(name, contextlib.nullcontext) for name in ("thread", "recording", "mode")]
    with compiling(call.pop("compiling", False)), torch.no_grad(), contextlib.ExitStack() as stack:
        for surrounding in surroundings:
            stack.enter_context(surrounding())
        return fastpatch.explain(sys.modules["torch.optim.sgd"].sgd, params, grads, buffers, **call)


# ---------------------------------------------------------------------------------------------------------- SGD.step


class OwnList(list):
    pass


def non_leaf():
    return torch.ones(3, requires_grad=True) * 1.0


SGD_STEP_FAULTS = [
    fault("mode", "torch_function", mode=Functions),
    fault("thread", "inference_mode", thread=torch.inference_mode),
    fault("eager", "compiling", compiling=True),
    fault("scaling", "grad_scale", grad_scale=ones(())),
    fault("recording", "differentiable", differentiable=True),
    fault("containers", "optimizer", states=collections.OrderedDict),
    fault("hyperparameters", "fused", fused=True),
    fault("hyperparameters", "tensor_hyperparameter", lr=ones(1)),
    fault("lists", "optimizer", params=OwnList),
    fault("param_kind", "subclass", param=ones(3).as_subclass(Plain)),
    fault("leaf", "non_leaf", param=non_leaf()),
    fault("grad_kind", "subclass", grad=ones(3).as_subclass(Plain)),
    fault("state", "optimizer", state=collections.UserDict()),
    fault("buffer_kind", "momentum_buffer", state={"momentum_buffer": 3}),
    fault("grad_tensor", "sparse_grad", grad=ones(3).to_sparse()),
    fault("buffer", "momentum_buffer", state={"momentum_buffer": ones(2)}),
    fault("precision", "hyperparameter", second=torch.float16, weight_decay=1e6),
    fault("foreach_order", "foreach", foreach=True, third=True),
    fault("later_groups", "tensor_hyperparameter", lr_of_group_1=True),
]  # fmt: skip
# A parameter without a gradient isn't asked of its own.
NEVER_REACHED = {("leaf", "grad_kind"), ("leaf", "state"), ("leaf", "buffer_kind"), ("leaf", "grad_tensor")}


def parameter(dtype=torch.float32, data=None):
    param = torch.nn.Parameter(ones(3, dtype=dtype) if data is None else data)
    param.grad = ones(3, dtype=dtype)
    return param


def explain_step(faults):
    given = {}
    for one in faults:
        given |= one.given
    third = parameter()
    params = [parameter(), parameter(given.get("second", torch.float32)), third]
    params += [parameter(data=third.detach())] * given.get("third", False)
    params[0].grad = given.get("grad", ones(3))
    optimizer = torch.optim.SGD([{"params": params}, {"params": [parameter()]}], lr=0.1, momentum=0.9)
    group, other = optimizer.param_groups
    if "param" in given:
        group["params"][0] = given["param"]
    if "state" in given:
        optimizer.state[group["params"][0]] = given["state"]
    if given.get("lr_of_group_1"):
        other["lr"] = third.detach()[0]
    group.update({name: given[name] for name in ("fused", "lr", "weight_decay", "foreach") if name in given})
    group["params"] = given.get("params", list)(group["params"])
    optimizer.state = given.get("states", lambda states: states)(optimizer.state)
    optimizer.defaults["differentiable"] = given.get("differentiable", False)
    if "grad_scale" in given:
        optimizer.grad_scale = given["grad_scale"]
    nothing = contextlib.nullcontext
    with compiling(given.get("compiling")), given.get("thread", nothing)(), given.get("mode", nothing)():
        return fastpatch.explain(optimizer.step)
