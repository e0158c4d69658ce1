"""Functions that are served without a patch point, for those who call them by our name; the library comes with the
first call."""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import _use_grad_for_differentiable

from ._locks import fork_safe
from ._patching import MakeEntry, is_own_of_torch, make_proxy
from ._switch import ready_explicitly
from .targets import TARGETS

_lock = fork_safe(threading.RLock)


class _FirstCall:
    """Stands in a proxy's type for ``__call__`` until that is looked up to be called: then the native library is loaded
    (or built), and what serves from now on takes this place.

    As a descriptor it has no part in the call itself: no frame of ours is there when stock warns.
    """

    def __init__(self, name: str, stock: Any, make_entry: MakeEntry) -> None:
        self._name, self._stock, self._make_entry = name, stock, make_entry

    def __get__(self, instance: object, owner: Any) -> Any:
        if instance is None:
            return self
        with _lock:
            if vars(owner)["__call__"] is self:
                entry = ready_explicitly(self._name, lambda: self._make_entry(self._stock))
                owner.__call__ = staticmethod(self._stock) if entry is None else entry
        return owner.__call__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # for callable(type(proxy).__call__)
        raise NotImplementedError


def explicit(name: str, stock: Any, make_entry: MakeEntry, qualified: str, *, method: bool = False) -> Any:
    """A proxy of ``stock`` that a target serves from its first call on, whatever is enabled.

    Args:
        name: the target's.
        make_entry: gives the C builtin that is called instead of ``stock``.
        qualified: what it pickles as: "package.module:name".
        method: does it bind to an instance, as a function in a class does?
    """
    made = make_proxy(stock, _FirstCall(name, stock, make_entry), qualified, method=method)
    TARGETS[name].explicit.append(made)
    return made


def rebuilt_step(sgd: Any) -> Callable[..., Any] | None:
    """torch.optim.SGD's own ``step``, not yet hooked by torch, but with this function ``sgd`` behind it; None if
    somebody has put something else in its place."""
    stock = TARGETS["sgd"].points[0].stock
    if not is_own_of_torch(stock):
        return None
    raw = inspect.unwrap(stock)
    step = types.FunctionType(
        raw.__code__, {**raw.__globals__, "sgd": sgd}, raw.__name__, raw.__defaults__, raw.__closure__
    )
    step.__kwdefaults__ = raw.__kwdefaults__
    functools.update_wrapper(step, raw)
    del step.__wrapped__  # type: ignore[attr-defined]
    return _use_grad_for_differentiable(step)
