"""One import of torch for many first enable() calls: each case runs in a fork of its own and prints a line of JSON.

Run by test_enable.py, as a program.
"""

import contextlib
import json
import os
import platform
import random
import sys
import traceback
import warnings

import torch
import torch.nn.functional as F

import fastpatch
from fastpatch.targets import TARGETS

LOSSES = "smooth_l1_loss", "huber_loss"
stock = {name: getattr(F, name) for name in LOSSES} | {"sgd": vars(torch.optim.SGD)["step"]}
cases = {}


def case(function):
    cases[function.__name__] = function


def enable(*args, **kwargs):
    """Enables; returns the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fastpatch.enable(*args, **kwargs)
    return [(type_name(w.category), w.filename == __file__, str(w.message)) for w in caught]


def type_name(type_):
    return type_.__name__


def error_of(*args, **kwargs):
    try:
        fastpatch.enable(*args, **kwargs)
    except fastpatch.BuildError as error:
        return str(error)


def served():
    "The losses of which a plain call is served."
    fastpatch.reset_report()
    for name in LOSSES:
        getattr(F, name)(torch.ones(3), torch.zeros(3))
    counts = fastpatch.report().to_dict()
    return [name for name in LOSSES if counts[name] == {"fast": 1, "fallback": {}}]


def untouched():
    "The targets whose outer attribute is what it was."
    now = {name: getattr(F, name) for name in LOSSES} | {"sgd": vars(torch.optim.SGD)["step"]}
    return [name for name in stock if now[name] is stock[name]]


def explain():
    explanation = fastpatch.explain(F.smooth_l1_loss, torch.ones(3), torch.zeros(3))
    return [explanation.fast, explanation.reason]


def run_all():
    for name, function in cases.items():
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            try:
                print(json.dumps([name, function()]), flush=True)
            except BaseException:
                print(json.dumps([name, traceback.format_exc()]), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


@case
def unsupported_platform():
    platform.machine = lambda: "aarch64"
    os.environ["FASTPATCH_CACHE_DIR"] = cache = os.path.join(os.getcwd(), "cache")
    first, second = enable(), enable()
    return {
        "warnings": first,
        "again": second,
        "error": error_of(strict=True),
        "enabled": fastpatch.is_enabled(),
        "explain": explain(),
        "tried": os.path.exists(cache),
        "untouched": untouched(),
    }


def broken(name):
    TARGETS[name].prove = lambda: "parameter of 7 elements"
    first, second = enable(), enable()
    return {
        "warnings": first,
        "again": second,
        "error": error_of(name, strict=True),
        "enabled": [name for name in fastpatch.targets() if fastpatch.is_enabled(name)],
        "reasons": {name: fastpatch.explain(getattr(F, name)).reason for name in LOSSES},
        "untouched": untouched(),
        "served": served(),
    }


cases |= {f"broken {name}": lambda name=name: broken(name) for name in stock}


@case
def refusing():
    """The self-test reports a call that fell back."""

    def prove():
        from fastpatch import _native

        ours = _native.loss_inner("smooth_l1_loss", torch._C._nn.smooth_l1_loss)
        _native.set_live(ours, True)
        ours(torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64), 1, 1.0)

    TARGETS["smooth_l1_loss"].prove = prove
    return {"warnings": enable(), "report": fastpatch.report().to_dict()}


# The real self-tests, against a stock that differs in the last bits.

DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16
LAST_BITS = {dtype: 1 + 1.7 * torch.finfo(dtype).eps for dtype in DTYPES}


def differs(name):
    return {"warnings": enable(name), "enabled": fastpatch.is_enabled()}


def other_loss(name, dtype):
    operator = TARGETS[name]._operator

    def other(input, *args):
        loss = operator(input, *args)
        return loss * LAST_BITS[dtype] if input.dtype is dtype else loss

    TARGETS[name]._operator = other
    return differs(name)


def other_gradient(name, dtype):
    operator = TARGETS[name]._operator

    def other(input, *args):
        loss = operator(input, *args)
        if input.dtype is dtype:
            loss.register_hook(lambda grad: grad * LAST_BITS[dtype])
        return loss

    TARGETS[name]._operator = other
    return differs(name)


cases |= {
    f"{function.__name__} {name} {dtype}": lambda args=(function, name, dtype): args[0](*args[1:])
    for function in (other_loss, other_gradient)
    for name in LOSSES
    for dtype in DTYPES
}


@case
def other_update():
    module = sys.modules["torch.optim.sgd"]
    real = module.sgd

    def other(params, *args, **kwargs):
        real(params, *args, **kwargs)
        params[0].mul_(1 + 2e-7)

    module.sgd = other
    return differs("sgd")


@contextlib.contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    yield


@contextlib.contextmanager
def default_device():
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@contextlib.contextmanager
def one_thread():
    torch.set_num_threads(1)
    yield


@contextlib.contextmanager
def three_threads():
    torch.set_num_threads(3)
    yield


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield


def fake_tensor_mode():
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def state():
    return [
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_rng_state().tolist() if torch.get_default_device().type == "cpu" else None,
        random.getstate(),
        torch.get_default_device(),
    ]


def enable_inside(mode):
    rng = torch.get_rng_state()
    with mode():
        before = state()
        caught = enable(strict=True)
        result = {"warnings": caught, "state kept": state() == before, "enabled inside": fastpatch.is_enabled()}
    torch.set_default_dtype(torch.float32)
    return {
        **result,
        "rng kept": torch.equal(torch.get_rng_state(), rng),
        "served": served(),
        "enabled": [name for name in fastpatch.targets() if fastpatch.is_enabled(name)],
    }


modes = {
    "plain": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "device('meta')": lambda: torch.device("meta"),
    "set_default_device('meta')": default_device,
    "FakeTensorMode": fake_tensor_mode,
    "set_default_dtype(float64)": default_dtype,
    "one thread": one_thread,
    "three threads": three_threads,
    "deterministic": deterministic,
    "saved_tensors_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: 1 / 0, lambda t: 1 / 0),
    "DisableTorchFunction": torch._C.DisableTorchFunction,
}
cases |= {name: lambda mode=mode: enable_inside(mode) for name, mode in modes.items()}


@case
def before_any_enable():
    os.environ["FASTPATCH_CACHE_DIR"] = cache = os.path.join(os.getcwd(), "cache")
    fastpatch.reset_report()
    return {
        "report": fastpatch.report().to_dict(),
        "table": str(fastpatch.report()),
        "enabled": fastpatch.is_enabled(),
        "explain": explain(),
        "touched": os.path.exists(cache) or "fastpatch._native" in sys.modules,
    }


@case
def warm_start():
    before = set(sys.modules)
    fastpatch.enable(strict=True)
    return sorted({name.partition(".")[0] for name in set(sys.modules) - before})


run_all()
