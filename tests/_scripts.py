"""Scripts that tests run in an interpreter of their own."""

import os
import subprocess
import sys
from pathlib import Path

import fastpatch


def environment_of_scripts(**changes):
    """In which another interpreter imports the same fastpatch as the tests do."""
    path = os.pathsep.join(filter(None, [str(Path(fastpatch.__file__).parents[1]), os.getenv("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **changes}
    env.pop("PYTHONWARNINGS", None)
    return env


def run_script(script, *arguments, folder, **environment):
    """Runs a script file, which must succeed; returns the process."""
    command = [sys.executable, str(script), *arguments]
    env = environment_of_scripts(**environment)
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def in_a_process(folder, *words):
    """Python with these words on its command line, from an empty environment of hypothesis; it may fail."""
    path = os.pathsep.join(filter(None, [str(Path(fastpatch.__file__).parents[1]), os.getenv("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    env.pop("HYPOTHESIS_STORAGE_DIRECTORY", None)
    return subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, check=False)


def run_text(text, *arguments, folder, **environment):
    """The same for a script's text, as train.py in ``folder``."""
    script = folder / "train.py"
    script.write_text(text)
    return run_script(script, *arguments, folder=folder, **environment)
