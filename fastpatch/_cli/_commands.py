"""The sub-commands and their options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from .. import _environment
from .._errors import BuildError
from ._options import Mistake


def command(name: str, arguments: list[str]) -> int:
    """Runs a sub-command; returns the exit status. A mistake in the options raises SystemExit(2), after saying so."""
    prog = f"python -m fastpatch {name}"
    if name == "selftest":  # its options are fastpatch.testing's
        _check_environment()
        from fastpatch.testing import main

        return main(arguments, prog=prog)
    parser = argparse.ArgumentParser(prog=prog, allow_abbrev=False)
    act = _MAKERS[name](parser)
    options = parser.parse_args(arguments)
    if name != "doctor":  # which says it in its own way
        _check_environment()
    return act(options)


def _check_environment() -> None:
    try:
        _environment.read(_environment.TARGETS)
    except ValueError as error:
        raise Mistake(str(error).removeprefix("fastpatch: ")) from None


Act = Callable[[argparse.Namespace], int]


def _doctor(parser: argparse.ArgumentParser) -> Act:
    parser.description = "What is installed, what works, and how to mend what doesn't. Exit status 0: healthy, 1: not."
    parser.add_argument("--json", action="store_true", help="print it as JSON")

    def act(options: argparse.Namespace) -> int:
        from ._doctor import doctor

        return doctor(options.json)

    return act


def _build(parser: argparse.ArgumentParser) -> Act:
    parser.description = "Compiles the native library now, if the cache has none. Exit status 1: it failed."
    parser.add_argument("--debug", action="store_true", help="the one with symbols and checks, for gdb")
    parser.add_argument("--force", action="store_true", help="compile it even if the cache has one")

    def act(options: argparse.Namespace) -> int:
        from ._cache import build

        return build(options.force, options.debug)

    return act


def _cache(parser: argparse.ArgumentParser) -> Act:
    parser.description = "What has been compiled, for which torch; or removes it."
    parser.add_argument("action", choices=("list", "clear"))

    def act(options: argparse.Namespace) -> int:
        from ._cache import clear, show

        try:
            return show() if options.action == "list" else clear()
        except BuildError as error:
            print(f"fastpatch: {error}", file=sys.stderr)
            return 1

    return act


def _bench(parser: argparse.ArgumentParser) -> Act:
    parser.description = "Times stock PyTorch and fastpatch in turn on this machine, in less than a minute."

    def act(options: argparse.Namespace) -> int:
        from ._bench import bench

        return bench()

    return act


_MAKERS: dict[str, Callable[[argparse.ArgumentParser], Act]] = {
    "doctor": _doctor,
    "build": _build,
    "cache": _cache,
    "bench": _bench,
}
