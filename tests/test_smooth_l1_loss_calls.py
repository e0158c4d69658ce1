"""Smooth L1 in all the ways that it can be called and is served: arguments, sizes, layouts, and stock's warnings."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from _helpers import as_stock, served
from _smooth_l1_loss_helpers import CALLERS, DTYPES, TARGET, Case, by_every_caller, case, grads, pair

import fastpatch

INFINITY = float("inf")


def autocast() -> Any:
    return torch.autocast("cpu")


def of_dtypes(*dtypes: torch.dtype) -> Callable[[], Any]:
    return lambda: tuple(t.detach().to(d).requires_grad_() for t, d in zip(pair(), dtypes, strict=True))


def of_sizes(input: tuple[int, ...], target: tuple[int, ...]) -> Callable[[], Any]:
    """Both need a gradient, for who is expanded adds up what it gets."""
    return lambda: (of_size(input), of_size(target).detach().neg().requires_grad_())


def of_size(sizes: tuple[int, ...]) -> torch.Tensor:
    return torch.linspace(-2, 3, int(np.prod(sizes))).view(sizes).requires_grad_()


def with_beta(beta: Any, dtype: torch.dtype = torch.float32) -> Callable[[], Any]:
    return lambda: (*(t.detach().to(dtype).requires_grad_() for t in pair()), {"beta": beta})


def legacy(*positional: Any, **named: Any) -> Callable[[], Any]:
    return lambda: (*pair(), *positional, named)


SIZES = [
    ((4, 3), (3,)),
    ((4, 3), (1, 3)),
    ((4, 3), ()),
    ((3,), (4, 3)),
    ((), (4, 3)),
    ((4, 1), (1, 3)),
    ((2, 1, 3), (4, 1)),
    ((1,), ()),
    ((0, 3), (3,)),
    ((0,), (1,)),
    ((), (0,)),
]
ZEROS = [0, 0.0, -0.0, np.float64(0), torch.tensor(0.0), torch.tensor(-0.0), torch.tensor(0), torch.tensor(False)]
NUMBERS = [2, 0.3, np.float64(0.3), 2**53, 2.3509887e-38, 3.41e38]
TENSORS = [torch.tensor(0.3), torch.tensor(0.3, dtype=torch.float64), torch.tensor(2), torch.tensor(True)]
TENSORS += [torch.tensor(0.3, dtype=torch.bfloat16), torch.nn.Parameter(TENSORS[0], False)]

CASES = [
    case("all positional", "fast", lambda: (*pair(), None, None, "sum", 0.3), by_module=False),
    case("all named", "fast", lambda: ({"target": pair()[1], "input": pair()[0]},), by_module=False),
    *(case(f"reduction {r!r}", "fast", lambda r=r: (*pair(), {"reduction": r})) for r in ("none", "mean", "sum")),
    *(case(str(d), "fast", of_dtypes(d, d)) for d in DTYPES),
    *(case(f"autocast of {d}", "fast", of_dtypes(d, d), context=autocast) for d in DTYPES),
    *(case(f"sizes {a} and {b}", "fast", of_sizes(a, b)) for a, b in SIZES),
    case("sizes and legacy", "fast", lambda: (*of_sizes((4, 3), (3,))(), True), by_module=False),
    case("sizes and beta 0", "fast", lambda: (*of_sizes((4, 3), (3,))(), {"beta": 0}), None),
    case("an expanded row", "fast", lambda: (pair()[0], pair()[1][:1].expand(4, 3))),
    case("an expanded number", "fast", lambda: (pair()[0], torch.tensor(0.5).expand(4, 3))),
    case("an expanded input", "fast", lambda: (pair()[0].detach()[:1].expand(4, 3).requires_grad_(), pair()[1])),
    case("overlapping", "fast", lambda: (pair()[1].reshape(-1).as_strided((4, 3), (1, 1)), pair()[1])),
    case("gaps", "fast", lambda: (pair(4, 6)[0].detach()[:, ::2].requires_grad_(), pair()[1])),
    case("gaps alike", "fast", lambda: tuple(t[:, ::2] for t in pair(4, 6))),
    case("gaps between rows", "fast", lambda: tuple(t[:, 1:4] for t in pair(4, 6))),
    case("another order", "fast", lambda: (pair(4, 3)[0], pair(3, 4)[1].t())),
    *(case(f"beta {b!r}", "fast", with_beta(b), None) for b in ZEROS),
    *(case(f"beta {b!r}", "fast", with_beta(b)) for b in (*NUMBERS, *TENSORS)),
    *(case(f"beta {b!r} of {d}", "fast", with_beta(b, d)) for d in DTYPES[1:] for b in (2, 2.3509887e-38)),
    case("beta 4.46e-308 of float64", "fast", with_beta(4.46e-308, torch.float64)),
    *(case(f"size_average={v}", "fast", legacy(v), by_module=False) for v in (True, False)),
    *(case(f"reduce={v}", "fast", legacy(reduce=v, beta=0.3), by_module=False) for v in (True, False)),
    *(
        case(f"size_average={a}, reduce={b}", "fast", legacy(a, b, "none"), by_module=False)
        for a in (True, False)
        for b in (True, False)
    ),
    case("legacy arguments win", "fast", legacy(False, reduction="no reduction"), by_module=False),
]
# float32 has no such number, and so no gradient.
FLAT = [case(f"beta {b!r}", "fast", with_beta(b)) for b in (1e300, INFINITY, torch.tensor(INFINITY))]


@by_every_caller(CASES)
def test_call_is_served(caller: str, case: Case) -> None:
    result = as_stock(TARGET, lambda: case.call_by(caller), strict=True, **case.counted(caller))
    if isinstance(result.value, tuple):
        gradients = result.value[1]
        assert all(g.count_nonzero() for g in gradients) or not all(g.numel() for g in gradients)


@by_every_caller(FLAT)
def test_loss_with_a_beta_beyond_all_numbers_is_zero(caller: str, case: Case) -> None:
    output, gradients = as_stock(TARGET, lambda: case.call_by(caller), strict=True, **case.counted(caller)).value
    assert not any(t.count_nonzero() for t in (output, *gradients))


@pytest.mark.parametrize("case", CASES + FLAT, ids=lambda case: case.name)
def test_explain_says_so_and_warns_of_nothing(case: Case) -> None:
    with served(TARGET), fastpatch.enabled(TARGET), case.context():
        args, kwargs = case.make()
        assert fastpatch.explain(F.smooth_l1_loss, *args, **kwargs).fast


# --------------------------------------------------------------------------------------------------------- warnings

WARNED: dict[str, Case] = {
    "sizes": case("", "fast", of_sizes((4, 3), (3,))),
    "legacy": case("", "fast", legacy(False), by_module=False),
    "both": case("", "fast", lambda: (*of_sizes((4, 3), (3,))(), None, False), by_module=False),
}
SIZES_TEXT = "Using a target size (torch.Size([3])) that is different to the input size (torch.Size([4, 3])). "
LEGACY_TEXT = "size_average and reduce args will be deprecated, please use reduction='sum' instead."


@pytest.mark.parametrize("caller", CALLERS)
def test_warning_of_sizes_names_the_line_of_the_call(caller: str) -> None:
    case, code = WARNED["sizes"], CALLERS[caller].__code__
    ((category, text, file, line),) = as_stock(TARGET, lambda: case.call_by(caller), fast=1, strict=True).warned
    assert category is UserWarning
    assert text.startswith(SIZES_TEXT)
    if caller.endswith("module"):
        assert file.endswith("torch/nn/modules/loss.py")
    else:
        assert (file, line) == (code.co_filename, code.co_firstlineno)


@pytest.mark.parametrize("caller", ["functional", "partial", "early"])
def test_warning_of_legacy_arguments_names_the_line_that_stock_names(caller: str) -> None:
    case = WARNED["legacy"]
    ((category, text, file, _),) = as_stock(TARGET, lambda: case.call_by(caller), fast=1, strict=True).warned
    assert (category, text) == (UserWarning, LEGACY_TEXT)
    assert file == F.__file__


def test_sizes_are_warned_of_first() -> None:
    warned = as_stock(TARGET, lambda: WARNED["both"].call_by("functional"), fast=1, strict=True).warned
    assert [file for _, _, file, _ in warned] == [CALLERS["functional"].__code__.co_filename, F.__file__]


@pytest.mark.parametrize("which", WARNED)
def test_warning_as_an_exception_leaves_nothing_counted(which: str) -> None:
    def call() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return WARNED[which].call_by("functional")

    error = as_stock(TARGET, call, strict=True).error
    assert error is not None
    assert error[0] is UserWarning
    assert error[1].startswith(LEGACY_TEXT if which == "legacy" else SIZES_TEXT)


@pytest.mark.parametrize("which", ["sizes", "legacy"])
@pytest.mark.parametrize("stock_first", [True, False])
def test_warning_of_one_line_is_shown_once_whoever_serves(which: str, stock_first: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for stock in (stock_first, not stock_first):
            fast = 0 if stock else 2
            with served(TARGET, fast=fast), fastpatch.disabled() if stock else fastpatch.enabled(TARGET, strict=True):
                WARNED[which].call_by("functional")
                WARNED[which].call_by("functional")
    assert len(caught) == 1


@pytest.mark.parametrize(("which", "module"), [("sizes", "_smooth_l1_loss_helpers"), ("legacy", "torch.nn.functional")])
def test_warning_is_filtered_by_the_module_that_stock_names(which: str, module: str) -> None:
    def call() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", module=module)
            return WARNED[which].call_by("functional")

    assert as_stock(TARGET, call, fast=1, strict=True).error is None


def test_module_warns_of_legacy_arguments_when_it_is_made() -> None:
    def call() -> Any:
        module = torch.nn.SmoothL1Loss(size_average=False, beta=0.3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return module(*pair()), module.reduction

    ((_, text, _, _),) = as_stock(TARGET, call, fast=1, strict=True).warned
    assert text == LEGACY_TEXT


CHANGES: dict[str, tuple[torch.Tensor, dict[str, Any]]] = {
    "not broadcastable": (torch.ones(2, 2), {"fallback": {"shape_mismatch": 1}}),
    "another dtype": (torch.ones(4, 3, dtype=torch.float64), {"fallback": {"dtype": 1}}),
    "another size": (torch.full((5, 3), 3.0), {"fast": 1}),
    "no longer broadcast": (torch.full((3,), 3.0, dtype=torch.float16), {"fast": 1}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_handler_of_warnings_may_change_the_operands(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock warns before it computes, so it computes with what the handler leaves."""
    data, counted = CHANGES[change]

    def call() -> Any:
        input, target = (t.detach() for t in WARNED["sizes"].make()[0])
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            monkeypatch.setattr(warnings, "showwarning", lambda *_: setattr(input, "data", data))
            return F.smooth_l1_loss(input, target, reduction="none")

    as_stock(TARGET, call, **counted)


def test_handler_of_warnings_may_call_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    def call() -> Any:
        inner: list[Any] = []
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            monkeypatch.setattr(warnings, "showwarning", lambda *_: inner.append(F.smooth_l1_loss(*pair())))
            return WARNED["both"].call_by("functional"), inner

    assert len(as_stock(TARGET, call, fast=3, strict=True).value[1]) == 2


# ------------------------------------------------------------------------------------------------- kinds of operands


def test_copy_on_write_is_served_and_copies_nothing() -> None:
    def call() -> Any:
        lazy = torch._lazy_clone(pair()[1])
        output = F.smooth_l1_loss(pair()[0], lazy)
        output.backward()
        return output, torch._C._is_cow_tensor(lazy)

    assert as_stock(TARGET, call, fast=1, strict=True).value[1] is True


def test_parameters_and_buffers_are_served() -> None:
    def call() -> Any:
        input, target = torch.nn.Parameter(pair()[0].detach()), torch.nn.Buffer(pair()[1])
        F.smooth_l1_loss(input, target).backward()
        return input.grad

    as_stock(TARGET, call, fast=1, strict=True)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("beta", [0, 0.7])
def test_broadcast_is_in_the_graph_as_in_stocks(sizes: Any, beta: float) -> None:
    """Whoever differs in size from the loss is expanded, in view of autograd too."""

    def call() -> Any:
        input, target = of_sizes(*sizes)()
        output = F.smooth_l1_loss(input, target, reduction="none", beta=beta)
        node = output.grad_fn if beta else output.grad_fn.next_functions[0][0]
        names = [edge.name() for edge, _ in node.next_functions]
        assert names == [
            "torch::autograd::AccumulateGrad" if t.shape == output.shape else "ExpandBackward0" for t in (input, target)
        ]
        return output, names, grads(output, input, target)

    as_stock(TARGET, call, fast=1, strict=True)
