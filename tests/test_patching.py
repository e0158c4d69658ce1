"""The patch points: what replaces an attribute looks like the original, travels like it, and comes off again."""

import copy
import functools
import inspect
import itertools
import pickle
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from _scripts import run_text

import fastpatch

SGD = torch.optim.SGD
sgd_module = sys.modules["torch.optim.sgd"]
SGD([torch.zeros(1)], lr=0.1)  # from here on SGD.step is hooked by torch; test_patching_step has the other case

POINTS = {
    "torch.nn.functional.smooth_l1_loss": (F, "smooth_l1_loss"),
    "torch._C._nn.smooth_l1_loss": (torch._C._nn, "smooth_l1_loss"),
    "torch.nn.functional.huber_loss": (F, "huber_loss"),
    "torch._C._nn.huber_loss": (torch._C._nn, "huber_loss"),
    "torch.optim.SGD.step": (SGD, "step"),
    "torch.optim.sgd.sgd": (sgd_module, "sgd"),
}
STOCK = {qualified: vars(owner)[name] for qualified, (owner, name) in POINTS.items()}


@pytest.fixture(params=POINTS)
def point(request):
    """(proxy, stock) of each patch point, while patched."""
    fastpatch.enable()
    owner, name = POINTS[request.param]
    proxy, stock = vars(owner)[name], STOCK[request.param]
    assert proxy is not stock
    return proxy, stock


def current():
    return {qualified: vars(owner)[name] for qualified, (owner, name) in POINTS.items()}


def patched():
    """The names whose attribute is not the very object it was."""
    return {qualified for qualified, value in current().items() if value is not STOCK[qualified]}


def loss_counts():
    return fastpatch.report().to_dict()["smooth_l1_loss"]


# ------------------------------------------------------------------------------------------------ looks like stock


def test_proxy_looks_like_stock(point):
    proxy, stock = point
    assert repr(proxy) == repr(stock)
    assert str(proxy) == str(stock)
    for name in ("__doc__", "__name__", "__qualname__", "__module__"):
        assert getattr(proxy, name) == getattr(stock, name)
    assert hash(proxy) == hash(stock)
    assert proxy == stock
    assert stock == proxy
    assert (proxy != stock) is False
    assert proxy != len
    assert {stock: "found"}[proxy] == "found"
    assert isinstance(proxy, type(stock))
    assert isinstance(stock, types.FunctionType) == isinstance(proxy, types.FunctionType)
    assert callable(proxy)


def test_proxy_answers_inspect_like_stock(point):
    proxy, stock = point
    if isinstance(stock, types.BuiltinFunctionType):
        with pytest.raises(ValueError, match="no signature found"):
            inspect.signature(proxy)
    else:
        assert inspect.signature(proxy) == inspect.signature(stock)
        assert inspect.getsource(proxy) == inspect.getsource(stock)
    assert inspect.isroutine(proxy)
    assert inspect.isfunction(proxy) == inspect.isfunction(stock)


def test_users_wrapper_looks_like_one_around_stock(point):
    proxy, stock = point

    @functools.wraps(proxy)
    def wrapper():
        pass

    assert wrapper.__name__ == stock.__name__
    assert wrapper.__wrapped__ == stock


# -------------------------------------------------------------------------------------------------- copies, pickles


def test_copies_are_the_object_itself_as_for_functions(point):
    proxy, _ = point
    assert copy.copy(proxy) is proxy
    assert copy.deepcopy(proxy) is proxy
    assert copy.deepcopy({"loss": [proxy]})["loss"][0] is proxy


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_as_the_name(point, protocol):
    proxy, stock = point
    data = pickle.dumps(proxy, protocol)
    assert b"fastpatch" not in data
    assert b"wrapt" not in data
    assert pickle.loads(data) is proxy
    fastpatch.disable()
    assert pickle.loads(data) is stock


def test_partial_pickles_and_serves():
    fastpatch.enable()
    partial = functools.partial(F.smooth_l1_loss, reduction="sum")
    loaded = pickle.loads(pickle.dumps(partial))
    x, y = torch.tensor([0.25, -3.0]), torch.tensor([1.0, 1.0])
    assert torch.equal(loaded(x, y), torch.ops.aten.smooth_l1_loss(x, y, 2))
    assert loss_counts() == {"fast": 1, "fallback": {}}
    fastpatch.disable()
    assert pickle.loads(pickle.dumps(partial)).func is STOCK["torch.nn.functional.smooth_l1_loss"]


def test_module_that_keeps_the_function_pickles():
    fastpatch.enable()
    module = torch.nn.Linear(2, 1)
    module.criterion = F.smooth_l1_loss
    assert copy.deepcopy(module).criterion is module.criterion
    assert pickle.loads(pickle.dumps(module)).criterion is module.criterion


def test_bound_step_pickles_with_its_optimizer():
    fastpatch.enable()
    step = pickle.loads(pickle.dumps(SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5).step))
    param = step.__self__.param_groups[0]["params"][0]
    param.grad = torch.ones(2)
    step()
    assert param.tolist() == [0.5, 0.5]
    assert fastpatch.report().to_dict()["sgd"] == {"fast": 1, "fallback": {}}


LOAD_WITHOUT = """
import pickle, sys
sys.modules["fastpatch"] = None  # an import raises ModuleNotFoundError
import torch, torch.optim.sgd, torch.nn.functional as F
expected = {
    "torch.nn.functional.smooth_l1_loss": F.smooth_l1_loss,
    "torch._C._nn.smooth_l1_loss": torch._C._nn.smooth_l1_loss,
    "torch.nn.functional.huber_loss": F.huber_loss,
    "torch._C._nn.huber_loss": torch._C._nn.huber_loss,
    "torch.optim.SGD.step": torch.optim.SGD.step,
    "torch.optim.sgd.sgd": sys.modules["torch.optim.sgd"].sgd,
}
with open(sys.argv[1], "rb") as file:
    pickles = pickle.load(file)
for (name, protocol), data in pickles.items():
    assert pickle.loads(data) is expected[name], (name, protocol)
print(len(pickles))
"""


def test_pickles_load_where_fastpatch_is_not_installed(tmp_path):
    fastpatch.enable()
    protocols = range(pickle.HIGHEST_PROTOCOL + 1)
    pickles = {
        (name, p): pickle.dumps(proxy, p) for (name, proxy), p in itertools.product(current().items(), protocols)
    }
    file = tmp_path / "pickles"
    file.write_bytes(pickle.dumps(pickles))
    assert run_text(LOAD_WITHOUT, str(file), folder=tmp_path).stdout == f"{len(POINTS) * len(protocols)}\n"


# --------------------------------------------------------------------------------------------------------- coming off


@pytest.mark.parametrize("order", list(itertools.permutations(["enable", "enable sgd", "disable", "disable sgd"])))
def test_comes_off_whole(order):
    for action in order:
        function, *names = action.split()
        getattr(fastpatch, function)(*names)
    fastpatch.disable("sgd")
    fastpatch.disable("smooth_l1_loss")
    fastpatch.disable("huber_loss")
    assert not patched()


def test_one_target_leaves_the_others_attributes_alone():
    fastpatch.enable("sgd")
    assert patched() == {"torch.optim.SGD.step", "torch.optim.sgd.sgd"}
    fastpatch.disable("sgd")
    for loss in ("smooth_l1_loss", "huber_loss"):
        fastpatch.enable(loss)
        assert patched() == {f"torch.nn.functional.{loss}", f"torch._C._nn.{loss}"}
        fastpatch.disable(loss)


def test_proxy_kept_after_disable_passes_to_stock_and_serves_again():
    fastpatch.enable()
    kept = F.smooth_l1_loss
    x, y = torch.ones(5), torch.zeros(5)
    fastpatch.disable()
    assert kept(x, y).item() == 0.5
    assert kept(x.double(), y.double()).item() == 0.5
    assert loss_counts() == {"fast": 0, "fallback": {}}
    fastpatch.enable()
    assert F.smooth_l1_loss is kept
    assert kept(x, y).item() == 0.5
    assert loss_counts() == {"fast": 1, "fallback": {}}
