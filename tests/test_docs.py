"""The documentation names what there is."""

import re
from pathlib import Path

import fastpatch
from fastpatch import _switch

ROOT = Path(__file__).resolve().parents[1]


def test_every_reason_is_documented_with_its_sentence() -> None:
    with fastpatch.enabled():
        from fastpatch import _native

        known = _native.reasons()
    del known["served"]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", (ROOT / "docs/reasons.md").read_text(), re.MULTILINE))
    assert {code: rows.get(code) for code in known} == known
    assert set(rows) - set(known) == {
        "disabled", "early_bound", "not_built", "switched_off", "unsupported_platform",
    }  # fmt: skip


def test_switches_are_those_of_the_compiled_side() -> None:
    header = (ROOT / "fastpatch/csrc/entry.h").read_text()
    values = dict(re.findall(r"(\w+) = (\d)", re.search(r"enum class Switch[^{]*{([^}]*)}", header)[1]))
    for name, value in values.items():
        assert getattr(_switch, name.upper()) == int(value)


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
