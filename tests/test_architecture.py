"""The house rules of the source: who may import whom, who may know what, and what `import fastpatch` does."""

import ast
import json
import os
import re
from pathlib import Path

import pytest
from _scripts import run_text

import fastpatch

PACKAGE = Path(fastpatch.__file__).parent
CSRC = PACKAGE / "csrc"

# From the ground up: a file imports only from rooms below its own.
ROOMS = (
    # _native is the compiled side: below all, and imports none of us. Nor does sitecustomize, which runs in any Python.
    ("_errors", "_locks", "_version", "_html", "_environment", "_difference", "_native"),
    ("_inherit", "_inherit.sitecustomize"),
    ("_compilers", "_nvcc", "_counts"),
    ("_ninja",),
    ("_compile", "_cache"),
    ("_build",),
    ("_patching",),
    ("targets._explanation",),
    ("targets._replay",),
    ("targets._target", "targets._loss_bounds"),
    ("targets._loss_replay", "targets._sgd_replay"),
    ("targets._loss",),
    ("targets.huber_loss", "targets.sgd", "targets.smooth_l1_loss"),
    ("targets",),
    ("_proof", "_reproduction"),
    ("_verify",),
    ("_switch",),
    ("_scope",),
    ("_report", "_explicit"),
    ("nn.functional", "optim"),
    ("nn",),
    ("_notebook",),
    ("",),  # fastpatch/__init__.py
    ("testing._operands",),
    ("testing._comparison",),
    ("testing._case",),
    ("testing._loss_call", "testing._sgd_run", "testing._outcome"),
    ("testing.strategies",),
    ("testing._runner",),
    ("testing._main",),
    ("testing",),
    ("_process", "_cli._python", "_pytest_plugin"),
    ("_cli._children", "_cli._options", "_cli._doctor", "_cli._cache", "_cli._bench"),
    ("_cli._run", "_cli._commands"),
    ("_cli",),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(ROOMS) for name in names}


def module_name(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PYTHON = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def absolute(node, package):
    """The modules that a `from ... import` names, with dots resolved; "" is fastpatch itself."""
    base = ["fastpatch", *package.split(".")] if package else ["fastpatch"]
    origin = base[: len(base) - node.level + 1] if node.level else []
    origin = ".".join([*origin, *([node.module] if node.module else [])])
    # `from . import x` may name a module or something in the package.
    return [f"{origin}.{alias.name}" if f"{origin}.{alias.name}" in known() else origin for alias in node.names]


def known():
    return {f"fastpatch.{name}".rstrip(".") for name in LEVEL}


def imports(name, path):
    """All modules imported anywhere in a file, also inside functions."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from absolute(node, package)


def of_ours(modules):
    return {module.partition(".")[2] for module in modules if module.partition(".")[0] == "fastpatch"}


def test_every_python_file_has_a_room():
    assert set(PYTHON) <= set(LEVEL)


@pytest.mark.parametrize("name", PYTHON)
def test_a_file_imports_only_from_rooms_below(name):
    found = of_ours(imports(name, PYTHON[name]))
    assert [other for other in sorted(found) if LEVEL[other] >= LEVEL[name]] == []


def test_imports_are_found():
    """The test above can fail: these are known to be there."""
    assert {"_build", "_errors", "targets"} <= of_ours(imports("_switch", PYTHON["_switch"]))
    assert {
        "_difference",
        "_native",
        "_patching",
        "targets._explanation",
        "targets._replay",
        "targets._sgd_replay",
        "targets._target",
    } == of_ours(imports("targets.sgd", PYTHON["targets.sgd"]))
    assert {"targets._loss"} == of_ours(imports("targets.huber_loss", PYTHON["targets.huber_loss"]))
    assert {"targets.huber_loss", "targets.sgd", "targets.smooth_l1_loss"} <= of_ours(
        imports("targets", PYTHON["targets"])
    )


def test_only_patching_knows_wrapt():
    assert [name for name, path in PYTHON.items() if "wrapt" in {m.partition(".")[0] for m in imports(name, path)}] == [
        "_patching"
    ]


# --------------------------------------------------------------------------------------------------------------- C++


CPP = {str(path.relative_to(CSRC)): path for path in sorted(CSRC.rglob("*")) if path.suffix in (".h", ".cpp", ".cu")}
HEAVY = re.compile(
    r"ATen/ATen\.h|ATen/(core/)?Tensor|ATen/ops/|ATen/Functions|torch/|Python\.h|pybind11|c10/core/Tensor"
)


def code(path):
    """The text without comments and string literals."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
    return "\n".join(
        line if line.startswith("#include") else re.sub(r'"[^"\n]*"', '""', line) for line in text.split("\n")
    )


def includes(name):
    return re.findall(r'^#include [<"]([^>"]+)[>"]', code(CPP[name]), re.MULTILINE)


def own_includes(name):
    """Those that are files of ours, as paths from csrc."""
    for text in re.findall(r'^#include "([^"]+)"', code(CPP[name]), re.MULTILINE):
        yield os.path.normpath(os.path.join(os.path.dirname(name), text))


def room(name):
    return name.partition("/")[0] if "/" in name else "top"


BELOW = {
    "formulas": {"formulas"},
    "cpu": {"formulas", "cpu"},
    "cuda": {"formulas", "cuda"},
    "top": {"top", "cpu", "cuda"},
    "entries": {"top", "entries"},
}


@pytest.mark.parametrize("name", CPP)
def test_a_cpp_file_includes_only_from_rooms_below(name):
    found = list(own_includes(name))
    assert [other for other in found if other not in CPP] == []
    allowed = BELOW[room(name)] | ({"entries"} if name == "module.cpp" else set())
    assert [other for other in found if room(other) not in allowed] == []


def test_python_variable_is_included_once():
    assert [name for name in CPP if any("python_variable.h" in header for header in includes(name))] == [
        "python_tensor.cpp"
    ]


@pytest.mark.parametrize("name", [name for name in CPP if room(name) == "formulas"])
def test_formulas_have_no_loops(name):
    assert re.findall(r"\b(for|while|do|goto)\b", code(CPP[name])) == []


@pytest.mark.parametrize("name", [name for name in CPP if room(name) in ("formulas", "cpu", "cuda")])
def test_kernels_know_no_tensors_and_no_python(name):
    assert [header for header in includes(name) if HEAVY.search(header)] == []
    assert re.findall(r"\bat::Tensor\b|\bPyObject\b|\bTORCH_CHECK\b", code(CPP[name])) == []


def test_what_kernels_must_not_have_is_found_elsewhere():
    """The three tests above can fail."""
    assert any(HEAVY.search(header) for header in includes("guards.h"))
    assert re.search(r"\bfor\b", code(CPP["cpu/sgd.cpp"]))
    assert re.search(r"\bat::Tensor\b", code(CPP["sgd.cpp"]))


# ------------------------------------------------------------------------------------------------------------ targets


FILES = {**{f"{name or '__init__'}.py": path for name, path in PYTHON.items()}, **CPP}
# Whose a file is by its name: of one target, or of all losses. What reads an optimizer is the sgd target's.
OWNERS = {
    "smooth_l1_loss": r"smooth_l1_loss",
    "huber_loss": r"huber_loss",
    "losses": r"loss(es)?|_loss|l1_loss|lanes",
    "sgd": r"sgd|optimizer|owned",
}
# What is of one target whatever becomes of the others.
MUST_BE_FOUND = {
    "smooth_l1_loss": {"targets.smooth_l1_loss.py", "formulas/smooth_l1_loss.h"},
    "huber_loss": {"targets.huber_loss.py", "formulas/huber_loss.h"},
    "losses": {"targets._loss.py", "losses.cpp", "loss_node.cpp", "entries/losses.cpp", "cpu/loss_loops.h"},
    "sgd": {"targets.sgd.py", "sgd.cpp", "cpu/sgd.cpp", "formulas/sgd.h", "entries/optimizer_check.cpp"},
}
WORDS = {"smooth_l1_loss": r"smooth_?l1", "huber_loss": r"huber", "losses": r"loss", "sgd": r"\bsgd|sgd\b|optim"}
# A loss of two tensors is a formula, its patch points and a line in each of these.
TABLES = {"losses.h", "losses.cpp", "formulas/loss_formulas.h", "cpu/losses.cpp", "cuda/losses.cu"}


def files_of(owner):
    return {name for name in FILES if re.search(rf"(^|[/.])({OWNERS[owner]})(_\w+)?\.", name)}


def naming(pattern, names):
    return [name for name in sorted(names) if re.search(pattern, FILES[name].read_text(), re.IGNORECASE)]


@pytest.mark.parametrize(
    ("owner", "others"),
    [
        ("smooth_l1_loss", ["huber_loss", "sgd"]),
        ("huber_loss", ["smooth_l1_loss", "sgd"]),
        ("losses", ["sgd"]),
        ("sgd", ["smooth_l1_loss", "huber_loss", "losses"]),
    ],
)
def test_no_target_names_another(owner, others):
    mine = files_of(owner)
    assert mine >= MUST_BE_FOUND[owner]
    for other in others:
        assert not mine & files_of(other)
        assert naming(WORDS[other], mine) == []


def test_only_tables_name_a_loss():
    """What serves the losses serves them alike: nothing else in C++ tells one from another."""
    generic = set(CPP) - files_of("smooth_l1_loss") - files_of("huber_loss")
    words = f"{WORDS['smooth_l1_loss']}|{WORDS['huber_loss']}"
    assert {name for name in generic if re.search(words, code(CPP[name]), re.IGNORECASE)} == TABLES
    assert naming(words, {"targets._loss.py", "targets._target.py"}) == []


# ------------------------------------------------------------------------------------------------------- public face


PUBLIC = {
    "BuildError", "DifferenceWarning", "Explanation", "FallbackError", "Guard", "NativeBuildWarning", "Report",
    "__version__", "disable",
    "disabled", "enable", "enabled", "explain", "is_enabled", "report", "reset_report", "targets",
}  # fmt: skip


IPYTHON = {"load_ipython_extension", "unload_ipython_extension"}  # what it looks for in an extension


def test_public_names():
    assert set(fastpatch.__all__) == PUBLIC
    assert len(fastpatch.__all__) == len(PUBLIC)
    # These are there once they were imported, as other tests do.
    names = {name for name in vars(fastpatch) if name[0] not in "_@"} - {
        "testing",
        "nn",
        "optim",
    }  # @: pytest's own, in its plugins
    assert names == (PUBLIC - {"__version__"}) | IPYTHON
    assert callable(fastpatch.targets)


def test_public_names_have_docstrings():
    assert [name for name in PUBLIC - {"__version__"} if not getattr(fastpatch, name).__doc__] == []


IMPORT = """
import json, sys
import torch, torch.nn.functional as F, torch.optim
points = [(F, "smooth_l1_loss"), (torch._C._nn, "smooth_l1_loss"), (F, "huber_loss"), (torch._C._nn, "huber_loss"),
          (torch.optim.SGD, "step"), (sys.modules["torch.optim.sgd"], "sgd")]
stock = [vars(owner)[name] for owner, name in points]
before, events = set(sys.modules), []
sys.addaudithook(lambda event, args: events.append(event) if event in ("subprocess.Popen", "os.fork", "socket.connect",
                 "os.mkdir", "os.remove", "os.rename", "os.posix_spawn", "os.system") else None)
import fastpatch
print(json.dumps({
    "events": events,
    "patched": [name for (owner, name), was in zip(points, stock) if vars(owner)[name] is not was],
    "new": sorted({name.partition(".")[0] for name in set(sys.modules) - before}),
    "new_in_torch": sorted(name for name in set(sys.modules) - before if name.startswith("torch.")),
    "native": "fastpatch._native" in sys.modules,
    "enabled": fastpatch.is_enabled(),
}))
"""


def test_import_compiles_nothing_patches_nothing_and_loads_nothing_heavy(tmp_path):
    done = run_text(IMPORT, folder=tmp_path, FASTPATCH_CACHE_DIR=str(tmp_path / "cache"))
    seen = json.loads(done.stdout)
    assert not {"setuptools", "filelock", "ninja", "sympy", "numpy"} & set(seen["new"])
    assert "torch.utils.cpp_extension" not in seen["new_in_torch"]
    assert seen["new"] == ["fastpatch"]
    assert (seen["events"], seen["patched"], seen["native"], seen["enabled"]) == ([], [], False, False)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("first", ["fastpatch.targets", "fastpatch._switch", "fastpatch._build", "fastpatch"])
def test_the_public_names_come_with_their_first_use_whatever_was_imported_before(tmp_path, first):
    text = f"import {first}\nimport fastpatch\nprint(fastpatch.targets(), fastpatch.Report.__name__)"
    done = run_text(text, folder=tmp_path)
    assert done.stdout.startswith(f"{fastpatch.targets()} Report")


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="module 'fastpatch' has no attribute 'enabel'"):
        fastpatch.enabel  # noqa: B018
    assert set(fastpatch.__all__) <= set(dir(fastpatch))


@pytest.mark.parametrize(
    "name", ["nn.SmoothL1Loss", "nn.functional.huber_loss", "optim.SGD", "testing.run", "testing.strategies.loss_calls"]
)
def test_what_lies_in_packages_is_there_without_importing_them(tmp_path, name):
    assert run_text(f"import fastpatch\nfastpatch.{name}\nprint('there')", folder=tmp_path).stdout == "there\n"


def test_a_name_that_is_not_in_a_package():
    with pytest.raises(AttributeError, match=r"module 'fastpatch\.testing' has no attribute 'strategy'"):
        fastpatch.testing.strategy  # noqa: B018
    assert {"nn", "optim", "testing"} <= set(dir(fastpatch))
    assert {"run", "strategies"} <= set(dir(fastpatch.testing))
