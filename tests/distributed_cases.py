"""One of two processes that train together over gloo: each case once with stock and once with fastpatch, the same
weights and momentum in every bit. Prints a line of JSON for each. Run by test_sgd_distributed.py, as a program.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fastpatch

SGD = torch.optim.SGD
STEPS = 4
CASES: dict[str, Callable[[], tuple[nn.Module, torch.optim.Optimizer]]] = {}


def case(make: Callable[[], Any]) -> Callable[[], Any]:
    CASES[make.__name__] = make
    return make


def net(a: int = 5, b: int = 9, c: int = 1) -> nn.Sequential:
    """By default of sizes that two don't divide, and a parameter of which the second process holds nothing."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, a), nn.ReLU(), nn.Linear(a, b), nn.ReLU(), nn.Linear(b, c))


def sharded(**options: Any) -> nn.Sequential:
    model = net()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


@case
def ddp() -> Any:
    model = DistributedDataParallel(net())
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


@case
def ddp_with_views_of_buckets() -> Any:
    model = DistributedDataParallel(net(), gradient_as_bucket_view=True)
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)


@case
def zero_redundancy() -> Any:
    model = DistributedDataParallel(net())
    return model, ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1, momentum=0.9)


@case
def fsdp2() -> Any:
    model = sharded()
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


@case
def fsdp2_nesterov_maximize() -> Any:
    model = sharded()
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, maximize=True)


@case
def fsdp2_without_momentum() -> Any:
    model = sharded()
    return model, SGD(model.parameters(), lr=torch.tensor(0.1), weight_decay=1e-3)


@case
def fsdp2_foreach() -> Any:
    model = sharded()
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)


@case
def fsdp2_bfloat16() -> Any:
    model = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9)


@case
def fsdp2_through_the_inner_point() -> Any:
    """A hook makes stock's step call the function `sgd`."""
    model, optimizer = fsdp2()
    optimizer.register_step_post_hook(lambda *_: None)
    return model, optimizer


@case
def tensor_parallel() -> Any:
    mesh = init_device_mesh("cpu", (2,))
    model = parallelize_module(net(6, 4, 2), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model, SGD([p for p in model.parameters() if isinstance(p, DTensor)], lr=0.1, momentum=0.9)


@case
def two_meshes() -> Any:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel()}
    model = parallelize_module(net(6, 4, 2), mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"])
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9)


@case
def replaced_shards() -> Any:
    """An optimizer of plain DTensors in a module of none, one divided and one whole in every process."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = nn.Module()
    model.a = nn.Parameter(distribute_tensor(torch.randn(6, 3), mesh, [Shard(0)]))
    model.b = nn.Parameter(distribute_tensor(torch.randn(3), mesh, [Replicate()]))
    model.forward = lambda x: (x[:, :3] @ model.a.full_tensor().T).sum(1, keepdim=True) + model.b.full_tensor().sum()
    return model, SGD([{"params": [model.a]}, {"params": [model.b], "momentum": 0}], lr=0.01, momentum=0.9)


@case
def in_two_groups() -> Any:
    """As add_param_group would refuse it: the first group makes the buffer that the second then finds."""
    model, optimizer = replaced_shards()
    optimizer.param_groups[1].update(momentum=0.9)
    optimizer.param_groups[1]["params"].append(model.a)
    return model, optimizer


class _Late(SGD):
    """Withholds the gradient of the second parameter at the first step."""

    def zero_grad(self, *args: Any) -> None:
        super().zero_grad(*args)
        self.steps = getattr(self, "steps", 0) + 1

    def step(self, closure: Any = None) -> Any:
        if self.steps == 1:
            self.param_groups[0]["params"][1].grad = None
        return super().step(closure)


@case
def late_gradient_foreach() -> Any:
    """Then stock makes one buffer and updates the other by itself, which counts versions."""
    model, _ = replaced_shards()
    return model, _Late([model.a, model.b], lr=0.01, momentum=0.9, foreach=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> None:
    for step in range(steps):
        torch.manual_seed(100 * step + dist.get_rank())
        x = torch.randn(6, 7)
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters, their gradients and momentum, with versions."""
    inner = getattr(optimizer, "optim", optimizer)
    found: list[torch.Tensor] = []
    for group in inner.param_groups:
        for param in group["params"]:
            buffer = inner.state[param].get("momentum_buffer") if param in inner.state else None
            found += [t for t in (param, param.grad, buffer) if t is not None]
    return [*found, *model.parameters()]


def differ(stock: torch.Tensor, ours: torch.Tensor) -> bool:
    if type(stock) is not type(ours) or stock._version != ours._version or stock.stride() != ours.stride():
        return True
    if isinstance(stock, DTensor):
        return stock._spec != ours._spec or differ(stock._local_tensor, ours._local_tensor)
    stock, ours = stock.detach(), ours.detach()
    return stock.dtype != ours.dtype or not torch.equal(stock.view(torch.uint8), ours.view(torch.uint8))


def compare(name: str, stock: list[torch.Tensor], ours: list[torch.Tensor]) -> None:
    same = len(stock) == len(ours) > 0 and not any(map(differ, stock, ours))
    counts = fastpatch.report().to_dict()["sgd"]
    print(json.dumps({"case": name, "same": same, **counts}), flush=True)
    fastpatch.reset_report()


def run(name: str) -> None:
    stock = CASES[name]()
    train(*stock)
    ours = CASES[name]()
    with fastpatch.enabled("sgd", strict=True):
        train(*ours)
    compare(name, tensors(*stock), tensors(*ours))


def checkpoint(folder: str) -> None:
    """Half of a training, its state written and read into a fresh optimizer, the other half."""
    results = []
    for fast in (False, True):
        with fastpatch.enabled("sgd", strict=True) if fast else fastpatch.disabled("sgd"):
            model, optimizer = fsdp2()
            train(model, optimizer)
            path = os.path.join(folder, str(fast))
            dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=path)
            fresh = SGD(model.parameters(), lr=3.0, momentum=0.5)
            state = {"optimizer": get_optimizer_state_dict(model, fresh)}
            dcp.load(state, checkpoint_id=path)
            set_optimizer_state_dict(model, fresh, state["optimizer"])
            train(model, fresh)
            results.append(tensors(model, fresh))
    compare("checkpoint", *results)


def partial_gradient() -> None:
    """A sum over the processes that is still to be made: stock makes it, or raises."""
    mesh = init_device_mesh("cpu", (2,))
    results = []
    for fast in (False, True):
        torch.manual_seed(0)
        param = nn.Parameter(distribute_tensor(torch.randn(4, 3), mesh, [Replicate()]))
        param.grad = DTensor.from_local(torch.full((4, 3), 0.3), mesh, [Partial()])
        optimizer = SGD([param], lr=0.1)
        with fastpatch.enabled("sgd") if fast else fastpatch.disabled("sgd"):
            optimizer.step()
        results.append([param])
    compare("partial_gradient", *results)


def main() -> None:
    store, rank, folder = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    torch.set_num_threads(1)
    for name in CASES:
        run(name)
    checkpoint(folder)
    partial_gradient()
    dist.destroy_process_group()


if __name__ == "__main__":
    tempfile.tempdir = sys.argv[3]
    main()
