"""run: draws cases, compares each, shrinks what differs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import fastpatch

from ._case import Case
from ._comparison import Comparison
from ._outcome import Difference, Outcome, Row

EXAMPLES = 150
_BATCH = 25  # of one seed: after ten examples hypothesis goes on with variations of them
_KINDS = ("float32", "float64", "bfloat16", "float16")  # in this order, "mixed" last

Progress = Callable[[str], None]


class _Differs(Exception):
    """Tells hypothesis that a case differs."""


def run(
    device: str = "cpu",
    *,
    examples: int = EXAMPLES,
    targets: str | Sequence[str] = (),
    seed: int | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Draws calls, runs each with stock PyTorch and with fastpatch, and compares every bit of what can be seen.

    On CUDA a mean or a sum of a loss need not be equal, but within its bound, and two runs of fastpatch must be equal.
    What differs first of a target is made as small as hypothesis can make it, which may take minutes.

    Patches, switches, the number of threads and the state of random generators are afterwards as they were. Only the
    counters of ``fastpatch.report()``, by which this proves who served a call, have moved: ``fastpatch.reset_report()``
    sets them to zero. (And hypothesis makes its folder, ``.hypothesis`` or ``$HYPOTHESIS_STORAGE_DIRECTORY``.) While it
    runs, no other thread may use the targets, whose calls would be counted with its own.

    Args:
        device: ``"cpu"``, ``"cuda"`` or a certain one, as ``"cuda:1"``.
        examples: how many calls, or SGDs of a few steps, are drawn for each target.
        targets: names out of ``fastpatch.targets()``, or one; none means all.
        seed: draws the same again; None takes another one each time.
        progress: is called with a line of text now and then.

    Raises:
        ValueError: an unknown target, no such device, fewer than one example, a negative seed.
        TypeError: ``examples`` or ``seed`` is no int, ``targets`` no sequence.
        ModuleNotFoundError: hypothesis is not installed.
        BuildError: the native library can't be had, or failed its own first test.
        RuntimeError: a target is off, whatever asks for it.

    Example:
        >>> outcome = run(examples=20, targets=("sgd",))
        >>> outcome.is_equal
        True
    """
    names = _checked_targets(targets)
    device = _checked_device(device)
    _check_number("examples", examples, 1)
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    _check_number("seed", seed, 0)
    from .strategies import CASES

    _check_ready(names)
    start = time.monotonic()
    rows: list[Row] = []
    differences = []
    for name in names:
        hunt = _Hunt(name, device, progress or (lambda text: None))
        found = hunt.run(CASES[name](), examples, random.Random(f"{seed} {name}"))
        rows += sorted(hunt.rows.values(), key=lambda row: (*_KINDS, row.kind).index(row.kind))
        differences += [found] if found else []
    return Outcome(device, seed, time.monotonic() - start, tuple(rows), tuple(differences))


class _Hunt:
    """The search for a difference in one target."""

    def __init__(self, target: str, device: str, progress: Progress) -> None:
        self.rows: dict[str, Row] = {}
        self._target = target
        self._device = device
        self._progress = progress
        self._found: Difference | None = None

    def run(self, cases: Any, examples: int, seeds: random.Random) -> Difference | None:
        import hypothesis
        from hypothesis import HealthCheck, Phase, Verbosity

        for done in range(0, examples, _BATCH):
            self._progress(f"{self._target}: {done} of {examples}")
            settings = hypothesis.settings(
                max_examples=min(_BATCH, examples - done),
                phases=[Phase.generate, Phase.shrink],
                verbosity=Verbosity.quiet,
                suppress_health_check=list(HealthCheck),
                database=None,
                deadline=None,
                derandomize=False,
                report_multiple_bugs=False,
                print_blob=False,
            )
            check = settings(hypothesis.given(cases)(self._check))  # type: ignore[no-untyped-call]
            check = hypothesis.seed(seeds.getrandbits(64))(check)
            try:
                check()
            except _Differs:
                return self._found
            except hypothesis.errors.Flaky:
                assert self._found is not None
                return Difference(self._found.case, self._device, self._found.text, repeats=False)
        return None

    def _check(self, case: Case) -> None:
        made = case.compare(self._device)
        text = made.difference
        if text is None and made.fast + sum(made.fallback.values()) < case.least_units:
            text = "no patch point saw it, by fastpatch's counters"
        if self._found is None:
            self._count(case, made)
        if text is not None:
            self._progress(f"{self._target}: a difference; looking for a smaller one")
            self._found = Difference(case, self._device, text)
            raise _Differs(text)

    def _count(self, case: Case, made: Comparison) -> None:
        row = self.rows.setdefault(case.kind, Row(case.target, case.kind))
        row.compared += 1
        row.fast += made.fast
        row.fallback.update(made.fallback)


def _checked_targets(targets: str | Sequence[str]) -> tuple[str, ...]:
    """The names in the order of ``fastpatch.targets()``."""
    known = fastpatch.targets()
    if not isinstance(targets, Sequence):
        raise TypeError(f"fastpatch.testing.run: targets must be a sequence of names, not {targets!r}")
    chosen = (targets,) if isinstance(targets, str) else targets
    for name in chosen:
        if name not in known:
            valid = ", ".join(map(repr, known))
            raise ValueError(f"fastpatch.testing.run: unknown target {name!r}; targets are {valid}")
    return tuple(name for name in known if name in chosen) or known


def _checked_device(device: str) -> str:
    """The device's full name."""
    known = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if device == "cuda" and len(known) > 1:
        return f"cuda:{torch.cuda.current_device()}"
    if device not in known:
        valid = ", ".join(map(repr, known))
        raise ValueError(f"fastpatch.testing.run: no such device {device!r}; devices are {valid}")
    return device


def _check_number(name: str, number: Any, least: int) -> None:
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"fastpatch.testing.run: {name} must be an int of at least {least}, not {number!r}")
    if number < least:
        raise ValueError(f"fastpatch.testing.run: {name} must be at least {least}, not {number}")


def _check_ready(names: tuple[str, ...]) -> None:
    with fastpatch.enabled(*names, strict=True):
        if off := [name for name in names if not fastpatch.is_enabled(name)]:
            raise RuntimeError(f"fastpatch.testing.run: {', '.join(map(repr, off))} can't be turned on here")
