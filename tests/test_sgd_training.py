"""Whole trainings that people write with SGD: tied weights, sparse embeddings, layers that thaw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _sgd_helpers import assert_same, counts, params_of, served, values

import fastpatch

SGD = torch.optim.SGD
Training = Callable[[], list[Any]]


def both(training: Training, fast: int, **fallback: int) -> None:
    """The same results with and without fastpatch, which served so many."""
    with fastpatch.disabled(), served():
        expected = training()
    with fastpatch.enabled("sgd", strict=not fallback), served(fast, **fallback):
        got = training()
    assert_same(expected, got)
    moving = [result for result in got if isinstance(result, torch.Tensor)]
    assert moving and all(a.isfinite().all() and a.any() for a in map(torch.Tensor.to_dense, moving)), (
        "nothing was trained"
    )


def seeded(module: torch.nn.Module) -> Any:
    """Its parameters filled with known numbers."""
    with torch.no_grad():
        for seed, param in enumerate(module.parameters()):
            param.copy_(values(param.shape, seed, 0).to(param.dtype))
    return module


def buffers_of(optimizer: Any) -> list[torch.Tensor]:
    return [state["momentum_buffer"] for state in optimizer.state.values()]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"foreach": True},
    {"foreach": True, "nesterov": True},
    {"lr": torch.tensor(0.1, dtype=torch.float64)},
    {"nesterov": True, "weight_decay": 1e-4},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tied_weights_accumulation_and_clipping(options: dict[str, Any], dtype: torch.dtype) -> None:
    def training() -> list[Any]:
        embedding = seeded(torch.nn.Embedding(7, 5, dtype=dtype))
        head = torch.nn.Linear(5, 7, bias=False, dtype=dtype)
        head.weight = embedding.weight
        optimizer = SGD({*embedding.parameters(), *head.parameters()}, **{"lr": 0.1, "momentum": 0.9, **options})
        norms = []
        for step in range(3):
            optimizer.zero_grad()
            for part in range(2):
                out = head(embedding(torch.tensor([step, part, 6])))
                F.smooth_l1_loss(out, torch.zeros_like(out), beta=0.1).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(embedding.parameters(), 0.5))
            optimizer.step()
        return [embedding.weight, *norms, *buffers_of(optimizer)]

    both(training, 3)


@pytest.mark.parametrize("momentum", [0, 0.9])
@pytest.mark.parametrize("foreach", [None, True])
def test_a_sparse_embedding_beside_dense_layers(foreach: bool | None, momentum: float) -> None:
    def training() -> list[Any]:
        model = seeded(torch.nn.Sequential(torch.nn.Embedding(7, 5, sparse=True), torch.nn.Linear(5, 3)))
        optimizer = SGD(model.parameters(), lr=0.1, momentum=momentum, foreach=foreach)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.tensor([step, 6, 6])).square().mean().backward()
            optimizer.step()
        return [*model.parameters(), *buffers_of(optimizer)]

    both(training, 0 if foreach else 6, sparse_grad=3)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_layers_that_thaw_with_groups_of_their_own(options: dict[str, Any]) -> None:
    """Fine-tuning: late first gradients, a group added on the way, a rate for each."""

    def training() -> list[Any]:
        body, head = seeded(torch.nn.Linear(5, 4)), seeded(torch.nn.Linear(4, 3))
        body.requires_grad_(False)
        optimizer = SGD(head.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})
        for step in range(5):
            if step == 2:
                body.requires_grad_(True)
                optimizer.add_param_group({"params": body.parameters(), "lr": 0.01, "weight_decay": 0.1})
            if step == 4:
                head.bias.requires_grad_(False)
            optimizer.zero_grad()
            head(body(values((6, 5), step, 0))).square().mean().backward()
            optimizer.step()
        return [*body.parameters(), *head.parameters(), *buffers_of(optimizer)]

    both(training, 2 + 2 + 4 + 4 + 3)


def test_a_zeroed_gradient_moves_its_parameter_and_none_does_not() -> None:
    def training() -> list[Any]:
        results = []
        for to_none in (False, True):
            model = seeded(torch.nn.Linear(5, 3))
            optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
            model(torch.ones(2, 5)).sum().backward()
            for _ in range(3):
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
            results += [model.weight, model.bias]
        assert not torch.equal(results[0], results[2])
        return results

    both(training, 3 * 2 + 2)


def test_half_a_model_in_each_dtype() -> None:
    """Mixed precision by hand: a body in bfloat16, a head in float32, in one group."""

    def training() -> list[Any]:
        body, head = seeded(torch.nn.Linear(5, 4, dtype=torch.bfloat16)), seeded(torch.nn.Linear(4, 3))
        optimizer = SGD([*body.parameters(), *head.parameters()], lr=0.1, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad()
            head(body(values((6, 5), step, 0).bfloat16()).float()).square().mean().backward()
            optimizer.step()
        return [*body.parameters(), *head.parameters(), *buffers_of(optimizer)]

    both(training, 12)


# --------------------------------------------------------------------------------------------------------- neighbours


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.ASGD, torch.optim.Adagrad])
@pytest.mark.parametrize("foreach", [None, True])
def test_other_optimizers_never_come_to_us(foreach: bool | None, cls: Any) -> None:
    results = []
    for scope in (fastpatch.disabled, fastpatch.enabled):
        model = seeded(torch.nn.Linear(5, 3))
        optimizer = cls(model.parameters(), lr=0.1, foreach=foreach)
        before = counts()
        with scope():
            for step in range(2):
                optimizer.zero_grad()
                model(values((6, 5), step, 0)).square().mean().backward()
                optimizer.step()
        assert counts() == before
        results.append(params_of(optimizer))
    assert_same(*results)


def test_the_class_shows_no_new_names() -> None:
    names = [name for cls in SGD.__mro__ for name in vars(cls)]
    with fastpatch.enabled("sgd"):
        assert [name for cls in SGD.__mro__ for name in vars(cls)] == names
