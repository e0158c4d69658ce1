"""What child processes inherit: fastpatch itself, by way of environment variables, and a folder for their counts."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from .._counts import Report
from .._inherit.sitecustomize import RUN

_PACKAGE = Path(__file__).parents[1]
_FIRST = str(_PACKAGE / "_inherit")


class Folder:
    """A folder in which all processes of a run leave what they counted. It is gone when they have been read."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="fastpatch-report-"))
        # A run inside a run adds to the outer one's report.
        self._outer = json.loads(os.environ.get(RUN, "{}")).get("counts")

    def collect(self) -> Report | None:
        """The sum of all that was counted; None if nothing was."""
        reports = []
        for path in sorted(self.path.glob("[0-9]*.json")):
            with suppress(OSError, ValueError):  # whatever else may lie in a folder for temporary files
                reports.append(Report.from_json(path.read_bytes()))
        shutil.rmtree(self.path, ignore_errors=True)
        return Report.merge(*reports) if reports else None

    def pass_on(self, report: Report) -> None:
        if self._outer:
            from .._process import write_atomically

            with suppress(OSError):
                write_atomically(Path(self._outer, f"{os.getpid()}-run.json"), report.to_json())


def make_inherit(folder: Folder | None) -> None:
    """Has every Python process that is started from now on turn fastpatch on, if it has this process's torch."""
    spec = importlib.util.find_spec("torch") if "torch" not in sys.modules else sys.modules["torch"].__spec__
    if spec is None or spec.origin is None:
        return  # the program can't import it either
    counts = str(folder.path) if folder is not None else None
    torch, start = os.path.dirname(spec.origin), "fastpatch._process"
    run = {"package": str(_PACKAGE), "torch": torch, "start": start, "counts": counts}
    os.environ[RUN] = json.dumps(run)
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [path for path in before if path and path != _FIRST]
    os.environ["PYTHONPATH"] = os.pathsep.join([_FIRST, *others])
