"""Patch points: attributes that a proxy replaces, and their way back. The only user of wrapt.

A proxy is an ``ObjectProxy`` whose type's ``__call__`` is a C builtin: between the user's call and stock stands no
Python frame of ours, so that a warning of stock's still names the user's line. All else (name, signature, hash,
equality, ``isinstance``) is the replaced object's.
"""

from __future__ import annotations

import pkgutil
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
import wrapt
from torch.jit import _builtins

from ._locks import fork_safe

MakeEntry = Callable[[Any], Any]

_lock = fork_safe(threading.RLock)
# torch.jit knows builtins by id(): a proxy that is registered there must outlive every other object.
_immortal: list[object] = []


def make_proxy(stock: object, entry: Any, qualified: str, *, method: bool) -> Any:
    """A proxy of ``stock`` that ``entry`` is called for. ``qualified`` is what it pickles as: "package.module:name"."""

    def as_name(self: object, protocol: object = None) -> tuple[Any, ...]:
        # Whatever the attribute holds when it is loaded, perhaps where fastpatch isn't installed.
        return pkgutil.resolve_name, (qualified,)

    def same(self: object, memo: object = None) -> object:
        return self  # like a function: copies are the object itself

    def bind(self: object, instance: object, owner: object = None) -> object:
        return self if instance is None else types.MethodType(self, instance)  # type: ignore[arg-type]

    body: dict[str, Any] = {
        "__call__": entry,
        "__reduce_ex__": as_name,
        "__reduce__": as_name,
        "__copy__": same,
        "__deepcopy__": same,
        "__repr__": lambda self: repr(self.__wrapped__),
    }
    if method:
        body["__get__"] = bind
    return type("PatchedFunction", (wrapt.ObjectProxy,), body)(stock)


# By functions that nobody replaces: file names as the interpreter has them, which in frozen programs are no paths.
_OWN_FILES = {
    function.__code__.co_filename
    for function in (
        torch.nn.functional.hinge_embedding_loss,
        torch.optim.Optimizer.__repr__,
        sys.modules["torch.optim.sgd"].SGD.__setstate__,
    )
}


def is_own_of_torch(function: Any) -> bool:
    """Is this torch's own builtin or function, not somebody's wrapper around it? ``functools.wraps`` copies all but the
    code, so the file of the code decides, of this function and of all that it wraps."""
    if isinstance(function, types.BuiltinFunctionType):
        return type(function) is types.BuiltinFunctionType
    while type(function) is types.FunctionType and function.__code__.co_filename in _OWN_FILES:
        if not hasattr(function, "__wrapped__"):
            return True
        function = function.__wrapped__
    return False


class PatchPoint:
    """An attribute ``name`` of ``owner`` (a module or class), replaced while its target is on.

    ``make_entry`` gives the C builtin that is called instead of what it is given. The native library must be loaded.
    """

    method = False

    def __init__(
        self,
        owner: Any,
        name: str,
        make_entry: MakeEntry,
        qualified: str,
        jit_builtin: str | None = None,
        on_change: Callable[[Any], None] | None = None,  # called with the proxy, and with None when it is taken out
    ):
        self._on_change = on_change or (lambda proxy: None)
        self.owner = owner
        self.name = name
        self.qualified = qualified
        self._make_entry = make_entry
        self._jit_builtin = jit_builtin
        self._stock: Any = None
        self._proxy: Any = None
        # (what it replaces, its maker, proxy, entry) of all proxies so far: who kept one is served again after the
        # next install.
        self._made: list[tuple[Any, MakeEntry, Any, Any]] = []

    @property
    def installed(self) -> bool:
        return self._proxy is not None

    @property
    def stock(self) -> Any:
        """The object that is replaced, or would be."""
        return self._stock if self.installed else self._original_of(self._current())

    def _current(self) -> Any:
        return vars(self.owner)[self.name]

    def _original_of(self, current: Any) -> Any:
        """Whoever puts an old proxy of ours back, means what that replaced."""
        return next((stock for stock, _, proxy, _ in self._made if proxy is current), current)

    def sees(self, fn: Any) -> bool:
        """Is ``fn`` a live proxy of ours?"""
        return self.installed and any(fn is proxy for _, _, proxy, _ in self._made)

    def is_original(self, fn: Any) -> bool:
        """Is ``fn`` what the attribute held before it was patched?"""
        return fn is self.stock or any(fn is stock for stock, _, _, _ in self._made)

    def _make(self, stock: Any, make_entry: MakeEntry) -> Any:
        """The proxy of ``stock``, live from now on."""
        from . import _native

        for known, maker, proxy, entry in self._made:
            if known is stock and maker is make_entry:
                _native.set_live(entry, True)
                return proxy
        entry = make_entry(stock)
        proxy = make_proxy(stock, entry, self.qualified, method=self.method)
        self._made.append((stock, make_entry, proxy, entry))
        if self._jit_builtin is not None:
            # The table is built first, else the proxy would take the original's place in it.
            _builtins._get_builtin_table()  # type: ignore[no-untyped-call]
            _builtins._register_builtin(proxy, self._jit_builtin)
            _immortal.append(proxy)
        _native.set_live(entry, True)
        return proxy

    def install(self) -> str | None:
        """Puts the proxy in place, unless somebody has patched before us: then theirs stays, and what it calls is
        served by the inner points.

        Returns what the user should know of.
        """
        with _lock:
            if self.installed:
                return None
            stock = self._original_of(self._current())
            if not is_own_of_torch(stock):
                return (
                    f"fastpatch: {self._words} had been replaced by {stock!r}, which stays; PyTorch's own function "
                    "behind it is served where it can be"
                )
            self._stock = stock
            self._proxy = self._make(stock, self._make_entry)
            setattr(self.owner, self.name, self._proxy)
            self._on_change(self._proxy)
            return None

    @property
    def _words(self) -> str:
        return self.qualified.replace(":", ".")

    def restore(self) -> str | None:
        """Puts the replaced object back, unless somebody has patched over us: then ours passes all calls through.

        Returns what the user should know of, for the caller to say when all points are restored.
        """
        from . import _native

        with _lock:
            if not self.installed:
                return None
            for _, _, _, entry in self._made:
                _native.set_live(entry, False)
            original = self._put_back(self._current())
            self._stock = self._proxy = None
            self._on_change(None)
            if original is not None:
                setattr(self.owner, self.name, original)
                return None
        return (
            f"fastpatch: {self._words} was replaced by somebody else while patched; it is left as it is, and "
            "fastpatch's part of it passes every call to PyTorch from now on"
        )

    def _put_back(self, current: Any) -> Any | None:
        """What to put back in place of ``current``; None if that isn't ours."""
        return self._stock if current is self._proxy else None


class StepPatchPoint(PatchPoint):
    """An optimizer's ``step``, which torch itself replaces when the first optimizer of the class is constructed.

    torch wraps ``step`` in its profiler range and step hooks (``Optimizer.profile_hook_step``) and marks the result
    ``hooked``. A step that is hooked already gets a proxy around all of that, whose entry runs torch's wrapper whenever
    a hook or profiler is there. A step that isn't must not be hooked by us (a subclass that calls it would run its
    hooks twice): it gets a bare proxy, torch hooks that, and the next step then puts a proxy around torch's wrapper.
    """

    method = True

    def __init__(
        self,
        owner: type[torch.optim.Optimizer],
        make_hooked: MakeEntry,
        make_bare: MakeEntry,
        set_promote: Callable[[Callable[[], None] | None], None],
        qualified: str,
    ):
        super().__init__(owner, "step", make_bare, qualified)
        self._make_bare = make_bare
        self._make_hooked = make_hooked
        self._set_promote = set_promote
        self._bare_proxy: Any = None

    def install(self) -> str | None:
        with _lock:
            if self.installed:
                return None
            hooked = getattr(self._original_of(self._current()), "hooked", False)
            self._make_entry = self._make_hooked if hooked else self._make_bare
            complaint = super().install()
            self._bare_proxy = None if hooked else self._proxy
            self._set_promote(None if hooked else self._promote)
            return complaint

    def _is_our_hooked(self, current: Any) -> bool:
        """Has torch hooked our bare proxy?"""
        return (
            type(current) is types.FunctionType
            and bool(getattr(current, "hooked", False))
            and self._bare_proxy is not None
            and getattr(current, "__wrapped__", None) is self._bare_proxy
        )

    def _promote(self) -> None:
        """Called by the bare proxy's entry once ``step`` is a function again."""
        with _lock:
            current = self._current()
            if self.installed and self._is_our_hooked(current):
                self._proxy = self._make(current, self._make_hooked)
                setattr(self.owner, self.name, self._proxy)

    def _put_back(self, current: Any) -> Any | None:
        promoted = self._bare_proxy is not None and self._proxy is not self._bare_proxy
        if (promoted and current is self._proxy) or self._is_our_hooked(current):
            # As it would be had fastpatch never been there: the original, hooked by torch.
            step: Any = torch.optim.Optimizer.profile_hook_step(self._stock)
            step.hooked = True
            return step
        return super()._put_back(current)
