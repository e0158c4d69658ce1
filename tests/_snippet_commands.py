"""The commands of the documentation: run in a folder with a small train.py, or, where that can't be, checked in another
way. What isn't run as it stands is in EXCEPTIONS, with the reason."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from _scripts import environment_of_scripts
from _snippets import ROOT

from fastpatch import _compile
from fastpatch._cli import _commands, _options

Check = Callable[["Command"], None]


@dataclass(frozen=True)
class Command:
    """A line of a shell, without its comment, which may name more options."""

    text: str
    comment: str = ""

    @property
    def bare(self) -> str:
        """Without the variables that are set for it."""
        return re.sub(r"^([A-Z_]+=\S* +)+", "", self.text)

    @property
    def words(self) -> list[str]:
        return shlex.split(self.bare)

    def options(self) -> list[str]:
        """Those that it or its comment names. ``--help`` is everywhere."""
        return re.findall(r"(?<!\S)--[a-z][\w-]*", f"{self.text} {self.comment}")


@dataclass(frozen=True)
class Exceptional:
    """What is done with commands that fit a pattern, instead of running them as they stand, and why.

    Attributes:
        check: instead of running it.
        more: words that are added when it is run.
        variables: set when it is run.
    """

    pattern: str
    why: str
    check: Check | None = None
    more: str = ""
    variables: tuple[tuple[str, str], ...] = ()


def is_a_sound_script(command: Command) -> None:
    words = command.words
    script = ROOT / words[words[0] == "bash"]
    assert words[0] == "bash" or os.access(script, os.X_OK), f"{script.name} can't be executed"
    subprocess.run(["bash", "-n", str(script)], check=True)


def names_extras(command: Command) -> None:
    _, _, rest = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")
    known = re.findall(r"^(\w+) = \[", rest.partition("\n[")[0], re.MULTILINE)
    for word in command.words[2:]:
        package = re.fullmatch(r"(?:fastpatch|\.)(?:\[([\w,]+)\])?|-e|--no-index|--no-build-isolation|torch\b.*", word)
        assert package, f"what is {word!r}?"
        assert set(filter(None, (package[1] or "").split(","))) <= set(known), f"{word}: extras are {known}"


def has_a_configuration(command: Command) -> None:
    assert (ROOT / ".pre-commit-config.yaml").exists()


def names_files(command: Command) -> None:
    for file, _, name in (word.partition("::") for word in command.words if word.startswith("tests/")):
        assert re.search(rf"^def {name or 'test_'}", (ROOT / file).read_text(), re.MULTILINE), f"{file} has no {name}"


def is_usage(command: Command) -> None:
    assert command.text in _options.USAGE


def has_known_options(command: Command) -> None:
    """That is checked of every command."""


EXCEPTIONS = (
    Exceptional(r"scripts/(demo|test)\.sh.*", "installs torch from the network; CI runs it", is_a_sound_script),
    Exceptional(r"bash \.ci/run", "what runs these tests", is_a_sound_script),
    Exceptional(r".*scripts/gpu_check\.sh", "needs a GPU", is_a_sound_script),
    Exceptional(r"pip install .*", "takes packages from the network", names_extras),
    Exceptional(r"pre-commit install", "changes the checkout it is run in", has_a_configuration),
    Exceptional(r"apt-get .*", "changes the system it is run in", lambda command: None),
    Exceptional(r"python -m fastpatch( \[options\].*)?", "a pattern, not a command", is_usage),
    Exceptional(r"python -m fastpatch build --\w+", "compiles for minutes; test_cli_commands.py", has_known_options),
    Exceptional(r"gdb .*", "with the library for gdb, and gdb is seldom there", lambda command: None),
    Exceptional(r"python -m fastpatch bench", "twenty seconds; test_cli_commands.py shortens it", has_known_options),
    Exceptional(r"python -O .*", "reads all of torch anew, ten seconds; test_cli_like_python.py", has_known_options),
    Exceptional(r".*-m torch\.distributed\.run .*", "ten seconds; test_cli_run.py has one", has_known_options),
    Exceptional(r".*cache clear", "must not find this machine's", variables=(("FASTPATCH_CACHE_DIR", "empty cache"),)),
    Exceptional(r"(python -m )?pytest .*\btests/.*", "part of this suite", names_files),
    Exceptional(r"python -m fastpatch selftest.*", "20 seconds", more="--examples 1"),
    Exceptional(r"python scripts/bench\.py.*", "minutes", more="--rounds 1 --budget 0.0001 --only refused"),
    Exceptional(r"ninja .*", "compiles for a minute; what it would do is said", more="-n"),
)

# What may be run: nothing that changes more than the folder it is in.
HARMLESS = re.compile(r"(python3?|fastpatch|pytest|ninja|mkdir|sh -c)\b.*")
# What is taken for a command in a text.
COMMAND = re.compile(
    r"([A-Z_]+=\S+ )*((python3?|pip|pytest|pre-commit|bash|ninja|gdb|docker|apt-get|c\+\+) \S.*"
    r"|fastpatch (doctor|build|cache|bench|selftest|--?\w|\S+\.py).*|scripts/\w+\.sh.*|(mkdir|export) .*)"
)


def commands(text: str) -> list[Command]:
    """Those of a block, one a line; a backslash joins lines."""
    lines = text.replace("\\\n", " ").splitlines()
    return [
        Command(" ".join(code.split()), comment)
        for code, _, comment in (re.split(r"(?<!\S)(#) *", f"{line} # ", maxsplit=1) for line in lines if line.strip())
        if code.strip()
    ]


@functools.cache
def help_of(*words: str) -> str:
    """What a command of ours, or a script, says of its options."""
    if words[:3] == ("python", "-m", "fastpatch"):
        if words[3:4] and words[3] in _options.COMMANDS:
            out = io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
                _commands.command(words[3], ["--help"])
            return out.getvalue()
        return _options.USAGE
    if words[0] == "fastpatch":
        return help_of("python", "-m", *words)
    if words[0] == "pytest":
        return (ROOT / "fastpatch/_pytest_plugin.py").read_text()
    scripts = [word.replace("demo.sh", "demo.py") for word in words if word.startswith("scripts/")]
    return "".join((ROOT / script).read_text() for script in scripts)


def check_options(command: Command) -> None:
    """Is there every option that it names? Those after a program are the program's."""
    words = command.words
    if not (help := help_of(*words)):
        return
    program = re.search(r"(\w+\.py|-m (?!fastpatch)\S+)( .*)?$", command.text) if help is _options.USAGE else None
    own = Command(command.text[: program.start()] if program else command.text, command.comment)
    for option in own.options():
        assert re.search(rf"(?<![\w-]){option}(?![\w-])", help), f"{command.text}: no option {option}"


class Playground:
    """A folder in which commands are run."""

    TRAIN = """\
import torch
import fastpatch
fastpatch.enable()  # so that a variable with a wrong value is an error
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(2):
    loss = torch.nn.functional.smooth_l1_loss(model(torch.ones(2, 3)), torch.zeros(2, 1))
    loss.backward()
    optimizer.step()
"""
    TEST = "import fastpatch\n\ndef test_it_is_on():\n    assert fastpatch.is_enabled()\n"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("train.py", "script.py", "package/module.py"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(self.TRAIN)
        (folder / "test_theirs.py").write_text(self.TEST)
        (folder / "scripts").symlink_to(ROOT / "scripts")
        python = shlex.quote(sys.executable)
        ours = {"python": "", "python3": "", "fastpatch": "-m fastpatch", "pytest": "-m pytest -p no:cacheprovider"}
        programs = {name: f"{python} {words}" for name, words in ours.items()} | {"ninja": _compile.find_ninja()}
        (folder / "bin").mkdir()
        for name, command in programs.items():
            program = folder / "bin" / name
            program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
            program.chmod(0o755)
        self._done: dict[tuple[str, ...], None] = {}

    def run(self, command: Command, variables: dict[str, str]) -> None:
        """Its exit status must be 0. The same again isn't run again."""
        key = (command.text, *map("=".join, sorted(variables.items())))
        if key in self._done:
            return
        env = environment_of_scripts(**variables, TMPDIR=str(self.folder))
        env["PATH"] = f"{self.folder / 'bin'}{os.pathsep}{env['PATH']}"
        if not any(point.value == "fastpatch._pytest_plugin" for point in entry_points(group="pytest11")):
            env["PYTEST_PLUGINS"] = "fastpatch._pytest_plugin"
        done = subprocess.run(
            ["bash", "-ec", command.text], cwd=self.folder, env=env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{command.text}: status {done.returncode}\n{done.stdout}{done.stderr}"
        self._done[key] = None

    def check(self, command: Command, variables: dict[str, str] | None = None) -> None:
        """Runs it, or does what EXCEPTIONS says. A command that isn't there and isn't harmless is an error."""
        rule = next((rule for rule in EXCEPTIONS if re.fullmatch(rule.pattern, command.bare)), None)
        assert rule or HARMLESS.fullmatch(command.bare), f"{command.text!r}: neither harmless nor in EXCEPTIONS"
        check_options(command)
        if rule is not None and rule.check is not None:
            rule.check(command)
        elif rule is not None:
            self.run(Command(f"{command.text} {rule.more}"), {**(variables or {}), **dict(rule.variables)})
        else:
            self.run(command, variables or {})

    def check_all(self, text: str) -> None:
        """A block of commands; what one exports, those after it see."""
        variables: dict[str, str] = {}
        found = commands(text)
        assert found
        for command in found:
            if command.words[:1] == ["export"]:
                variables |= dict(word.split("=", 1) for word in command.words[1:])
            else:
                self.check(command, variables)
