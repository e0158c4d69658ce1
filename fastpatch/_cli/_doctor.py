"""``doctor``: what there is, what works, and how to mend what doesn't. It never builds and patches nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import fastpatch

from .. import _environment
from .._environment import TARGETS
from .._errors import BuildError

_UNUSABLE = "can't be used"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: what was looked at.
        value: what was found.
        problem: what is wrong with it; empty if nothing is.
        mend: the command, or what else to do about it.
    """

    name: str
    value: str
    problem: str = ""
    mend: str = ""


def doctor(as_json: bool) -> int:
    """Prints what was found; the exit status is 0 if nothing is wrong, else 1."""
    findings = [_without_home(finding) for finding in _examine()]
    problems = [finding for finding in findings if finding.problem]
    if as_json:
        data = {"healthy": not problems, "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(data, indent=2))
    else:
        print("\n".join(_text(findings, problems)))
    return 1 if problems else 0


def _without_home(finding: Finding) -> Finding:
    """For a bug report: whose home it is, is nobody's business."""
    home = os.path.expanduser("~")
    fields = asdict(finding)
    if len(home) > 1:
        fields = {name: text.replace(home + os.sep, "~" + os.sep) for name, text in fields.items()}
    return Finding(**fields)


def _text(findings: list[Finding], problems: list[Finding]) -> Iterator[str]:
    for finding in findings:
        mark = "!" if finding.problem else " "
        yield from _wrapped(f"{mark} {finding.name:<15} ", finding.value)
    yield ""
    for finding in problems:
        yield from _wrapped(f"! {finding.name}: ", finding.problem)
        yield from _wrapped("  to mend it: ", finding.mend)
    count = {0: "healthy", 1: "1 problem"}.get(len(problems), f"{len(problems)} problems")
    yield f"fastpatch {fastpatch.__version__}: {count}"


def _wrapped(start: str, text: str) -> list[str]:
    indent = " " * min(len(start), 18)
    return textwrap.wrap(
        start + text, 80, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [start]


def _examine() -> Iterator[Finding]:
    yield Finding("fastpatch", f"{fastpatch.__version__} in {Path(fastpatch.__file__).parent}")
    tag = sysconfig.get_config_var("SOABI")
    yield Finding("Python", f"{platform.python_version()} ({tag}), {sys.executable}")
    yield Finding("system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    yield from _variables()
    torch = _torch()
    yield torch
    if not torch.problem:
        yield from _with_torch()


def _variables() -> Iterator[Finding]:
    names = sorted(name for name in os.environ if name.startswith("FASTPATCH") and name != "FASTPATCH_RUN")
    names += [name for name in ("MAX_JOBS", "CXX", "TORCH_CUDA_ARCH_LIST") if name in os.environ]
    found = {name: os.environ[name] for name in names}
    value = ", ".join(f"{name}={value!r}" for name, value in found.items()) or "none of ours is set"
    try:
        _environment.read(TARGETS)
    except ValueError as error:
        variable = str(error).removeprefix("fastpatch: ").partition("=")[0]
        yield Finding("variables", value, str(error), f"unset {variable}")
    else:
        yield Finding("variables", value)


def _torch() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding(
            "torch", "not installed", "PyTorch, which fastpatch accelerates, is missing", "pip install torch"
        )
    try:
        import torch
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return Finding("torch", "can't be imported", text, "pip install --force-reinstall torch")
    git = str(torch.version.git_version)[:10]
    return Finding(
        "torch", f"{torch.__version__} (git {git}, CUDA {torch.version.cuda}), {Path(torch.__file__).parent}"
    )


def _with_torch() -> Iterator[Finding]:
    fastpatch.targets()  # all of fastpatch is imported now
    from .. import _build

    unsupported = _build.unsupported_platform()
    library = _library()
    built = library.value.startswith("built") and not library.problem
    for finding in (_compiler(), _ninja(), _headers()):
        # Only a build needs them: a library that is there serves without.
        needed = not built and unsupported is None
        yield finding if needed else Finding(finding.name, finding.value)
    yield _nvcc(built)
    yield _cpu()
    yield from _gpus()
    cache = _cache(must_be_written=not built)
    yield cache
    yield Finding("library", f"unknown: the cache {_UNUSABLE}") if cache.value == _UNUSABLE else library
    yield from _targets(built)


def _problem(name: str, value: str, error: BuildError) -> Finding:
    """A BuildError's text tells the cause and, behind a semicolon or colon, what to do."""
    cause, _, mend = error.message.partition("; ")
    if not mend:
        cause, _, mend = error.message.rpartition(": ")
    return Finding(name, value, cause or error.message, mend)


def _compiler() -> Finding:
    from .. import _compilers

    found = _compilers.find_compiler()
    if isinstance(found, BuildError):
        return _problem("compiler", "none that works", found)
    return Finding("compiler", f"{' '.join(found.command)}: {found.identity}")


def _ninja() -> Finding:
    from .. import _compile, _compilers

    try:
        _compile.jobs()
        _compile.timeout()
        return Finding("ninja", _compilers.find_ninja())
    except BuildError as error:
        return _problem("ninja", "can't be used", error)


def _headers() -> Finding:
    folder = sysconfig.get_path("include")
    if not Path(folder, "Python.h").exists():
        problem = f"there is no Python.h in {folder}"
        return Finding("Python.h", "missing", problem, "install Python's headers (Debian: apt install python3-dev)")
    if importlib.util.find_spec("setuptools") is None:
        return Finding("Python.h", folder, "torch.utils.cpp_extension needs setuptools", "pip install setuptools")
    return Finding("Python.h", folder)


def _nvcc(built: bool) -> Finding:
    from .. import _build, _nvcc

    toolkit = _nvcc.find_toolkit()
    if isinstance(toolkit, str):
        cause, _, mend = toolkit.partition("; ")
        # Without a GPU nobody misses it; nor with a library that has the kernels.
        needed = bool(mend) and _sees_gpu() and not (built and _build.why_no_cuda() is None)
        return Finding("nvcc", "none that is of use", cause, mend) if needed else Finding("nvcc", toolkit)
    return Finding("nvcc", f"{toolkit.nvcc} ({toolkit.identity})")


def _sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _cpu() -> Finding:
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    return Finding("CPU", f"{capability}, {os.cpu_count()} cores, {torch.get_num_threads()} threads of torch's")


def _gpus() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        yield Finding("GPU", "none that torch can use")
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        major, minor = torch.cuda.get_device_capability(i)
        yield Finding("GPU", f"{torch.cuda.get_device_name(i)}, sm_{major}{minor}")


def _cache(must_be_written: bool) -> Finding:
    from .. import _build, _cache

    try:
        folder = _cache.cache_dir()
        _cache.Entry.of(_build.SOURCES, folder).is_private()
    except BuildError as error:
        return _problem("cache", _UNUSABLE, error)
    except OSError as error:
        return _problem("cache", _UNUSABLE, _cache.explained(error, folder))
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if must_be_written and not os.access(existing, os.W_OK | os.X_OK):
        mend = "set FASTPATCH_CACHE_DIR to a folder of your own"
        return Finding("cache", str(folder), f"{existing} can't be written", mend)
    return Finding("cache", str(folder))


def _library() -> Finding:
    from .. import _build

    if name := _build.unsupported_platform():
        text = f"the native library exists for Linux on x86-64 only; this is {name}"
        return Finding("library", "none", text, "nothing to do here: PyTorch serves every call")
    try:
        loaded = _build.load_built()
    except BuildError as error:
        return Finding("library", "built", error.message, "python -m fastpatch build --force")
    except OSError as error:
        return Finding("library", "unknown", str(error), "set FASTPATCH_CACHE_DIR to a folder of your own")
    if loaded is None:
        text = "it hasn't been compiled for this torch, Python and compiler; the first enable() does it"
        return Finding("library", "not built", text, "python -m fastpatch build")
    why = _build.why_no_cuda()
    return Finding("library", f"built, without CUDA kernels: {why}" if why else "built, with CUDA kernels")


def _targets(built: bool) -> Iterator[Finding]:
    """What enable() would do with each target, without doing it: the self-test is run, and nothing is patched."""
    from .. import _switch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say is asked for below
        fit = _switch.ready(_switch.NAMES, False) if built else ()
    for name in _switch.NAMES:
        try:
            forbidden = _switch.forbidden(name)
        except ValueError:  # said already
            forbidden = "a variable has a bad value"
        if name in fit:
            value = "compiled; the self-test found it equal to PyTorch bit for bit"
            yield Finding(name, f"stock: {forbidden}" if forbidden else value)
        elif built:
            why = str(_switch.failure(name))
            yield Finding(
                name, "stock", why, "python -m fastpatch build --force; if that doesn't help, please report it"
            )
        else:
            yield Finding(name, "stock, as long as there is no library")
