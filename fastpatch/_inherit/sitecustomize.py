"""Turns fastpatch on in a process of ``python -m fastpatch``, when and if it imports torch.

Python runs this file at the start of every child process, of whatever interpreter, virtual environment and version the
child is. So it imports nothing of fastpatch before torch is there, and little else, keeps to the grammar of old
Pythons, and has to leave a process that it can't serve as it was.
"""

import importlib
import importlib.machinery  # importlib.util and typing take several milliseconds more
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

RUN = "FASTPATCH_RUN"  # what the parent tells its children: see _cli/_children.py
_FILE_OF_IMPORTLIB = importlib.machinery.ModuleSpec.__init__.__code__.co_filename
_HERE = os.path.dirname(os.path.abspath(__file__))


class TorchWatch:
    """A finder that finds nothing by itself, but calls ``then()`` as soon as torch has been imported.

    It stays in ``sys.meta_path`` afterwards: taking it out could make another thread, which goes through that list at
    this moment, skip one of the others.
    """

    def __init__(self, then: "Callable[[], object]") -> None:
        self._then = then
        self._done = False

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if name != "torch" or self._done:
            return None
        # Those after us alone: the ones before have been asked, and another such watch among them would ask us again.
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :] if self in sys.meta_path else ():
            if hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    self._prepare(spec.loader)
                    return spec
        return None

    def _prepare(self, loader: "Any") -> None:
        """Has the loader, which is torch's alone and stays the object it is, call us after its work."""
        if not (hasattr(loader, "exec_module") and hasattr(loader, "__dict__")):
            return
        stock = loader.exec_module

        def exec_module(module: "ModuleType") -> None:
            vars(loader).pop("exec_module", None)  # another watch may have done so
            stock(module)
            if not self._done:
                self._done = True
                # Torch is complete. Our self-test runs in a thread, which would wait for ever for a module that counts
                # as being imported.
                module.__spec__._initializing = False  # type: ignore[union-attr]
                self._then()

        if hasattr(exec_module.__code__, "replace"):
            # If torch can't be imported, the traceback is without this frame, as it is without those of importlib.
            exec_module.__code__ = exec_module.__code__.replace(co_filename=_FILE_OF_IMPORTLIB)
        loader.exec_module = exec_module


def watch(then: "Callable[[], object]") -> None:
    """Calls ``then()`` right after torch's import; at once if that has happened."""
    if "torch" in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, TorchWatch(then))


def _turn_on(told: str) -> None:
    """Turns on the parent's fastpatch if this process has the very torch that its parent has.

    Another torch belongs to another environment, which may lack what we need, and would have to compile.
    """
    try:
        import json

        run = json.loads(told)
        if not os.path.samefile(os.path.dirname(str(sys.modules["torch"].__file__)), run["torch"]):
            return
        if "fastpatch" not in sys.modules:
            _import_from(run["package"])
        importlib.import_module(run["start"]).start_child()
    except Exception as error:
        sys.stderr.write(f"fastpatch: off in process {os.getpid()}: {error}\n")


def _import_from(package: str) -> None:
    """Imports fastpatch from its place: it may be on nobody's path."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec: Any = spec_from_file_location(
        "fastpatch", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
    )
    sys.modules["fastpatch"] = module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules["fastpatch"]
        raise


def _chain() -> None:
    """Runs the sitecustomize that Python would have run without us, in our place."""
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    if RUN in os.environ:
        watch(lambda told=os.environ[RUN]: _turn_on(told))  # type: ignore[misc]
    _chain()
