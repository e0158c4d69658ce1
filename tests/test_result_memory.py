"""Memory of large results of the losses: used again, bounded, given back, and never to be told from torch's own.

What takes a process of its own is in test_result_memory_processes.py.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _helpers import as_stock, assert_same, served

import fastpatch

LOSSES = ("smooth_l1_loss", "huber_loss")
TARGET = LOSSES[0]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
N = 1 << 18  # as float32 1 MiB
MIB = 1 << 20
LEAST = MIB // 2  # bytes of a result that counts as large

each_loss = pytest.mark.parametrize("name", LOSSES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def operands(n: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.linspace(-3, 4, n).to(dtype).requires_grad_(), torch.linspace(-1, 1, n).cos().to(dtype)


def gradient(
    name: str = TARGET, n: int = N, dtype: torch.dtype = torch.float32, by: float = 0.7, both: bool = False
) -> torch.Tensor:
    """A gradient of the sum, by ``by``: a large result."""
    input, target = operands(n, dtype)
    output = getattr(F, name)(input, target, reduction="sum")
    return torch.autograd.grad(output, input, torch.tensor(by, dtype=dtype))[0]


def values(name: str = TARGET, n: int = N, dtype: torch.dtype = torch.float32, by: float = 0.7) -> torch.Tensor:
    """Element-wise losses of operands that ``by`` scales: the other large result."""
    input, target = operands(n, dtype)
    return getattr(F, name)(input.detach() * by, target, reduction="none")


def kept() -> int:
    return fastpatch.report().kept_bytes


@pytest.fixture(autouse=True)
def _nothing_is_kept_before_and_after() -> Iterator[None]:
    assert kept() == 0
    yield
    fastpatch.disable()
    assert kept() == 0


# ------------------------------------------------------------------------------------------------------- used again


@each_loss
@each_dtype
@pytest.mark.parametrize("make", [gradient, values])
def test_the_next_result_lies_where_the_last_one_lay(make: Callable[..., torch.Tensor], name: str, dtype: Any) -> None:
    places = set()
    with served(name, fast=5), fastpatch.enabled(strict=True):
        for _ in range(5):
            result = make(name, dtype=dtype)
            assert kept() == 0
            places.add(result.data_ptr())
            del result
            assert kept() == N * dtype.itemsize
    assert len(places) == 1


def test_a_training_keeps_one_gradient_at_most() -> None:
    input, target = operands(N)
    optimizer = torch.optim.SGD([input], lr=0.1)
    places = set()
    with served(TARGET, fast=6), fastpatch.enabled(TARGET, strict=True):
        for _ in range(6):
            F.smooth_l1_loss(input, target).backward()
            places.add(input.grad.data_ptr())
            optimizer.step()
            optimizer.zero_grad()
            assert kept() == 4 * N
    assert len(places) == 1


def test_results_from_half_a_mebibyte_on_are_kept() -> None:
    with served(TARGET, fast=2), fastpatch.enabled(strict=True):
        values(n=LEAST // 4 - 1)
        assert kept() == 0
        values(n=LEAST // 4)
        assert kept() == LEAST


def test_only_a_result_of_the_same_size_takes_kept_memory() -> None:
    with served(TARGET, fast=3), fastpatch.enabled(strict=True):
        first, second = values(n=N), values(n=N + 16)
        place = second.data_ptr()
        del first, second
        assert kept() == 8 * N + 64
        third = values(n=N + 16)
        assert third.data_ptr() == place
        assert kept() == 4 * N


@each_loss
@each_dtype
@pytest.mark.parametrize("make", [gradient, values])
def test_nothing_of_an_earlier_result_shows(make: Callable[..., torch.Tensor], name: str, dtype: Any) -> None:
    """Also of one thread's share that ends in a tail, and of every vector width."""
    reused = []

    def call() -> list[torch.Tensor]:
        results = []
        for n in (N, N + 13):
            earlier = make(name, n, dtype, by=math.nan)
            assert earlier.isnan().all()
            place = earlier.data_ptr()
            del earlier
            results.append(make(name, n, dtype))
            reused.append(results[-1].data_ptr() == place)
        return results

    as_stock(name, call, fast=4, strict=True)
    assert reused[2:] == [True, True]


# ---------------------------------------------------------------------------------------------------------- bounded


def test_sixteen_results_at_most_are_kept_the_latest_ones() -> None:
    with served(TARGET, fast=20), fastpatch.enabled(strict=True):
        results = [values(n=LEAST // 4 + i) for i in range(20)]
        sizes = [result.nbytes for result in results]
        while results:
            del results[0]
        assert kept() == sum(sizes[-16:])


def test_128_mebibytes_at_most_are_kept() -> None:
    input = torch.zeros(10 * MIB)
    with served(TARGET, fast=5), fastpatch.enabled(strict=True):
        results = [F.smooth_l1_loss(input, input, reduction="none") for _ in range(5)]
        for count in (1, 2, 3, 3, 3):
            del results[0]
            assert kept() == count * 40 * MIB


@pytest.mark.parametrize(("more", "expected"), [(0, 128 * MIB), (1, 0)])
def test_a_larger_result_is_not_kept(more: int, expected: int) -> None:
    input = torch.zeros(128 * MIB // 8 + more, dtype=torch.float64)
    with served(TARGET, fast=1), fastpatch.enabled(strict=True):
        F.smooth_l1_loss(input, input, reduction="none")
        assert kept() == expected


def test_what_a_gradient_was_resized_to_takes_no_place_unless_it_is_large() -> None:
    with served(TARGET, fast=18), fastpatch.enabled(strict=True):
        gradient()
        for i in range(16):
            gradient().untyped_storage().resize_(4 * i)
        assert kept() == 4 * N
        gradient().untyped_storage().resize_(8 * N)
        assert kept() == 12 * N


def test_memory_that_cannot_be_had() -> None:
    def call() -> torch.Size:
        grad = gradient()
        grad.resize_(1 << 45)
        return grad.shape

    assert as_stock(TARGET, call, fast=1).error is not None
    with served(TARGET, fast=3), fastpatch.enabled(strict=True):
        one, other = gradient(), gradient()
        del other
        assert kept() == 4 * N
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            one.resize_(1 << 45)
        assert kept() == 0  # somebody needs it more
        del one
        gradient(n=2 * N)


# ------------------------------------------------------------------------------------------------------- given back


def test_the_report_says_how_much() -> None:
    def line() -> list[str]:
        return [text for text in str(fastpatch.report()).splitlines() if "memory" in text]

    with served(TARGET, fast=1), fastpatch.enabled(strict=True):
        assert fastpatch.report().kept_bytes == 0
        assert line() == []
        before = fastpatch.report()
        values(n=3 * N // 2)
        assert fastpatch.report().kept_bytes == 6 * N
        assert type(fastpatch.report().kept_bytes) is int
        assert line() == ["memory kept for the next large results: 1.5 MiB"]
        assert before.kept_bytes == 0
        fastpatch.reset_report()
        assert fastpatch.report().kept_bytes == 6 * N
        gradient()  # counted, after that reset


def test_disabling_every_loss_gives_it_back() -> None:
    fastpatch.enable()
    with served("huber_loss", fast=1):
        grad = gradient("huber_loss")
    expected = grad.clone()
    fastpatch.disable("huber_loss")
    with served(TARGET, fast=1):
        gradient(TARGET)
    assert kept() == 4 * N
    fastpatch.disable("sgd")
    assert kept() == 4 * N
    fastpatch.disable(TARGET)
    assert kept() == 0
    assert_same(grad, expected)
    del grad
    assert kept() == 0


def test_a_gradient_by_a_graph_that_outlived_disable() -> None:
    def call() -> torch.Tensor:
        input, target = operands(N)
        output = F.smooth_l1_loss(input, target)
        fastpatch.disable()
        return torch.autograd.grad(output, input)[0]

    expected = call()
    fastpatch.enable()
    with served(TARGET, fast=1):
        grad = call()
    assert_same(grad, expected)
    fastpatch.enable("sgd")  # keeps nothing
    del grad
    assert kept() == 0


def test_scopes_keep_as_long_as_any_is_open() -> None:
    def outlived() -> torch.Tensor:
        with fastpatch.enabled("huber_loss"), fastpatch.enabled(TARGET):
            gradient()
            assert kept() == 4 * N
            return gradient(by=0.3)

    expected = gradient(by=0.3)
    with served(TARGET, fast=3):
        with fastpatch.enabled(TARGET):
            gradient()
            with fastpatch.disabled(), fastpatch.enabled("sgd"):
                assert kept() == 4 * N
            grad = outlived()
            assert kept() == 0
        assert_same(grad, expected)
        del grad
        assert kept() == 0


def test_a_scope_within_an_enabled_process_gives_nothing_back() -> None:
    fastpatch.enable(TARGET)
    with served(TARGET, fast=1):
        with fastpatch.enabled("huber_loss"), fastpatch.enabled(TARGET):
            gradient()
        assert kept() == 4 * N


# ------------------------------------------------------------------------------------- not to be told from torch's own

Make = Callable[[], torch.Tensor]


def resized(make: Make) -> Any:
    grad = make()
    begin = grad.resize_(2 * N)[:N].clone()
    return begin, grad.resize_(10), grad.untyped_storage().nbytes()


def storage_resized(make: Make) -> Any:
    grad = make()
    storage = grad.untyped_storage()
    storage.resize_(8 * N)
    grown = grad.clone(), storage.nbytes(), storage.resizable()
    storage.resize_(0)
    emptied = storage.nbytes(), storage.data_ptr()
    storage.resize_(4 * N)
    return grown, emptied, grad.fill_(3)


def shared(make: Make) -> Any:
    grad = make()
    before = grad.is_shared(), grad.is_pinned()
    return before, grad.share_memory_().is_shared(), grad.add_(1)


def saved(make: Make) -> Any:
    file = io.BytesIO()
    torch.save(make(), file)
    file.seek(0)
    return torch.load(file)


def pickled(make: Make) -> Any:
    return pickle.loads(pickle.dumps(make()))


def copied(make: Make) -> Any:
    grad = make()
    return copy.deepcopy(grad), copy.copy(grad), grad.clone(), grad.untyped_storage().clone().nbytes()


def as_array(make: Make) -> Any:
    array = make().numpy()
    make().zero_()  # would be in the array's memory if that had been given back
    return torch.from_numpy(array)


def by_dlpack(make: Make) -> Any:
    other = torch.from_dlpack(make())
    make().zero_()
    return other


def by_storage(make: Make) -> Any:
    view = torch.empty(0).set_(make().untyped_storage())
    make().zero_()
    return view, make().set_(torch.zeros(3).untyped_storage())


def swapped(make: Make) -> Any:
    grad, other = make(), torch.zeros(N)
    torch.utils.swap_tensors(grad, other)
    grad.data, other.data = other.data, grad.data
    return grad, other


OPERATIONS = {resized: 1, storage_resized: 1, shared: 1, saved: 1, pickled: 1, copied: 1, swapped: 1}
OPERATIONS |= {as_array: 2, by_dlpack: 2, by_storage: 3}


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_a_gradient_is_a_tensor_like_any_other(operation: Callable[[Make], Any]) -> None:
    as_stock(TARGET, lambda: operation(gradient), fast=OPERATIONS[operation], strict=True)


def test_the_profiler_of_memory() -> None:
    """Sees memory where it comes from the system, not where it is used again."""
    input, target = operands(N)
    with served(TARGET, fast=3), fastpatch.enabled(TARGET, strict=True):
        with torch.profiler.profile(profile_memory=True, record_shapes=True) as profile:
            grads = [torch.autograd.grad(F.smooth_l1_loss(input, target), input)[0] for _ in range(2)]
            del grads[0]
            grads += torch.autograd.grad(F.smooth_l1_loss(input, target), input)
        events = [event for event in profile.events() if event.name == "fastpatch::smooth_l1_loss_backward"]
        assert [event.self_cpu_memory_usage for event in events] == [4 * N, 4 * N, 0]
    assert_same(*grads)


# ---------------------------------------------------------------------------------------------------------- threads

SIZES = [N // 2 + 17 * i for i in range(5)]


def test_threads_that_make_and_free_results_at_once() -> None:
    """Freed by other threads than those that made them."""
    expected = {n: gradient(n=n) for n in SIZES}
    queue: SimpleQueue[tuple[int, torch.Tensor] | None] = SimpleQueue()
    wrong: list[int] = []

    def make(k: int) -> None:
        for i in range(30):
            n = SIZES[(i * k + i) % len(SIZES)]
            queue.put((n, gradient(n=n)))

    def free() -> None:
        while (item := queue.get()) is not None:
            n, grad = item
            if not torch.equal(grad, expected[n]):
                wrong.append(n)

    fastpatch.enable(TARGET, strict=True)
    with served(TARGET, fast=90):
        makers = [threading.Thread(target=make, args=(k,)) for k in range(3)]
        freers = [threading.Thread(target=free) for _ in range(2)]
        for thread in makers + freers:
            thread.start()
        for thread in makers:
            thread.join()
        for _ in freers:
            queue.put(None)
        for thread in freers:
            thread.join()
    assert wrong == []
    assert kept() <= 128 * MIB


def test_threads_that_make_and_free_results_while_it_is_turned_on_and_off() -> None:
    expected = {n: gradient(n=n) for n in SIZES}
    wrong: list[int] = []
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            wrong.extend(n for n in SIZES if not torch.equal(gradient(n=n), expected[n]))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    while fastpatch.report().to_dict()[TARGET]["fast"] < 60:
        fastpatch.enable(TARGET)
        done.wait(0.005)
        fastpatch.disable()
    done.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert kept() == 0
