"""Runs a script, module, folder, archive or text just as ``python`` would, in this process."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import linecache
import os
import pkgutil
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

_OURS = str(Path(__file__).parents[1]) + os.sep


@dataclass(frozen=True)
class Program:
    """What to run: ``kind`` is ``"script"``, ``"module"`` or ``"code"``, ``what`` a path, a name or the code itself."""

    kind: str
    what: str
    arguments: tuple[str, ...] = ()


def run(program: Program) -> None:
    """Returns when the staged program has come to its end. What it raises passes through, with its own traceback."""
    try:
        {"script": _run_script, "module": _run_module, "code": _run_code}[program.kind](program.what)
    except SystemExit:
        raise
    except BaseException as error:
        _show_without_us(error)
        raise


def stage(program: Program) -> None:
    """sys.argv and sys.path as Python sets them before it looks for the program."""
    first = {"script": program.what, "module": "-m", "code": "-c"}[program.kind]
    sys.argv[:] = [first, *program.arguments]
    # Isolated, or safe from what lies around: Python puts no such folder there either.
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path[0] = _first_folder(program)


def _first_folder(program: Program) -> str:
    if program.kind == "module":
        return os.getcwd()
    if program.kind == "code" or program.what == "-":
        return ""
    return os.path.dirname(os.path.realpath(program.what))


def _fresh_main() -> ModuleType:
    """A ``__main__`` as Python begins with, in the place of ours: what is pickled or spawned looks it up there."""
    main = ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __annotations__={}, __loader__=importlib.machinery.BuiltinImporter)
    _replaced.append(sys.modules["__main__"])  # its functions are still running
    sys.modules["__main__"] = main
    return main


_replaced: list[ModuleType] = []


def _run_module(name: str) -> None:
    _fresh_main()
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _run_code(text: str) -> None:
    main = _fresh_main()
    if sys.version_info >= (3, 13):  # whose tracebacks show lines of it
        linecache.cache["<string>"] = (len(text), None, (text + "\n").splitlines(True), "<string>")
    exec(compile(text + "\n", "<string>", "exec", dont_inherit=True), vars(main))


def _run_script(script: str) -> None:
    if script == "-":
        main = _fresh_main()
        vars(main).update(__file__="<stdin>", __cached__=None)
        exec(compile(sys.stdin.read(), "<stdin>", "exec", dont_inherit=True), vars(main))
        return
    path = os.path.join(os.getcwd(), script)  # not made simpler: ./script.py is /folder/./script.py
    if _is_importable(path):
        _insert_path(path)
        _fresh_main()
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    code = _read(path)
    main = _fresh_main()
    loader_type = (
        importlib.machinery.SourcelessFileLoader if path.endswith(".pyc") else importlib.machinery.SourceFileLoader
    )
    vars(main).update(__file__=path, __cached__=None, __loader__=loader_type("__main__", path))
    exec(code, vars(main))


def _is_importable(path: str) -> bool:
    """Is it a folder or an archive, with a ``__main__.py`` to be found in it?"""
    return os.path.isdir(path) or pkgutil.get_importer(path) is not None


def _insert_path(path: str) -> None:
    if sys.flags.isolated or getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, path)
    else:
        sys.path[0] = path


def _read(path: str) -> CodeType:
    try:
        with io.open_code(path) as file:
            if not path.endswith(".pyc"):
                source = file.read()
            elif code := pkgutil.read_code(file):
                return code  # type: ignore[no-any-return]
            else:
                raise RuntimeError("Bad magic number in .pyc file")
    except OSError as error:
        sys.stderr.write(f"{sys.orig_argv[0]}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n")
        raise SystemExit(2) from None
    code = compile(source, path, "exec", dont_inherit=True)
    return code


def _show_without_us(error: BaseException) -> None:
    """Has Python show the error as if the program had been started by itself: without the frames that lead to it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS):
        trace = trace.tb_next
    hook = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, _: TracebackType | None) -> None:
        sys.excepthook = hook
        sys.last_traceback = trace
        hook(kind, value.with_traceback(trace), trace)

    sys.excepthook = show
