"""What happened, and what would: report(), explain()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import _build, _switch
from ._counts import Report
from .targets import TARGETS, Explanation


def report() -> Report:
    """The counters since the start of the process or the last ``reset_report()``, over all threads."""
    if not _switch.is_set_up():
        return Report({name: (0, {}) for name in TARGETS}, {})
    from . import _native

    counts = {name: _native.counts(name) for name in TARGETS}
    on_cuda = {name: number for name in TARGETS if (number := _native.fast_on_cuda(name))}
    lines: dict[str, dict[str, str]] = {}
    for (name, reason), line in list(_switch.first_lines.items()):
        if reason in counts[name][1]:
            lines.setdefault(name, {})[reason] = line
    return Report(counts, _native.reasons(), _native.loss_kept_memory(), first_lines=lines, on_cuda=on_cuda)


def reset_report() -> None:
    """Sets all counters to zero."""
    if _switch.is_set_up():
        from . import _native

        _native.reset_counts()


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Would this call be served by the compiled implementation, here and now? Runs nothing, changes nothing.

    Args:
        fn: ``F.smooth_l1_loss``, ``F.huber_loss``, a module of theirs, the ``step`` of an SGD, or what these were
            before ``enable()``.
        args, kwargs: what it would be called with. A step is judged by the gradients and state of this moment; a
            subclass's own ``step`` as if it called SGD's, a module by its settings.

    Returns:
        Explanation: ``.fast``, ``.reason`` (a stable code, None if fast), ``.detail`` (a sentence).

    Raises:
        ValueError: no target serves calls of ``fn``; or an environment variable of ours has a value that means nothing.

    Example:
        >>> print(fastpatch.explain(F.smooth_l1_loss, input, target, beta=-1.0))
        smooth_l1_loss: stock, because of beta: beta must be zero, or a number of at least 2.4e-38 (...)
    """
    target = next((target for target in TARGETS.values() if target.owns(fn)), None)
    if target is None:
        raise ValueError(
            f"fastpatch.explain: no target serves {fn!r}; give F.smooth_l1_loss, F.huber_loss, a module of "
            "theirs, or the step of a torch.optim.SGD"
        )
    if platform := _build.unsupported_platform():
        return Explanation(target.name, False, "unsupported_platform", f"there is no native library for {platform}")
    if not _switch.is_enabled(target.name):
        if (why := _switch.forbidden(target.name)) is not None:
            return Explanation(target.name, False, "switched_off", why)
        if (failure := _switch.failure(target.name)) is not None:
            return Explanation(target.name, False, "not_built", failure)
        text = f"{target.name} isn't on in this thread and scope; fastpatch.enable() turns it on"
        return Explanation(target.name, False, "disabled", text)
    return target.explain(fn, args, kwargs)
