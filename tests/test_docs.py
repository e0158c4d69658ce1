"""The documentation names what there is."""

import re
from pathlib import Path

import torch
import torch.nn.functional as F

import fastpatch
from fastpatch import _proof
from fastpatch.targets._explanation import ADVICE

ROOT = Path(__file__).resolve().parents[1]


def test_every_reason_is_documented_with_its_sentence_and_advice() -> None:
    with fastpatch.enabled():
        from fastpatch import _native

        known = _native.reasons()
    del known["served"]
    lines = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \|$", (ROOT / "docs/reasons.md").read_text(), re.MULTILINE)
    rows = {code: (sentence, advice) for code, sentence, advice in lines}
    assert {code: rows.get(code) for code in known} == known
    assert {code: rows[code][1] for code in set(rows) - set(known)} == ADVICE
    assert set(ADVICE) == {"disabled", "early_bound", "not_built", "switched_off", "unsupported_platform"}


def test_every_advice_is_a_short_text_without_a_stop() -> None:
    with fastpatch.enabled():
        from fastpatch import _native

        advices = {code: advice for code, (_, advice) in _native.reasons().items()} | ADVICE
    assert advices.pop("served") == ""
    for code, advice in advices.items():
        assert 10 < len(advice) < 160, code
        assert advice[0].islower() and advice[-1] != "." and "|" not in advice, code


def output(marker: str) -> str:
    """What the README says that a command prints: from this line to the end of its block."""
    text = (ROOT / "README.md").read_text()
    return text[text.index(marker) :].partition("\n```")[0]


def test_the_readme_shows_the_true_explanation() -> None:
    with fastpatch.enabled():
        prediction, labels = torch.ones(3), torch.ones(3)
        seen = fastpatch.explain(F.smooth_l1_loss, prediction, labels.double())
    assert output("smooth_l1_loss: stock, because of dtype") == str(seen)


def test_the_readme_shows_the_true_report() -> None:
    with fastpatch.enabled():
        from fastpatch import _native

        sentence, advice = _native.reasons()["dtype"]
    counts = {"smooth_l1_loss": (800, {"dtype": 1}), "huber_loss": (0, {}), "sgd": (24800, {})}
    lines = {"smooth_l1_loss": {"dtype": "/home/me/train.py:31"}}
    report = fastpatch.Report(counts, {"dtype": sentence}, first_lines=lines, _advice={"dtype": advice})
    assert output("target                   fast").partition("\n>>> ")[0] == str(report)


def test_switches_are_those_of_the_compiled_side() -> None:
    header = (ROOT / "fastpatch/csrc/entry.h").read_text()
    values = dict(re.findall(r"(\w+) = (\d)", re.search(r"enum class Switch[^{]*{([^}]*)}", header)[1]))
    for name, value in values.items():
        assert getattr(_proof, name.upper()) == int(value)


def test_readme_links_exist() -> None:
    for name in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / name).read_text()):
            assert (ROOT / target).exists(), f"{name} links to {target}"


def test_every_option_command_and_variable_is_documented() -> None:
    from fastpatch import _environment
    from fastpatch._cli import _options

    page = (ROOT / "docs/cli.md").read_text()
    for option in re.findall(r"^  (?:-\w, )?(--?[\w-]+)", _options.USAGE.partition("options:")[2], re.MULTILINE):
        assert f"`{option}" in page, option
    for name in _options.COMMANDS:
        assert f"**`{name}" in page, name
        assert f"python -m fastpatch {name}" in (ROOT / "README.md").read_text()
    for variable in _environment.VARIABLES:
        for text in (page, (ROOT / "README.md").read_text()):
            assert re.search(rf"^\| `{variable}[`=]", text, re.MULTILINE), variable


def test_the_json_of_the_documentation_is_a_report() -> None:
    [text] = re.findall(r"```json\n(.*?)```", (ROOT / "docs/cli.md").read_text(), re.DOTALL)
    report = fastpatch.Report.from_json(text)
    assert (report.processes, report.to_dict()) == (3, {"sgd": {"fast": 3, "fallback": {"sparse_grad": 1}}})
