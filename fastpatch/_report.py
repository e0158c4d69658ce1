"""What happened, and what would: report(), explain()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import _build, _switch, _verify
from ._counts import Report
from ._proof import ON
from .targets import TARGETS, Explanation, Guard, Target  # noqa: F401 (Guard is one of fastpatch's public names)
from .targets._explanation import ENVIRONMENT, LIBRARY, PLATFORM, SELF_TEST, SWITCH, UNKNOWN, refused_first


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
    sentences = {code: sentence for code, (sentence, _) in _native.reasons().items()}
    advice = {code: advice for code, (_, advice) in _native.reasons().items()}
    return Report(
        counts,
        sentences,
        _native.loss_kept_memory(),
        first_lines=lines,
        on_cuda=on_cuda,
        verified={name: number for name in TARGETS if (number := _verify.checked[name])},
        _advice=advice,
    )


def reset_report() -> None:
    """Sets all counters to zero."""
    if _switch.is_set_up():
        from . import _native

        _native.reset_counts()
        _verify.checked.clear()


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Would this call be served by the compiled implementation, here and now? Runs nothing, changes nothing.

    Args:
        fn: ``F.smooth_l1_loss``, ``F.huber_loss``, a module of theirs, the ``step`` of an SGD, what these were before
            ``enable()``, or those of ``fastpatch.nn`` and ``fastpatch.optim``.
        args, kwargs: what it would be called with. A step is judged by the gradients and state of this moment; a
            subclass's own ``step`` as if it called SGD's, a module by its settings.

    Returns:
        Explanation: ``.fast``, ``.reason`` (a stable code, None if fast), ``.detail`` (a sentence), ``.guards`` (the
            verdict of each guard, in order), ``.advice`` (how to have such a call served).

    Raises:
        ValueError: no target serves calls of ``fn``; or an environment variable of ours has a value that means nothing.

    Example:
        >>> explanation = fastpatch.explain(F.smooth_l1_loss, input, target, beta=-1.0)
        >>> explanation.reason, explanation.advice
        ('beta', 'pass a Python number in that range; 0.0 makes it the L1 loss')
    """
    target = next((target for target in TARGETS.values() if target.owns(fn)), None)
    if target is None:
        # An optimizer's repr has a dozen lines.
        shown = f"the {type(fn).__name__} itself" if isinstance(fn, torch.optim.Optimizer) else repr(fn)
        raise ValueError(
            f"fastpatch.explain: no target serves {shown}; give F.smooth_l1_loss, F.huber_loss, a module of "
            "theirs, or the step of a torch.optim.SGD"
        )
    return _off(target, target.is_explicit(fn)) or target.explain(fn, args, kwargs)


def _off(target: Target, explicitly: bool) -> Explanation | None:
    """For a call that the native library isn't asked about here and now; None if it is."""
    name, loaded = target.name, _switch.is_set_up()
    then = target.questions() if loaded else UNKNOWN
    if platform := _build.unsupported_platform():
        return refused_first(name, PLATFORM, f"there is no native library for {platform}", then)
    if _switch.is_enabled(name):
        return None
    if (why := _switch.forbidden(name)) is not None:
        return refused_first(name, ENVIRONMENT, why, then)
    # Before the first enable() of the target nothing was built or proven, which can't have been passed.
    proven = _switch.passed_self_test(name)
    untried = {place for place, tried in ((LIBRARY, loaded), (SELF_TEST, proven)) if not tried}
    if (failure := _switch.failure(name)) is not None:
        place = SELF_TEST if _switch.failed_self_test(name) else LIBRARY
        return refused_first(name, place, failure, then)
    if explicitly:
        if not proven:
            return refused_first(name, LIBRARY, "the native library is loaded, or built, at the first call", then)
        if _switch.switch_here(name, explicitly=True) >= ON:
            return None
    return refused_first(name, SWITCH, f"{name} isn't on in this thread and scope", then, untried)
