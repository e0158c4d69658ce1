"""Runs a program with fastpatch on, and reports at the end."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from pathlib import Path

from .. import _environment
from .._counts import Report
from .._environment import TARGETS
from .._inherit.sitecustomize import watch
from ._children import Folder, make_inherit
from ._options import Mistake, Request
from ._python import run as run_program
from ._python import stage


def run(request: Request) -> None:
    """Returns, or raises, as the program does."""
    stage(request.program)  # what is found on its path decides which torch it gets
    settings = _settings(request)
    folder = None
    if request.report:
        folder = Folder()
        _at_exit(_Ending(request, folder, settings.off))
    if not settings.off:
        make_inherit(folder)
        watch(_turn_on)
    run_program(request.program)


def _settings(request: Request) -> _environment.Settings:
    """The options become the environment variables of this run, for this process and its children."""
    if request.only is not None:
        os.environ[_environment.ONLY] = ",".join(request.only)
    if request.strict:
        os.environ[_environment.STRICT] = "1"
    if request.verify is not None:
        os.environ[_environment.VERIFY] = repr(request.verify)
    if request.verbose:
        os.environ[_environment.LOG] = "info" if request.verbose == 1 else "debug"
    try:
        return _environment.read(TARGETS)
    except ValueError as error:
        raise Mistake(str(error).removeprefix("fastpatch: ")) from None


def _turn_on() -> None:
    from .._process import start_main

    start_main()


def _at_exit(ending: _Ending) -> None:
    """To be the last thing that happens. Registered first, it would be, but for what others registered before."""
    atexit.register(ending)
    if util := sys.modules.get("multiprocessing.util"):  # it waits for children, whose counts are wanted
        atexit.unregister(util._exit_function)
        atexit.register(util._exit_function)


class _Ending:
    """Prints or writes the report when the process ends. What goes wrong then is said, and changes nothing else."""

    def __init__(self, request: Request, folder: Folder, off: bool) -> None:
        self._file = request.report_file
        self._folder = folder
        self._off = off
        self._pid = os.getpid()

    def __call__(self) -> None:
        if os.getpid() != self._pid:  # a forked child, which leaves its counts for us
            return
        with suppress(Exception):  # stderr may be None, or closed
            try:
                self._report()
            except Exception as error:
                sys.stderr.write(f"fastpatch: no report: {error}\n")

    def _report(self) -> None:
        from .._process import write_atomically, write_now

        write_now()
        found = self._folder.collect()
        report = found or Report({name: (0, {}) for name in TARGETS}, {})
        if found:
            self._folder.pass_on(report)
        if self._file is None:
            sys.stderr.write(f"{report}\n{self._note(found)}")
        elif os.path.exists(self._file) and not os.path.isfile(self._file):  # a device or a pipe
            Path(self._file).write_text(report.to_json(), encoding="utf-8")
        else:
            write_atomically(Path(os.path.realpath(self._file)), report.to_json())

    def _note(self, found: Report | None) -> str:
        """Why there is nothing to report, as far as that is known."""
        if self._off:
            return f"{_environment.OFF}=0 switched everything off\n"
        if found is None and "torch" not in sys.modules:
            return "this process never imported torch\n"
        return ""
