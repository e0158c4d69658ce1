"""Runs ``python`` and ``python -m fastpatch`` in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import fastpatch

NOTHING = {name: {"fast": 0, "fallback": {}} for name in fastpatch.targets()}


def python(*arguments, folder, stdin="", **environment):
    """The ended process; a variable that is None isn't set."""
    path = os.pathsep.join(filter(None, [str(Path(fastpatch.__file__).parents[1]), os.getenv("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(folder), **environment}
    env = {name: value for name, value in env.items() if value is not None and name != "PYTHONWARNINGS"}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, input=stdin)


def cli(*arguments, folder, **more):
    return python("-m", "fastpatch", *arguments, folder=folder, **more)


def must(done):
    """The process, which must have succeeded."""
    assert done.returncode == 0, done.stderr
    return done
