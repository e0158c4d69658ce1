"""Every snippet of the documentation works, and shows what is shown.

A block of a kind that no rule here knows fails: there is nothing to do for a new Python block but to put what it takes
for granted into PREAMBLE, and nothing for a command but, where it can't be run, a line of EXCEPTIONS.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from _snippet_commands import COMMAND, EXCEPTIONS, Command, Playground, commands
from _snippets import BLOCKS, PAGES, ROOT, SPANS, Snippet, read

import fastpatch
from fastpatch.testing import main as selftest

# What Python snippets take for granted.
PREAMBLE = """
import torch
import torch.nn.functional as F
import fastpatch

model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
prediction, labels = model(torch.ones(2, 3)), torch.ones(2, 1)
F.smooth_l1_loss(prediction, labels).backward()

def train():
    optimizer.step()
"""
# Further, where a report is shown: the training that it is of.
TRAINING = f"""\
fastpatch.enable()
fastpatch.reset_report()
parameters = [torch.zeros(2, requires_grad=True) for _ in range(31)]
optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
for _ in range(800):
    optimizer.zero_grad()
    F.smooth_l1_loss(torch.stack(parameters), torch.ones(31, 2)).backward()
    optimizer.step()
{"#" * 10}
F.smooth_l1_loss(prediction, labels.double())
""".replace("#" * 10, "\n" * 21)


def namespace(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(PREAMBLE, names)
    if "report()" in text:
        exec(compile(TRAINING, "/home/me/train.py", "exec"), names)
    return names


def run_python(block: Snippet) -> None:
    names = namespace(block.text)
    if ">>>" not in block.text:
        exec(compile(block.text, str(block), "exec"), names)
        return
    for example in doctest.DocTestParser().get_examples(block.text):
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            exec(compile(example.source, f"{block} + {example.lineno}", "single"), names)
        found, expected = shown.getvalue(), example.want
        if "explain(" in example.source:  # what follows is for people
            found, expected = (text.partition("\n")[0] for text in (found, expected))
        assert found == expected, f"{block}: {example.source}"


def check_excerpt(block: Snippet) -> None:
    """A comment that names a file, and lines of it; ``...`` stands for those that were left out."""
    named, _, text = block.text.partition("\n")
    path = named.strip("/# ")
    lines = plain((ROOT / path).read_text())
    for part in re.split(r"^ *(?://|#)? *\.\.\.\n", text, flags=re.MULTILINE):
        assert plain(part).strip() and plain(part) in lines, f"{path} has no lines\n{part}"


def plain(text: str) -> str:
    """Lines without indentation, and without the backslash at the end of those of a macro."""
    return "\n" + "".join(line.rstrip("\\ ").strip() + "\n" for line in text.strip("\n").splitlines())


def check_dockerfile(block: Snippet, playground: Playground) -> None:
    variables: dict[str, str] = {}
    documented = (ROOT / "docs/build.md").read_text() + (ROOT / "docs/cli.md").read_text()
    for line in commands(block.text):
        word, _, rest = line.text.partition(" ")
        if word == "RUN":
            for text in rest.split(" && "):
                playground.check(Command(text), variables)
        elif word == "ENV":
            name, _, value = rest.partition("=")
            assert re.search(rf"^\|.*`{name}`.*\|", documented, re.MULTILINE), f"{name} is no variable of ours"
            if name != "FASTPATCH_CACHE_DIR":  # that is the image's; what has been built is in ours
                variables[name] = value
        elif word == "CMD":
            playground.check(Command(" ".join(json.loads(rest))), variables)
        else:
            assert word in ("FROM", "COPY", "USER", "WORKDIR"), line


def check_listing(block: Snippet) -> None:
    """Files and folders of the package, and what they are for."""
    for line in block.text.splitlines():
        path, _, words = re.sub(r"<\w+>", "*", line).partition(" ")
        assert words and list((ROOT / "fastpatch").glob(path.rstrip("/"))), line


def check_selftest_output(block: Snippet) -> None:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert selftest(["--examples", "12", "--seed", "3", "--target", "sgd"]) == 0
    assert forms(block.text) <= forms(shown.getvalue())


def forms(output: str) -> set[str]:
    """Kinds of lines, numbers being alike, dtypes and reasons too; the first line as it is."""
    first, *lines = output.splitlines()
    kinds = {re.sub(r"\d+", "0", line) for line in lines if line != "..."}
    kinds = {re.sub(r"^(\w+ +)\w+( +0){3}$", r"\1dtype numbers", line) for line in kinds}
    codes = "|".join(sorted(_reasons()))
    return {first, *(re.sub(rf"\b({codes}) 0(, ({codes}) 0)*$", "reasons", line) for line in kinds)}


def _reasons() -> set[str]:
    return set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/reasons.md").read_text(), re.MULTILINE))


# What is printed by something, by its first line.
OUTPUTS = {"target           dtype        compared       fast   fallback": check_selftest_output}


@pytest.fixture(scope="module")
def playground(tmp_path_factory: pytest.TempPathFactory) -> Playground:
    with fastpatch.enabled():
        pass  # builds the library if need be
    return Playground(tmp_path_factory.mktemp("playground"))


def check_block(block: Snippet, playground: Playground) -> None:
    first = block.text.partition("\n")[0]
    if block.kind in ("cpp", "python") and re.match(r"(#|//) [\w/]+\.\w+$", first):
        check_excerpt(block)
    elif block.kind == "python":
        run_python(block)
    elif block.kind == "indented" and first.startswith("csrc/"):
        check_listing(block)
    elif block.kind in ("indented", "sh"):
        playground.check_all(block.text)
    elif block.kind == "dockerfile":
        check_dockerfile(block, playground)
    elif block.kind == "json":
        json.loads(block.text)
    elif block.kind == "output" and first in OUTPUTS:
        OUTPUTS[first](block)
    else:
        pytest.fail(f"{block}: no rule knows what this block of kind {block.kind!r} is\n{block.text}")


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_block(block: Snippet, playground: Playground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_block(block, playground)


def spans(pattern: str) -> list[str]:
    return list(dict.fromkeys(span.text for span in SPANS if re.fullmatch(pattern, span.text)))


@pytest.mark.parametrize("text", spans(COMMAND.pattern))
def test_command_in_the_text(text: str, playground: Playground) -> None:
    playground.check(Command(text))


# ------------------------------------------------------------------------------------------- that nothing is left out


def planted(text: str) -> Snippet:
    [block] = read("README.md", text)[0]
    return block


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("    wget example.com", "neither harmless nor in EXCEPTIONS"),
        ("    python -m fastpatch --reprot train.py", "no option --reprot"),
        ("    python -m fastpatch selftest  # --exmples 3", "no option --exmples"),
        ("    fastpatch no_such.py", "status 2"),
        ("    FASTPATCH_ONLY=sdg python train.py", "unknown target 'sdg'"),
        ("    pip install '.[selftests]'", "extras are"),
        ("    scripts/tests.sh", "neither harmless"),
        ("    csrc/formula/  one formula a file", "csrc/formula/"),
        ("    pytest tests/test_docs.py::test_nothing", "has no test_nothing"),
        ("```python\nfastpatch.enabel()\n```", "enabel"),
        ("```python\n>>> fastpatch.is_enabled()\nTrue\n```", "False"),
        ("```python\n>>> print(fastpatch.explain(F.smooth_l1_loss, 1, 2))\nfast\n```", "isn't on"),
        ("```cpp\n// fastpatch/csrc/reasons.h\nX(fused)\n```", "has no lines"),
        ("```json\n{1}\n```", "Expecting property name"),
        ("```dockerfile\nENV FASTPATCH_CASH_DIR=/opt\n```", "FASTPATCH_CASH_DIR is no variable"),
        ("```dockerfile\nRUN python -m fastpatch bild\n```", "status 2"),
        ("```dockerfile\nFORM python\n```", "FORM"),
        ("```\nsomething\n```", "no rule knows"),
        ("```yaml\na: 1\n```", "no rule knows"),
    ],
)
def test_a_wrong_snippet_is_found(
    text: str, complaint: str, playground: Playground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BaseException) as caught:  # pytest.fail is no Exception
        check_block(planted(text), playground)
    assert complaint in str(caught.value)


def test_blocks_and_spans_are_found() -> None:
    text = "a `b`\n\n1. c:\n\n   ```sh\n   d\n   ```\n\n       e\n\n       f `g`\n\n`h\ni` j\n"
    blocks, names = read("README.md", text)
    assert [(block.line, block.kind, block.text) for block in blocks] == [
        (6, "sh", "d\n"),
        (9, "indented", "e\n\nf `g`\n"),
    ]
    assert [(span.line, span.text) for span in names] == [(1, "b"), (13, "h i")]
    with pytest.raises(ValueError, match=r"README.md:1: this fence is never closed"):
        read("README.md", "```python\na\n")


def test_no_page_is_left_out() -> None:
    pages = {str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]}
    assert pages - {"CHANGELOG.md"} == set(PAGES)
    assert {"README.md", "CONTRIBUTING.md", "docs/cli.md"} <= {block.page for block in BLOCKS}


def test_every_exception_is_needed() -> None:
    texts = [command.bare for block in BLOCKS for command in commands(block.text) if block.kind in ("indented", "sh")]
    runs = [
        part for block in BLOCKS if block.kind == "dockerfile" for part in re.findall(r"(?:RUN|&&) (.*)", block.text)
    ]
    texts += [*runs, *(Command(text).bare for text in spans(COMMAND.pattern))]
    assert [rule.pattern for rule in EXCEPTIONS if not any(re.fullmatch(rule.pattern, text) for text in texts)] == []
