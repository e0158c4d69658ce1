"""enable and disable: which targets are on, for the process and here and now.

Two things decide: a switch for the process, and scopes (``_scope``), a context variable's stack of lists with one
switch for each target, read in C at every call. A target's patch points are in place while its process switch is on
or any scope that turns it on is open, anywhere.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from . import _build, _environment, _verify
from ._errors import BuildError, FallbackError, NativeBuildWarning, warn_user
from ._locks import fork_safe
from ._proof import OFF, ON, STRICT, differences_on, differs, scopes
from .targets import TARGETS

_log = logging.getLogger("fastpatch")

NAMES = tuple(TARGETS)

# The set-up has a lock of its own: it waits for a thread in which a scope may end (that of a generator which is
# collected there), and that needs the other.
_lock = fork_safe(threading.RLock)
_set_up_lock = fork_safe(threading.RLock)
_process: dict[str, int] = dict.fromkeys(NAMES, OFF)
_process_verify: dict[str, float] = dict.fromkeys(NAMES, 0.0)
_open_scopes: dict[str, int] = dict.fromkeys(NAMES, 0)  # those that turn the target on
_explicit: dict[str, list[Any]] = {name: [] for name in NAMES}  # the builtins that serve without a patch point
_unfit: dict[str, str] = {}  # targets whose proof failed, and what differed
_fit: set[str] = set()
_proven_on: set[tuple[str, int]] = set()  # targets and CUDA devices
_is_set_up = False
_build_failure: str | None = None
_warned: set[str] = set()
first_lines: dict[tuple[str, str], str] = {}  # of a target's fallbacks for a reason, in the user's code


def targets() -> tuple[str, ...]:
    """The names of all targets: ``("smooth_l1_loss", "huber_loss", "sgd")``."""
    return NAMES


def enable(*targets: str, strict: bool = False, verify: float = 0.0) -> None:
    """Turns targets on for the whole process; again is the same as once.

    The environment variables ``FASTPATCH``, ``FASTPATCH_ONLY``, ``FASTPATCH_STRICT`` and ``FASTPATCH_VERIFY`` have the
    last word: what they leave out stays off, even if it is named here.

    The first call builds the native library if the cache has none for this torch (it says so on stderr, and takes
    about a minute), and proves of each target that the compiled path serves and equals stock bit for bit. A target
    that can't be turned on is left to stock, with a warning that says why.

    Args:
        targets: names out of ``fastpatch.targets()``; none means all.
        strict: a call that reaches a patch point and can't be served raises ``FallbackError`` instead of falling back,
            and a failing build raises ``BuildError`` instead of warning. For a step this happens before anything is
            written; only with a closure, or a ``step`` taken before ``enable()``, earlier parameter groups are updated
            by then. The last ``enable`` of a target decides.
        verify: the share of served calls, from 0 to 1, that PyTorch runs too, on copies, to compare every bit (of a
            mean or sum on a GPU: whether it is within its bound). If one differs, the call gets PyTorch's result, the
            target is off for the rest of the process, and a ``DifferenceWarning`` names a script that reproduces it.
            Costs nothing when 0; a checked call takes several times as long, and memory for two copies of its tensors.

    Raises:
        ValueError: an unknown target, ``verify`` outside its range, or an environment variable of ours with a value
            that means nothing.
        TypeError: ``strict`` or ``verify`` of another type.
        BuildError: with ``strict``, if the native library can't be had.

    Example:
        >>> import fastpatch
        >>> fastpatch.enable()
    """
    names = checked("enable", targets)
    check_strict("enable", strict)
    check_verify("enable", verify)
    names, strict, verify = granted(names, strict, verify)
    if len(names) < len(targets) or not names:
        _log_forbidden(targets or NAMES)
    fit = ready(names, strict)
    with _lock:
        for name in fit:
            _process[name] = STRICT if strict else ON
            _process_verify[name] = verify
        if fit:
            want_verification(verify)
            _apply(fit)
            options = " (strict)" * strict + f" (verify {verify:g})" * (verify > 0)
            _log.info("%s on%s", ", ".join(fit), options)


def disable(*targets: str) -> None:
    """Turns targets off for the whole process; the last one out puts every replaced attribute back.

    Scopes that are open elsewhere (``with fastpatch.enabled()``) keep theirs until they end.

    Args:
        targets: names out of ``fastpatch.targets()``; none means all.

    Raises:
        ValueError: an unknown target.
    """
    names = checked("disable", targets)
    with _lock:
        on = tuple(name for name in names if _process[name] != OFF)
        for name in on:
            _process[name] = OFF
        if on:
            _apply(on)


def is_enabled(target: str | None = None) -> bool:
    """Would the compiled implementation be tried here and now: in this thread, task and scope?

    Args:
        target: one name, or None to ask whether any target is on.

    Raises:
        ValueError: an unknown target.
    """
    names = NAMES if target is None else checked("is_enabled", (target,))
    return any(switch_here(name) >= ON for name in names)


def switch_here(name: str, explicitly: bool = False) -> int:
    """The switch that decides for a target in this context, also of what is called explicitly."""
    if not _is_set_up or name in _unfit:
        return OFF
    from . import _native

    return _native.get_switch(name, ON if explicitly else OFF)


def is_set_up() -> bool:
    """Is the native library loaded?"""
    return _is_set_up


def failure(name: str) -> str | None:
    """Why a target could not be turned on, if that was tried."""
    return _unfit.get(name, _build_failure)


def failed_self_test(name: str) -> bool:
    """Is it the target's self-test that failed, or a verified call that differed, rather than the build?"""
    return name in _unfit


def passed_self_test(name: str) -> bool:
    """Has the target been proven? Not before it was first asked for."""
    return name in _fit


def checked(function: str, names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if not isinstance(name, str) or name not in TARGETS:
            valid = ", ".join(repr(known) for known in NAMES)
            raise ValueError(f"fastpatch.{function}: unknown target {name!r}; targets are {valid}")
    return names or NAMES


def check_strict(function: str, strict: bool) -> None:
    if not isinstance(strict, bool):
        raise TypeError(f"fastpatch.{function}: strict must be True or False, not {strict!r}")


def check_verify(function: str, verify: float) -> None:
    text = f"fastpatch.{function}: verify must be a number from 0 to 1, the share of calls to check, not {verify!r}"
    if isinstance(verify, bool) or not isinstance(verify, (int, float)):
        raise TypeError(text)
    if not 0 <= verify <= 1:
        raise ValueError(text)


def granted(names: tuple[str, ...], strict: bool, verify: float) -> tuple[tuple[str, ...], bool, float]:
    """What the environment leaves, or makes, of a request to turn targets on."""
    settings = _environment.read(NAMES)
    left = tuple(name for name in names if settings.forbids(name) is None)
    return left, strict or settings.strict, verify if settings.verify is None else settings.verify


def want_verification(rate: float) -> None:
    """Before a rate is in force anywhere: until then the native library doesn't look for one."""
    if rate > 0:
        from . import _native

        _native.want_verification()


def leave_to_stock(name: str, why: str) -> bool:
    """Takes a target off for the rest of the process, in every scope. False if that had been done."""
    with _lock:
        if name in _unfit:
            return False
        _fit.discard(name)
        _unfit[name] = why
        _warned.add(why)  # the caller says it
        _process[name] = OFF
        _apply((name,))
        return True


def forbidden(name: str) -> str | None:
    """Why the environment keeps a target off; None if it doesn't."""
    return _environment.read(NAMES).forbids(name)


def _log_forbidden(names: tuple[str, ...]) -> None:
    _log.info("%s", "; ".join(dict.fromkeys(filter(None, map(forbidden, names)))))


def hold(names: tuple[str, ...], change: int) -> None:
    """Counts a scope (+1 when it opens, -1 when it ends) among those that want the targets patched."""
    if not names:  # perhaps there is no native library
        return
    with _lock:
        for name in names:
            _open_scopes[name] += change
        _apply(names)


def ready_explicitly(name: str, make_entry: Callable[[], Any]) -> Any | None:
    """A builtin that serves whoever calls it, as long as no scope turns its target off; None where stock has to.

    Raises:
        ValueError: an environment variable of ours has a value that means nothing.
        BuildError: with ``FASTPATCH_STRICT``, if the native library can't be had.
    """
    names, strict, verify = granted((name,), False, 0.0)
    if not names:
        _log_forbidden((name,))
    if not ready(names, strict):
        return None
    from . import _native

    with _lock:
        entry = make_entry()
        _native.set_least(entry, STRICT if strict else ON)
        _native.set_live(entry, True)
        _explicit[name].append(entry)
        if verify > 0:
            _process_verify[name] = verify
            want_verification(verify)
        _apply((name,))
    return entry


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warn_user(text, NativeBuildWarning)


def ready(names: tuple[str, ...], strict: bool) -> tuple[str, ...]:
    """Those of the targets that the native library serves here; loads (or builds) it, and proves them."""
    if not names:  # nothing is built for nothing
        return ()
    with _set_up_lock:
        return _ready(names, strict)


def _ready(names: tuple[str, ...], strict: bool) -> tuple[str, ...]:
    global _build_failure
    try:
        _set_up()
    except BuildError as error:
        _build_failure = error.message
        if strict:
            raise
        _warn_once(f"fastpatch is off, PyTorch serves every call: {error.message}")
        return ()
    for name in names:
        if name not in _fit and name not in _unfit:
            difference = differs(TARGETS[name])
            if difference is None:
                _fit.add(name)
            else:
                _unfit[name] = f"fastpatch leaves {name!r} to PyTorch, since its self-test failed: {difference}"
        if name in _unfit:
            if strict:
                raise BuildError(_unfit[name])
            _warn_once(_unfit[name])
    return tuple(name for name in names if name in _fit)


def _set_up() -> None:
    global _is_set_up
    if not _is_set_up:
        native = _build.load()
        verify = partial(_verify.begin, leave_to_stock)
        native.setup(scopes, FallbackError, prove_on_cuda, _take_first_fallback, verify, NAMES)
        _is_set_up = True


def prove_on_cuda(name: str, index: int) -> None:
    """The self-test of a target on a CUDA device, before it serves there: the native library calls this at the first
    call on the device. Where stock differs in a dtype, stock goes on serving that."""
    with _set_up_lock:
        if (name, index) in _proven_on:
            return  # another thread was first
        if torch.cuda.is_current_stream_capturing():
            return  # what a proof does must not come into the user's graph
        try:
            differences = differences_on(torch.device("cuda", index), TARGETS[name])
        except Exception as error:  # whatever it is, the script goes on with stock
            differences = {"all": f"{type(error).__name__}: {error}"}
        _take_proofs(name, index, differences)


def _take_proofs(name: str, index: int, differences: dict[str, str | None]) -> None:
    from . import _native

    fit = tuple(dtype for dtype, difference in differences.items() if difference is None)
    _native.set_cuda_proof(name, index, fit)
    _proven_on.add((name, index))
    if wrong := [f"{dtype}: {difference}" for dtype, difference in differences.items() if difference is not None]:
        text = f"fastpatch leaves {name!r} on cuda:{index} to PyTorch, since its self-test failed: {'; '.join(wrong)}"
        _warn_once(text)


def _take_first_fallback(name: str, reason: str, line: str) -> None:
    first_lines[name, reason] = line
    _log.debug("%s went to PyTorch (%s) at %s", name, reason, line)


def _apply(names: tuple[str, ...]) -> None:
    """Brings process switches and patch points of targets in line with who wants them on."""
    from . import _native

    complaints = []
    for name in names:
        _native.set_switch(name, _process[name])
        _native.set_verify_rate(name, _process_verify[name])
        wanted = name not in _unfit and (_process[name] != OFF or _open_scopes[name] > 0)
        TARGETS[name].switched(wanted or (name not in _unfit and bool(_explicit[name])))
        if name in _unfit:
            for entry in _explicit[name]:
                _native.set_live(entry, False)
        for point in TARGETS[name].points:
            if not wanted:
                complaints.append(point.restore())
            elif (complaint := point.install()) not in _warned:
                _warned.add(str(complaint))  # a scope in a loop says it once
                complaints.append(complaint)
    # Last: where warnings are errors, everything is in order before one is raised.
    for complaint in filter(None, complaints):
        warn_user(complaint, RuntimeWarning)
