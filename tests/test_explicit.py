"""fastpatch.nn, fastpatch.nn.functional and fastpatch.optim: served without enable(), and nothing is patched."""

from __future__ import annotations

import copy
import doctest
import inspect
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _helpers import assert_same, assert_same_outcome, outcome, served
from _scripts import run_text
from hypothesis import given
from torch.optim.lr_scheduler import StepLR

import fastpatch
import fastpatch.nn
import fastpatch.nn.functional as ours
import fastpatch.optim
from fastpatch import _switch
from fastpatch.testing import Case, _comparison, strategies

noisy = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
LOSSES = ("smooth_l1_loss", "huber_loss")
MODULES = {"smooth_l1_loss": "SmoothL1Loss", "huber_loss": "HuberLoss"}
SGD_MODULE = sys.modules["torch.optim.sgd"]


def globals_of_torch() -> list[Any]:
    attributes = [(F, name) for name in LOSSES] + [(torch._C._nn, name) for name in LOSSES]
    attributes += [(SGD_MODULE, "sgd"), (torch.nn.SmoothL1Loss, "forward"), (torch.nn.HuberLoss, "forward")]
    return [id(vars(owner)[name]) for owner, name in attributes] + [id(vars(torch.optim.SGD).get("step"))]


torch.optim.SGD([torch.ones(1)], lr=0.1)  # from now on its step has torch's hooks


_in_use: dict[str, list[Any]] = {}


@pytest.fixture(scope="module", autouse=True)
def _in_use_here_alone() -> Iterator[None]:
    """What is called explicitly is in use for the life of the process, and keeps memory: other modules' tests don't
    expect that. These may be run in turns with those."""
    for name, entries in _in_use.items():
        _switch._explicit[name] += entries
    yield
    for name, entries in _switch._explicit.items():
        _in_use[name] = entries[:]
        entries.clear()
    fastpatch.enable()
    fastpatch.disable()  # gives the memory back


@pytest.fixture(autouse=True)
def _torch_is_untouched() -> Iterator[None]:
    before = globals_of_torch()
    yield
    fastpatch.disable()
    assert globals_of_torch() == before


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.linspace(-2, 2, 21).reshape(7, 3).requires_grad_(), torch.linspace(1, -1, 21).reshape(7, 3)


def twins(count: int = 2, **options: Any) -> list[torch.optim.SGD]:
    made = []
    for kind in (torch.optim.SGD, fastpatch.optim.SGD):
        params = [torch.nn.Parameter(torch.linspace(-1, 1, 5 + i)) for i in range(count)]
        made.append(kind(params, **{"lr": 0.1, "momentum": 0.9, **options}))
        give_gradients(made[-1])
    return made


def give_gradients(optimizer: torch.optim.Optimizer, factor: float = 1.0) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.linspace(2, -3, param.numel()) * factor


def state_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [[param, param.grad, param._version, dict(optimizer.state.get(param, {}))] for param in params]


# ------------------------------------------------------------------------------------------------------ equal to stock


def observed(case: Case, source: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(source, f"<{case.target}>", "exec"), names)
    threads = torch.get_num_threads()
    torch.set_num_threads(case.threads)
    try:
        return _comparison._observed(names["run"], nullcontext())
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("target", fastpatch.targets())
def test_any_call_equals_stock(target: str) -> None:
    cases: Any = strategies.sgd_runs() if target == "sgd" else strategies.loss_calls(target)
    seen = {"fast": 0, "fallback": 0}

    @given(cases)
    def check(case: Case) -> None:
        stock = observed(case, case.source())
        before = fastpatch.report().to_dict()[target]
        source = case.source().replace("torch.nn.functional", "fastpatch.nn.functional")
        source = "import fastpatch.optim\n" + source.replace("torch.optim.SGD", "fastpatch.optim.SGD")
        found = _comparison._difference(observed(case, source), stock)
        # A call of torch._C._nn is nobody's explicit one.
        assert found is None
        after = fastpatch.report().to_dict()[target]
        seen["fast"] += after["fast"] > before["fast"]
        seen["fallback"] += after["fallback"] != before["fallback"]

    check()
    assert seen["fast"] > 40
    assert seen["fallback"] > 0


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_modules(name: str, reduction: str) -> None:
    threshold = {"smooth_l1_loss": "beta", "huber_loss": "delta"}[name]
    stock, module = (
        getattr(package, MODULES[name])(reduction=reduction, **{threshold: 0.3}) for package in (torch.nn, fastpatch.nn)
    )
    assert isinstance(module, type(stock))
    assert repr(module) == repr(stock)
    results = []
    for made, fast in ((stock, 0), (module, 1), (copy.deepcopy(module), 1), (pickle.loads(pickle.dumps(module)), 1)):
        input, target = operands()
        with served(name, fast=fast):
            loss = made(input, target)
        loss.sum().backward()
        results.append((loss, input.grad))
        assert_same(results[-1], results[0])


def test_signatures_are_stocks() -> None:
    for name in LOSSES:
        assert inspect.signature(getattr(ours, name)) == inspect.signature(getattr(F, name))
        assert getattr(ours, name).__doc__ == getattr(F, name).__doc__
        assert inspect.signature(getattr(fastpatch.nn, MODULES[name])) == inspect.signature(
            getattr(torch.nn, MODULES[name])
        )
    assert inspect.signature(fastpatch.optim.SGD) == inspect.signature(torch.optim.SGD)
    assert issubclass(fastpatch.optim.SGD, torch.optim.SGD)
    assert repr(fastpatch.optim.SGD([torch.ones(1)])) == repr(torch.optim.SGD([torch.ones(1)]))
    assert fastpatch.optim.SGD.__name__ == "SGD"


@pytest.mark.parametrize("arguments", [(1,), (torch.ones(2),), (torch.ones(2), torch.ones(3)), ()], ids=str)
def test_errors_and_warnings_are_stocks_of_the_users_line(arguments: tuple[Any, ...]) -> None:
    expected, actual = (
        outcome(lambda function=function: function(*arguments)) for function in (F.smooth_l1_loss, ours.smooth_l1_loss)
    )
    assert_same_outcome(actual, expected)
    shapes = torch.ones(2, 1), torch.ones(2, 3)
    expected, actual = (outcome(lambda f=f: f(*shapes)) for f in (F.huber_loss, ours.huber_loss))
    assert_same_outcome(actual, expected)
    assert actual.warned[0][2] == __file__


@pytest.mark.parametrize("way", ["explicit inside enabled", "explicit after enable", "super().step()", "both"])
def test_a_call_counts_once(way: str) -> None:
    class Own(fastpatch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    if way != "super().step()":
        fastpatch.enable()
    with fastpatch.enabled() if way == "explicit inside enabled" else nullcontext():
        input, target = operands()
        with served("smooth_l1_loss", fast=1):
            ours.smooth_l1_loss(input, target)
        with served("smooth_l1_loss", fallback={"dtype": 1}):
            ours.smooth_l1_loss(input, target.double())
        stock, optimizer = twins()
        if "super" in way:
            optimizer = Own(optimizer.param_groups[0]["params"], lr=0.1, momentum=0.9)
        with served("sgd", fast=2):
            optimizer.step()
    fastpatch.disable()
    stock.step()
    assert_same(state_of(optimizer), state_of(stock))


# ------------------------------------------------------------------------------------------------------------ SGD.step


def test_steps() -> None:
    stock, optimizer = twins(nesterov=True, weight_decay=0.01)
    for number in range(3):
        with served("sgd", fast=2):
            optimizer.step()
        stock.step()
        assert_same(state_of(optimizer), state_of(stock))
        for made in (stock, optimizer):
            give_gradients(made, number + 0.5)


def profiled(step: Callable[[], Any]) -> Any:
    with torch.autograd.profiler.profile() as profile:
        step()
    assert any(event.name == "Optimizer.step#SGD.step" for event in profile.function_events)


def closed(optimizer: torch.optim.SGD) -> Any:
    assert optimizer.step(lambda: torch.tensor(3.5)) == 3.5


@pytest.mark.parametrize("case", ["pre-hook", "post-hook", "global hook", "profiler", "closure", "scheduler", "sparse"])
def test_what_the_whole_step_hands_over_is_served_by_the_function_behind_it(case: str) -> None:
    stock, optimizer = twins(3)
    seen: list[Any] = []
    fallback = {}
    for made in (stock, optimizer):
        if case == "pre-hook":
            made.register_step_pre_hook(lambda *args: seen.append(len(args)))
        elif case == "post-hook":
            made.register_step_post_hook(lambda *args: seen.append(len(args)))
        elif case == "scheduler":
            StepLR(made, 1)
        elif case == "sparse":
            param = torch.nn.Parameter(torch.ones(2, 3))
            made.param_groups[0]["params"].append(param)
            param.grad = torch.ones(2, 3).to_sparse()
            fallback = {"sparse_grad": 1}
    handle = None
    if case == "global hook":
        from torch.optim.optimizer import register_optimizer_step_post_hook

        handle = register_optimizer_step_post_hook(lambda *args: seen.append(len(args)))
    try:
        for made, fast in ((stock, 0), (optimizer, 3)):
            with served("sgd", fast=fast, fallback=fallback if fast else {}):
                if case == "profiler":
                    profiled(made.step)
                elif case == "closure":
                    closed(made)
                else:
                    made.step()
    finally:
        if handle is not None:
            handle.remove()
    assert len(seen) == (2 if "hook" in case else 0)  # one of each optimizer
    assert_same(state_of(optimizer), state_of(stock))


def test_a_refused_step_counts_a_group_once() -> None:
    stock, optimizer = twins(fused=True)
    with served("sgd", fallback={"fused": 1}):
        optimizer.step()
    stock.step()
    assert_same(state_of(optimizer), state_of(stock))


def test_states_are_stocks() -> None:
    stock, optimizer = twins()
    optimizer.step()
    stock.step()
    for source, into in ((stock, optimizer), (optimizer, stock)):
        into.load_state_dict(copy.deepcopy(source.state_dict()))
        with served("sgd", fast=2 if into is optimizer else 0):
            into.step()
        source.step()
        assert_same(state_of(into), state_of(source))


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("way", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))], ids=["copy", "pickle"])
def test_copies(way: Callable[[Any], Any], scheduled: bool) -> None:
    stock, optimizer = twins()
    if scheduled:
        StepLR(optimizer, 1)
    optimizer.step()
    if scheduled:
        optimizer.__dict__.pop("step")  # which no copy can have
    copied = way(optimizer)
    for made in (optimizer, copied):
        give_gradients(made)  # a deep copy has none
    stock.step()
    give_gradients(stock)
    stock.step()
    with served("sgd", fast=2):
        copied.step()
    for (param, _, _, state), (expected, _, _, of_stock) in zip(state_of(copied), state_of(stock), strict=True):
        assert_same((param, state), (expected, of_stock))
    assert type(copied) is fastpatch.optim.SGD


def test_grad_scaler() -> None:
    for overflow in (False, True):
        stock, optimizer = twins()
        for made, fast in ((stock, 0), (optimizer, 0 if overflow else 2)):
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            scaler.scale(torch.ones(()))
            if overflow:
                made.param_groups[0]["params"][1].grad[2] = torch.inf
            with served("sgd", fast=fast):
                scaler.step(made)
            scaler.update()
        assert_same(state_of(optimizer), state_of(stock))


def test_a_group_that_is_added() -> None:
    stock, optimizer = twins()
    for made in (stock, optimizer):
        made.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "lr": 0.5, "momentum": 0})
        give_gradients(made)
    with served("sgd", fast=3):
        optimizer.step()
    stock.step()
    assert_same(state_of(optimizer), state_of(stock))


SUBCLASS_FIRST = """
import sys, torch, fastpatch.optim
runs = []

class Own(fastpatch.optim.SGD if sys.argv[1] == "ours" else torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)

class Plain(Own.__mro__[1]):
    pass

for kind in (Own, Plain, Own.__mro__[1], Own, Plain):
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = kind([param], lr=0.1)
    optimizer.register_step_post_hook(lambda *args: runs.append(kind.__name__))
    optimizer.step()
    runs.append(param.tolist())
print(runs)
print(fastpatch.report().to_dict()["sgd"]["fast"])
"""


def test_hooks_run_as_often_as_stocks_in_subclasses_first_seen_before(tmp_path: Any) -> None:
    stock, made = (run_text(SUBCLASS_FIRST, name, folder=tmp_path).stdout.splitlines() for name in ("stock", "ours"))
    assert made[0] == stock[0]
    assert (stock[1], made[1]) == ("0", "5")


@noisy
def test_compiled_steps() -> None:
    results = []
    for made in twins():
        torch._dynamo.reset()
        torch.compile(made.step, backend="eager")()
        results.append(state_of(made))
    torch._dynamo.reset()
    assert_same([row[0] for row in results[1]], [row[0] for row in results[0]])


# ---------------------------------------------------------------------------------------------------- compilers and co


def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return ours.smooth_l1_loss(a, b, reduction="sum", beta=0.5)


class Step(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return step(a, b)


CODE = [step, fastpatch.nn.SmoothL1Loss(reduction="sum", beta=0.5)]


@noisy
@pytest.mark.parametrize("code", CODE, ids=["function", "module"])
@pytest.mark.parametrize("way", ["script", "trace", "compile", "export", "fx"])
def test_compilers(way: str, code: Any) -> None:
    input, target = (tensor.detach() for tensor in operands())
    expected = F.smooth_l1_loss(input, target, reduction="sum", beta=0.5)
    torch._dynamo.reset()
    if way == "script":
        made = torch.jit.script(code)
    elif way == "trace":
        made = torch.jit.trace(code, (input, target))
    elif way == "compile":
        made = torch.compile(code, backend="aot_eager", fullgraph=True)
    elif way == "fx":
        made = torch.fx.symbolic_trace(code)
    else:
        module = code if isinstance(code, torch.nn.Module) else Step()  # export takes modules only
        made = torch.export.export(module, (input, target)).module()
    assert_same(made(input, target), expected)
    torch._dynamo.reset()


FIRST_CALLS = """
import sys, torch, fastpatch.nn.functional as ours, torch.nn.functional as F

def loss(a, b):
    return ours.smooth_l1_loss(a, b, reduction="sum")

x, y = torch.ones(3, requires_grad=True), torch.zeros(3)
way = sys.argv[1]
if way == "compile":
    print(torch.compile(loss, backend="aot_eager", fullgraph=True)(x, y).item())
elif way == "trace":
    print(torch.jit.trace(loss, (x, y))(x, y).item())
elif way == "script":
    print(torch.jit.script(loss)(x, y).item())
elif way == "hook":
    x.register_hook(lambda grad: print(loss(x.detach(), y).item()))
    (2 * x).sum().backward()
elif way == "inference":
    with torch.inference_mode():
        print(loss(x, y).item())
elif way == "vmap":
    print(torch.vmap(loss)(x, y).sum().item())
elif way == "mode":
    with torch.device("meta"):
        print(loss(x, y).item())
elif way == "thread":
    import threading
    threads = [threading.Thread(target=loss, args=(x, y)) for _ in range(8)]
    [t.start() for t in threads], [t.join() for t in threads]
    import fastpatch
    assert fastpatch.report().to_dict()["smooth_l1_loss"]["fast"] == 8
    print(1.5)
elif way == "fork":
    import os
    if os.fork() == 0:
        loss(x, y)
        os._exit(0)
    os.wait()
    print(loss(x, y).item())
elif way == "warning":
    import warnings
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours.smooth_l1_loss(x[:1], y)
    assert caught[0].filename == __file__, caught[0]
    print(1.5)
x = torch.ones(3, requires_grad=True)  # The next one, plainly, is fast.
import fastpatch
before = fastpatch.report().to_dict()["smooth_l1_loss"]["fast"]
loss(x, y).backward()
assert fastpatch.report().to_dict()["smooth_l1_loss"]["fast"] == before + 1
assert not fastpatch.is_enabled() and F.smooth_l1_loss is not ours.smooth_l1_loss
"""


@pytest.mark.parametrize(
    "way", ["compile", "trace", "script", "hook", "inference", "vmap", "mode", "thread", "fork", "warning"]
)
def test_the_first_call_may_come_anywhere(way: str, tmp_path: Any) -> None:
    assert run_text(FIRST_CALLS, way, folder=tmp_path).stdout == "1.5\n"


# ------------------------------------------------------------------------------------------ scopes, environment, builds


def test_scopes_hold_and_the_process_switch_does_not() -> None:
    input, target = operands()
    fastpatch.enable()
    fastpatch.disable()
    with served("huber_loss", fast=1):
        ours.huber_loss(input, target)
    with fastpatch.disabled("huber_loss"), served("huber_loss"):
        ours.huber_loss(input, target)
    with fastpatch.enabled(strict=True), pytest.raises(fastpatch.FallbackError):
        ours.huber_loss(input, target.double())
    optimizer = twins()[1]
    with fastpatch.disabled(), served("sgd"):
        optimizer.step()
    with served("sgd", fast=2):
        optimizer.step()


def test_verify_in_a_scope() -> None:
    with fastpatch.enabled(verify=1):
        ours.smooth_l1_loss(*operands()).backward()
        twins()[1].step()
    assert fastpatch.report().verified == {"smooth_l1_loss": 2, "sgd": 1}


def test_a_difference_takes_it_off_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from fastpatch import _reproduction, _switch
    from fastpatch.targets._loss_replay import LossReplay

    ours.huber_loss(*operands())  # it serves
    monkeypatch.setattr(_reproduction, "folder", lambda: tmp_path)
    for name in ("_unfit", "_fit", "_warned"):
        monkeypatch.setattr(_switch, name, type(getattr(_switch, name))(getattr(_switch, name)))
    by_stock = LossReplay.by_stock
    monkeypatch.setattr(LossReplay, "by_stock", lambda self: [by_stock(self)[0] + 1, *by_stock(self)[1:]])
    try:
        with fastpatch.enabled(verify=1), pytest.warns(fastpatch.DifferenceWarning):
            ours.huber_loss(*operands())
        with served("huber_loss"):
            ours.huber_loss(*operands())
        assert not fastpatch.explain(ours.huber_loss, *operands()).fast
    finally:
        monkeypatch.undo()
        from fastpatch import _native

        for entry in _switch._explicit["huber_loss"]:
            _native.set_live(entry, True)


@pytest.mark.parametrize("made", ["function", "module", "step"])
def test_explain(made: str) -> None:
    input, target = operands()
    optimizer = twins()[1]
    ours.smooth_l1_loss(input, target)
    optimizer.step()
    calls: dict[str, tuple[Any, ...]] = {
        "function": (ours.smooth_l1_loss, input, target),
        "module": (fastpatch.nn.SmoothL1Loss(), input, target),
        "step": (optimizer.step,),
    }
    explanation = fastpatch.explain(*calls[made])
    assert explanation.fast
    assert {guard.verdict for guard in explanation.guards} == {"passed"}
    with fastpatch.disabled():
        assert fastpatch.explain(*calls[made]).reason == "disabled"
    if made == "step":
        optimizer.param_groups[0]["fused"] = True
        StepLR(optimizer, 1)
        assert fastpatch.explain(optimizer.step).reason == "fused"
    else:
        assert fastpatch.explain(calls[made][0], input, target.double()).reason == "dtype"


LIBRARY = """
import json, sys, warnings, torch, fastpatch
import fastpatch.nn, fastpatch.optim
x, y = torch.ones(3, requires_grad=True), torch.zeros(3)
told = [fastpatch.explain(fastpatch.nn.SmoothL1Loss(), x, y).reason]
loaded = ["fastpatch._native" in sys.modules]
param = torch.nn.Parameter(torch.ones(2))
optimizer = fastpatch.optim.SGD([param], lr=0.5)
param.grad = torch.ones(2)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        fastpatch.nn.SmoothL1Loss()(x, y).backward()
        optimizer.step()
loaded.append("fastpatch._native" in sys.modules)
told.append(fastpatch.explain(fastpatch.nn.SmoothL1Loss(), x, y).reason)
counts = fastpatch.report().to_dict()
print(json.dumps([told, loaded, [str(w.message)[:60] for w in caught], param.tolist(),
                  [counts[name]["fast"] for name in ("smooth_l1_loss", "sgd")]]))
"""


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, [["not_built", None], [False, True], [], [0.0, 0.0], [2, 2]]),
        ({"FASTPATCH": "0"}, [["switched_off", "switched_off"], [False, False], [], [0.0, 0.0], [0, 0]]),
        ({"FASTPATCH_ONLY": "sgd"}, [["switched_off", "switched_off"], [False, True], [], [0.0, 0.0], [0, 2]]),
        ({"CXX": "/nonexistent/c++", "FASTPATCH_CACHE_DIR": ""}, None),
    ],
    ids=["plain", "off", "only", "no compiler"],
)
def test_the_library_comes_with_the_first_call(variables: dict[str, str], expected: Any, tmp_path: Any) -> None:
    import json

    if expected is None:
        variables = {**variables, "FASTPATCH_CACHE_DIR": str(tmp_path / "cache")}
        warning = "fastpatch is off, PyTorch serves every call: CXX='/nonexiste"
        expected = [["not_built", "not_built"], [False, False], [warning], [0.0, 0.0], [0, 0]]
    assert json.loads(run_text(LIBRARY, folder=tmp_path, **variables).stdout) == expected


STRICT = """
import torch, fastpatch
x = torch.ones(3)
for _ in range(2):
    try:
        fastpatch.nn.functional.huber_loss(x, x.double())
    except (fastpatch.FallbackError, fastpatch.BuildError, ValueError) as error:
        print(type(error).__name__, str(error)[:40])
"""


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"FASTPATCH_STRICT": "1"}, "FallbackError fastpatch: huber_loss can't be served (d"),
        ({"FASTPATCH_STRICT": "1", "CXX": "/nonexistent/c++"}, "BuildError CXX='/nonexistent/c++' wasn't found"),
        ({"FASTPATCH_STRICT": "so so"}, "ValueError fastpatch: FASTPATCH_STRICT='so so' must"),
    ],
    ids=["strict", "no compiler", "nonsense"],
)
def test_errors_from_the_environment(variables: dict[str, str], told: str, tmp_path: Any) -> None:
    if "CXX" in variables:
        variables = {**variables, "FASTPATCH_CACHE_DIR": str(tmp_path / "cache")}
    lines = run_text(STRICT, folder=tmp_path, **variables).stdout.splitlines()
    assert [line.startswith(told) for line in lines] == [True, True], lines


def test_memory_of_gradients_is_kept_for_it(tmp_path: Any) -> None:
    text = """
import torch, fastpatch.nn
x, y = torch.ones(1 << 20, requires_grad=True), torch.zeros(1 << 20)
for _ in range(2):
    fastpatch.nn.SmoothL1Loss()(x, y).backward()
    x.grad = None
print(fastpatch.report().kept_bytes > 0)
fastpatch.enable()
fastpatch.disable()
print(fastpatch.report().kept_bytes > 0)
"""
    assert run_text(text, folder=tmp_path).stdout == "True\nTrue\n"


PATCHED_BEFORE = """
import functools, sys, torch, torch.nn.functional as F, fastpatch
stock, seen = F.smooth_l1_loss, []

@functools.wraps(stock)
def theirs(*args, **kwargs):
    seen.append(1)
    return stock(*args, **kwargs)

F.smooth_l1_loss = theirs
step = torch.optim.SGD.step
torch.optim.SGD.step = lambda self, closure=None: seen.append(2) or step(self, closure)
import fastpatch.nn.functional as ours, fastpatch.optim
x = torch.ones(3)
ours.smooth_l1_loss(x, x)            # served
ours.smooth_l1_loss(x, x.double())   # theirs
param = torch.nn.Parameter(torch.ones(2))
param.grad = torch.ones(2)
fastpatch.optim.SGD([param], lr=0.5).step()
print(seen, param.tolist())
"""


def test_what_somebody_else_has_put_in_place_is_called(tmp_path: Any) -> None:
    assert run_text(PATCHED_BEFORE, folder=tmp_path).stdout == "[1, 2] [0.5, 0.5]\n"


def test_threads_and_names() -> None:
    assert pickle.loads(pickle.dumps(ours.huber_loss)) is ours.huber_loss
    assert copy.deepcopy(ours.huber_loss) is ours.huber_loss
    bound = twins()[1].step
    assert pickle.loads(pickle.dumps(fastpatch.optim.SGD.step)) is fastpatch.optim.SGD.step
    assert bound.__func__ is fastpatch.optim.SGD.step
    thread = threading.Thread(target=bound)
    with served("sgd", fast=2):
        thread.start()
        thread.join()


@pytest.mark.parametrize("module", [fastpatch.nn, ours, fastpatch.optim], ids=lambda module: module.__name__)
def test_examples_in_docstrings(module: Any) -> None:
    done = doctest.testmod(module, extraglobs={"torch": torch, "fastpatch": fastpatch})
    assert done.attempted
    assert not done.failed
