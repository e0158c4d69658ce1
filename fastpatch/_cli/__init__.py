"""The command line: runs programs with fastpatch on, and has sub-commands that look after it.

Nothing here imports torch before the program does: see ``fastpatch._load``.
"""

from __future__ import annotations

import sys

from ._options import COMMANDS, Mistake, parse
from ._run import run


def main() -> None:
    """``python -m fastpatch``, and the console script ``fastpatch``."""
    arguments = sys.argv[1:]
    try:
        if arguments and arguments[0] in COMMANDS:
            from ._commands import command

            status = command(arguments[0], arguments[1:])
        else:
            request = parse(arguments)
            if request is not None:
                run(request)
                return
            status = 0
    except Mistake as mistake:
        sys.stderr.write(f"fastpatch: {mistake}\n")
        status = 2
    sys.exit(status)
