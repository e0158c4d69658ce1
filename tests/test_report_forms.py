"""The forms of a Report besides its table (JSON, HTML), sums of reports, and an Explanation in a notebook."""

import html.parser
import json

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import fastpatch
from fastpatch import Report

ALL = fastpatch.targets()
REASONS = {"dtype": "a <dtype> & more", "device": "a tensor is not on the CPU"}
counts = st.integers(0, 2**40)
targets = st.dictionaries(
    st.sampled_from(ALL), st.tuples(counts, st.dictionaries(st.sampled_from(list(REASONS)), counts))
)
ADVICE = {"dtype": "cast <it> & " + "do more " * 30}
reports = st.builds(
    Report, targets, st.just(REASONS), counts, st.integers(1, 10**6), _advice=st.sampled_from([{}, ADVICE])
)


def some():
    """Of this process: each target served, and one call refused."""
    fastpatch.enable()
    x, y = torch.ones(3), torch.zeros(3)
    F.smooth_l1_loss(x, y)
    F.huber_loss(x, y)
    F.huber_loss(x, y.double())
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    torch.optim.SGD([parameter], lr=0.1).step()
    return fastpatch.report()


EXPECTED = {
    "smooth_l1_loss": {"fast": 1, "fallback": {}},
    "huber_loss": {"fast": 1, "fallback": {"dtype": 1}},
    "sgd": {"fast": 1, "fallback": {}},
}


class Text(html.parser.HTMLParser):
    """What a reader sees of HTML, which must close all that it opens and hold nothing but what we put there."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.words = [], []

    def handle_starttag(self, tag, attrs):
        assert tag in {"table", "thead", "tbody", "tr", "th", "td", "strong", "code", "span", "p"}
        assert attrs == []
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        assert self.open
        self.words.append(data)


def read(text):
    parser = Text()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser.words


# -------------------------------------------------------------------------------------------------------------- JSON


def test_json_of_this_process():
    data = json.loads(some().to_json())
    assert data["targets"] == EXPECTED
    assert (data["processes"], data["kept_bytes"]) == (1, 0)
    assert list(data["reasons"]) == ["dtype"]
    assert data["reasons"]["dtype"].startswith("a dtype or a mixture that is not served")
    assert list(data["advice"]) == ["dtype"]
    assert data["advice"]["dtype"].startswith("give both one floating-point dtype")


@given(reports)
def test_json_and_back(report):
    again = Report.from_json(report.to_json())
    assert again.to_dict() == report.to_dict()
    assert (again.kept_bytes, again.processes) == (report.kept_bytes, report.processes)
    assert str(again) == str(report)
    assert again._repr_html_() == report._repr_html_()
    assert again.to_json() == report.to_json()
    assert Report.from_json(report.to_json().encode()) == again


GOOD = {
    "format": 1,
    "processes": 1,
    "kept_bytes": 0,
    "targets": {"sgd": {"fast": 1, "fallback": {"x": 2}}},
    "reasons": {"x": "y"},
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, "its format is 2, not 1"),
        ({"processes": -1}, "-1 is no count"),
        ({"kept_bytes": "3"}, "'3' is no count"),
        ({"targets": {"sgd": {"fast": True, "fallback": {}}}}, "True is no count"),
        ({"targets": {"sgd": {"fast": 1}}}, "no 'fallback'"),
        ({"targets": [1]}, "is not a report"),
        ({"reasons": {}}, "no sentence for x"),
        ({"advice": ["do z"]}, "is not a report"),
    ],
)
def test_json_of_something_else(change, words):
    assert Report.from_json(json.dumps(GOOD)).to_dict() == GOOD["targets"]
    with pytest.raises(ValueError) as caught:
        Report.from_json(json.dumps({**GOOD, **change}))
    assert str(caught.value).startswith("fastpatch.Report.from_json: ")
    assert words in str(caught.value)


def test_json_of_a_version_without_advice():
    report = Report.from_json(json.dumps(GOOD))
    assert "advice" not in str(report) + report._repr_html_()
    new = Report.from_json(json.dumps({**GOOD, "advice": {"x": "do z"}}))
    assert str(new) == str(report).replace("      y", "      y\n      advice: do z")
    assert "<p>advice: do z</p>" in new._repr_html_()
    for total in (report + new, new + report):
        assert str(total).count("advice: do z") == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "{}", "null"])
def test_json_of_no_report(text):
    with pytest.raises(ValueError, match="is not a report"):
        Report.from_json(text)


# --------------------------------------------------------------------------------------------------------------- sums


def added(*numbers):
    total = {}
    for report in numbers:
        for name, counted in report.to_dict().items():
            mine = total.setdefault(name, {"fast": 0, "fallback": {}})
            mine["fast"] += counted["fast"]
            for reason, count in counted["fallback"].items():
                mine["fallback"][reason] = mine["fallback"].get(reason, 0) + count
    return total


@given(st.lists(reports, min_size=1, max_size=5))
def test_merge(several):
    merged = Report.merge(*several)
    assert merged.to_dict() == added(*several)
    assert merged.processes == sum(report.processes for report in several)
    assert merged.kept_bytes == sum(report.kept_bytes for report in several)
    str(merged), merged._repr_html_()  # every sentence is there
    assert sum(several[1:], several[0]) == merged


def test_the_parts_of_a_sum_stay_what_they_are():
    one = Report({"sgd": (1, {"dtype": 2})}, REASONS)
    total = one + one
    total._counts["sgd"][1]["dtype"] = 100
    assert one.to_dict() == {"sgd": {"fast": 1, "fallback": {"dtype": 2}}}
    assert "in 2 processes" in str(total)
    assert "processes" not in str(one)


def test_merge_of_something_else():
    with pytest.raises(TypeError, match=r"fastpatch.Report.merge: \{'sgd': 1\} is not a Report"):
        Report.merge(some(), {"sgd": 1})
    with pytest.raises(TypeError, match="give at least one"):
        Report.merge()
    with pytest.raises(TypeError, match="unsupported operand"):
        some() + 1


def test_since():
    earlier = some()
    later = some()
    assert later.since(earlier).to_dict() == EXPECTED
    assert "advice: give both one floating-point dtype" in str(later.since(earlier))
    assert not earlier.since(earlier).counts_anything()
    fastpatch.reset_report()
    assert some().since(later).to_dict() == EXPECTED  # what was reset is not taken off


# --------------------------------------------------------------------------------------------------------------- text


@given(reports)
def test_the_table_fits_80_columns_and_names_every_number(report):
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 80
    words = str(report).split()
    assert ("advice: cast <it> & do more" in str(report)) == (
        bool(report._advice) and any("dtype" in counted["fallback"] for counted in report.to_dict().values())
    )
    for counted in report.to_dict().values():
        assert str(counted["fast"]) in words
        assert all(str(count) in words for count in counted["fallback"].values())


def test_html_says_what_the_table_says():
    words = read(some()._repr_html_())
    assert words[:4] == ["target", "fast", "fallback", "reason"]
    assert words[4:] == [
        "smooth_l1_loss", "1", "0", "huber_loss", "1", "1", "1", "dtype", *words[12:14], "sgd", "1", "0",
    ]  # fmt: skip
    assert words[12].startswith(": a dtype or a mixture")
    assert words[13].startswith("advice: give both one floating-point dtype")


@given(st.text(), st.text(min_size=1))
def test_html_is_escaped(sentence, name):
    report = Report({name: (1, {"<b>": 2})}, {"<b>": sentence + "<script>&"}, 2**20, 3)
    shown = report._repr_html_()
    assert "<script" not in shown and "<b>" not in shown
    assert "<b>" in read(shown)
    assert read(shown)[-2:] == ["in 3 processes", "memory kept for the next large results: 1.0 MiB"]


def test_an_explanation_in_a_notebook():
    fastpatch.enable()
    x, y = torch.ones(3), torch.zeros(3)
    seen = fastpatch.explain(F.smooth_l1_loss, x, y.double())
    words = read(seen._repr_html_())
    assert words[4:8] == ["smooth_l1_loss", "stock", "dtype", seen.detail]
    guards = [word for guard in seen.guards for word in (guard.verdict, guard.name)]
    assert words[8:] == ["verdict", "guard", *guards, f"advice: {seen.advice}"]
    assert seen._repr_html_().count("<strong>refused</strong>") == 1
    assert read(fastpatch.explain(F.smooth_l1_loss, x, y)._repr_html_())[5] == "fast"
    odd = fastpatch.Explanation("<a>", False, "<b>", "<script>1 & 2</script>")
    assert read(odd._repr_html_())[4:] == ["<a>", "stock", "<b>", "<script>1 & 2</script>"]
    guard = fastpatch.Guard("<i>", "refused", ("<b>",))
    odder = fastpatch.Explanation("<a>", False, "<b>", "&", (guard,), "<script>")
    assert read(odder._repr_html_())[-3:] == ["refused", "<i>", "advice: <script>"]
