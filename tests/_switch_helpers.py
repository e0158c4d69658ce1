"""What the tests of scopes and of threads share: a loss call, and who served it."""

import threading

import pytest
import torch
import torch.nn.functional as F

import fastpatch
from fastpatch import is_enabled


def outer_and_inner():
    return F.smooth_l1_loss, torch._C._nn.smooth_l1_loss, F.huber_loss, torch._C._nn.huber_loss


STOCK = outer_and_inner()
X, Y = torch.tensor([0.25, -3.0, 1.0]), torch.tensor([1.0, 1.0, 1.0])
EXPECTED = torch.ops.aten.smooth_l1_loss(X, Y)


def is_restored():
    return all(now is stock for now, stock in zip(outer_and_inner(), STOCK, strict=True))


def fast_calls():
    return fastpatch.report().to_dict()["smooth_l1_loss"]["fast"]


def call():
    """Is a loss called here served by us?"""
    before = fast_calls()
    assert torch.equal(F.smooth_l1_loss(X, Y), EXPECTED)
    return fast_calls() - before == 1


@pytest.fixture(autouse=True)
def restored():
    """Every attribute is back when a test is over."""
    yield
    fastpatch.disable()
    assert not is_enabled()
    assert is_restored()


def in_thread(function):
    result = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]
