"""What the documentation names in `backticks` is there: options, settings, magics, names of Python, and on the page for
contributors every path and identifier."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _snippet_commands import COMMAND, Command, check_options, help_of
from _snippets import ROOT, SPANS

import fastpatch
import fastpatch.testing
from fastpatch import _environment, _ninja
from fastpatch._cli import _options


def spans(pattern: str, page: str = "") -> list[str]:
    """Those of all pages, or of one, each once."""
    found = (span.text for span in SPANS if re.fullmatch(pattern, span.text) and span.page.startswith(page))
    return list(dict.fromkeys(found))


# ----------------------------------------------------------------------------------------------------------- options


OTHERS_OPTIONS = {"-", "-I", "-E", "-S", "-lr", "-G"}  # Python's own; an expression; nvcc's


@functools.cache
def all_options() -> str:
    """Every text that says which options there are: of the command line, pytest, scripts, compilers."""
    helps = [help_of("python", "-m", "fastpatch", name) for name in _options.COMMANDS]
    scripts = [path.read_text() for path in (ROOT / "scripts").glob("*.py")]
    compilers = [_ninja.FLAGS, _ninja._DEBUG, _ninja._DEBUG_CUDA]
    return "\n".join([_options.USAGE, help_of("pytest"), *compilers, *helps, *scripts])


@pytest.mark.parametrize("text", spans(r"-\S*( .*)?"))
def test_option(text: str) -> None:
    option = re.split(r"[ =]", text)[0]
    assert option in OTHERS_OPTIONS or re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", all_options())


@pytest.mark.parametrize("text", spans(rf"({'|'.join(_options.COMMANDS)}) .*"))
def test_sub_command(text: str) -> None:
    check_options(Command(f"python -m fastpatch {text.replace('[', ' ').replace(']', ' ')}"))
    word, _, action = text.partition(" ")
    assert word != "cache" or action in help_of("python", "-m", "fastpatch", "cache")


# ---------------------------------------------------------------------------------------------------------- settings


OTHERS_SETTINGS = {"ATEN_CPU_CAPABILITY=default"}  # torch's own; tests/_capability.py uses it


@pytest.fixture
def _logger_is_as_it_was() -> Iterator[None]:
    logger = logging.getLogger("fastpatch")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers


@pytest.mark.usefixtures("_logger_is_as_it_was")
@pytest.mark.parametrize("text", sorted(set(spans(r"[A-Z_]+=\S+")) - OTHERS_SETTINGS))
def test_setting(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does what it is for, after enable()."""
    name, _, value = text.partition("=")
    assert name in _environment.VARIABLES
    for variable in _environment.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, value)
    fastpatch.enable()
    on = {target for target in fastpatch.targets() if fastpatch.is_enabled(target)}
    expected = {"FASTPATCH": set(), "FASTPATCH_ONLY": set(value.split(","))}.get(name, set(fastpatch.targets()))
    assert on == expected
    call = functools.partial(F.smooth_l1_loss, torch.ones(3), torch.ones(3, dtype=torch.float64))
    if name == "FASTPATCH_STRICT":
        with pytest.raises(fastpatch.FallbackError):
            call()
    else:
        call()
    if name == "FASTPATCH_VERIFY":
        assert _environment.read(fastpatch.targets()).verify == float(value)
    if name == "FASTPATCH_LOG":
        assert logging.getLogger("fastpatch").level == getattr(logging, value.upper())


# ------------------------------------------------------------------------------------------------------------ magics


def test_magics(tmp_path: Path) -> None:
    from test_notebook import SETUP, run  # which skips where there is no IPython

    magics = spans(r"%.*")
    assert {"%load_ext fastpatch", "%%fastpatch"} <= set(magics)
    outcomes = run(tmp_path, SETUP, *(f"{text}\npass" if text.startswith("%%") else text for text in magics))
    assert [outcome["error"] for outcome in outcomes] == [None] * len(outcomes), json.dumps(outcomes)


# ------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("text", spans(r"(fastpatch|torch|F)(\.\w+)+(\(.*\))?(\.\w+(\(.*\))?)*"))
def test_name(text: str) -> None:
    name = re.sub(r"\([^)]*\)", "()", text)
    assert resolve(name) is not None


def resolve(name: str) -> Any:
    """What a dotted name is, None if it is nothing. ``()`` calls what is before it, but at the end."""
    first, *rest = name.removesuffix("()").split(".")
    found: Any = {"F": F}.get(first) or importlib.import_module(first)
    for i, word in enumerate(rest):
        try:
            found = getattr(found, word.removesuffix("()"))
        except AttributeError:
            try:
                found = importlib.import_module(".".join([first, *rest[: i + 1]]))
            except ImportError:
                return None
        found = found() if word.endswith("()") else found
    return found


def test_a_name_that_is_not_there_is_found() -> None:
    assert resolve("fastpatch.enabel") is None
    assert resolve("fastpatch.report().kept_bites") is None
    assert resolve("torch.nn.functional.huber") is None
    assert resolve("torch.nn.functional.huber_loss") is F.huber_loss


# ------------------------------------------------------------------------------------------- the page for contributors


PAGE = "docs/adding-a-target.md"


@functools.cache
def sources() -> str:
    """All of ours but this test and pages."""
    files = [path for folder in ("fastpatch", "tests", "scripts") for path in sorted((ROOT / folder).rglob("*"))]
    files = [path for path in files if path.suffix in (".py", ".pyi", ".h", ".cpp", ".cu", ".sh")]
    return "\n".join(path.read_text() for path in files if not path.name.startswith(("test_docs", "_snippet")))


def is_there(text: str) -> bool:
    """A path from the root or the package's folder, a command, a name of torch's, or a text of the sources, whole."""
    if COMMAND.fullmatch(text) or text in OTHERS_SETTINGS:
        return True  # test_docs_snippets.py runs commands
    if any(list(base.glob(text.strip("/"))) for base in (ROOT, ROOT / "fastpatch", ROOT / "fastpatch/csrc")):
        return True
    if re.fullmatch(r"(torch|F|fastpatch)(\.\w+)+", text):
        return resolve(text) is not None
    return re.search(rf"(?<!\w){re.escape(text.removesuffix('()'))}(?!\w)", sources()) is not None


@pytest.mark.parametrize("text", spans(".*", PAGE))
def test_what_the_page_for_contributors_names_is_there(text: str) -> None:
    assert is_there(text), text


def test_what_is_not_there_is_found() -> None:
    assert spans(".*", PAGE)
    for text in ("csrc/formulas/hubert_loss.h", "FASTPATCH_LOSES", "F.huber", "loss_formula", "Reasons::"):
        assert not is_there(text), text
    for text in ("csrc/formulas/huber_loss.h", "FASTPATCH_LOSSES", "F.huber_loss", "check_loss()", "tests/"):
        assert is_there(text), text
