"""What enable() does when it can't, and that it leaves everything else alone when it can. In processes of their own."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from _scripts import run_script, run_text

import fastpatch


def line_of(text, part):
    return next(number for number, line in enumerate(text.splitlines(), start=1) if part in line)


# A training script: train() gives its last loss and weight, to the bit.
TRAINING = """
def train():
    model = torch.nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.3, -0.2, 0.9]]))
        model.bias.fill_(0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.linspace(-2, 2, 12).view(4, 3), torch.linspace(0, 5, 4).view(4, 1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.smooth_l1_loss(model(x), y) + F.huber_loss(model(x), y, delta=0.3)
        loss.backward()
        optimizer.step()
    return [loss.item().hex(), *(value.hex() for value in model.weight.flatten().tolist())]
"""


@pytest.fixture(scope="module")
def stock_numbers():
    names = {"torch": torch, "F": F}
    exec(TRAINING, names)
    with fastpatch.disabled():
        return names["train"]()


# ----------------------------------------------------------------------------------------------------- no compiler


NO_COMPILER = f"""
import json
import torch
import torch.nn.functional as F
import fastpatch
{TRAINING}
stock = F.smooth_l1_loss
fastpatch.enable()
again = fastpatch.enable("sgd")
with fastpatch.enabled():
    inside = fastpatch.is_enabled()
errors = []
for strictly in (lambda: fastpatch.enable(strict=True), lambda: fastpatch.enabled(strict=True).__enter__()):
    try:
        strictly()
    except fastpatch.BuildError as error:
        errors.append([str(error), error.output])
explanation = fastpatch.explain(F.smooth_l1_loss, torch.ones(3), torch.ones(3))
print(json.dumps({{
    "numbers": train(),
    "enabled": [fastpatch.is_enabled(), fastpatch.is_enabled("sgd"), inside],
    "untouched": F.smooth_l1_loss is stock,
    "explanation": [explanation.fast, explanation.reason, explanation.detail],
    "errors": errors,
    "report": fastpatch.report().to_dict(),
}}))
fastpatch.disable()
"""


def test_without_a_compiler_stock_serves_and_one_warning_says_why(tmp_path, stock_numbers):
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    done = run_text(NO_COMPILER, folder=tmp_path, CXX="/nonexistent/c++", FASTPATCH_CACHE_DIR=str(cache))
    seen = json.loads(done.stdout)
    cause = "CXX='/nonexistent/c++' wasn't found"
    assert done.stderr.count("NativeBuildWarning") == 1
    line = line_of(NO_COMPILER, "fastpatch.enable()")
    first = done.stderr.splitlines()[0]
    assert first.startswith(f"{tmp_path / 'train.py'}:{line}: NativeBuildWarning: fastpatch is off, PyTorch serves")
    assert cause in first
    assert "install one" in first
    assert seen["numbers"] == stock_numbers
    assert seen["enabled"] == [False, False, False]
    assert seen["untouched"]
    assert seen["explanation"][:2] == [False, "not_built"]
    assert cause in seen["explanation"][2]
    assert [cause in text for text, _ in seen["errors"]] == [True, True]
    assert [output for _, output in seen["errors"]] == ["", ""]
    assert seen["report"] == {name: {"fast": 0, "fallback": {}} for name in fastpatch.targets()}
    assert list(cache.iterdir()) == []


def test_the_numbers_are_the_same_when_it_works(stock_numbers):
    names = {"torch": torch, "F": F}
    exec(TRAINING, names)
    fastpatch.enable(strict=True)
    assert names["train"]() == stock_numbers
    assert fastpatch.report().to_dict() == {
        "smooth_l1_loss": {"fast": 3, "fallback": {}},
        "huber_loss": {"fast": 3, "fallback": {}},
        "sgd": {"fast": 6, "fallback": {}},
    }


# ------------------------------------------------------------- children of one process that has torch in memory


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """{name: what the case returned}"""
    fastpatch.enable()  # builds the library, if that is still to be done
    done = run_script(Path(__file__).with_name("enable_cases.py"), folder=tmp_path_factory.mktemp("cases"))
    return dict(json.loads(line) for line in done.stdout.splitlines())


def test_before_any_enable_there_is_an_empty_report(cases):
    assert cases["before_any_enable"] == {
        "report": {name: {"fast": 0, "fallback": {}} for name in fastpatch.targets()},
        "table": str(fastpatch.report()),
        "enabled": False,
        "explain": [False, "disabled"],
        "touched": False,
    }


def test_a_warm_start_imports_nothing_heavy(cases):
    assert "fastpatch" in cases["warm_start"]  # fastpatch._native
    assert not {"setuptools", "filelock", "ninja", "sympy", "mpmath"} & set(cases["warm_start"])


def test_unsupported_platform(cases):
    seen = cases["unsupported_platform"]
    [(category, is_here, text)] = seen["warnings"]
    assert (category, is_here) == ("NativeBuildWarning", True)
    assert "linux aarch64" in text
    assert seen["again"] == []
    assert "linux aarch64" in seen["error"]
    assert not seen["enabled"]
    assert seen["explain"] == [False, "unsupported_platform"]
    assert not seen["tried"]
    assert seen["untouched"] == list(fastpatch.targets())


LOSSES = ["smooth_l1_loss", "huber_loss"]


@pytest.mark.parametrize("name", fastpatch.targets())
def test_a_target_whose_self_test_fails_is_left_to_stock_and_the_others_are_on(cases, name):
    seen = cases[f"broken {name}"]
    [(category, is_here, text)] = seen["warnings"]
    assert (category, is_here) == ("NativeBuildWarning", True)
    assert text == (f"fastpatch leaves {name!r} to PyTorch, since its self-test failed: parameter of 7 elements")
    assert seen["again"] == []
    assert seen["error"] == text
    assert seen["enabled"] == [target for target in fastpatch.targets() if target != name]
    assert seen["untouched"] == [name]
    assert seen["served"] == [loss for loss in LOSSES if loss != name]
    assert seen["reasons"] == {loss: "not_built" if loss == name else "arguments" for loss in LOSSES}


def test_a_self_test_whose_call_falls_back_has_failed(cases):
    [(_, _, text)] = cases["refusing"]["warnings"]
    assert text.endswith("a call was refused (dtype)")
    assert cases["refusing"]["report"]["smooth_l1_loss"] == {"fast": 0, "fallback": {}}


THRESHOLDS = {"smooth_l1_loss": "beta 0.3", "huber_loss": "delta 0.3"}
DIFFERENCES = {
    f"other_{what} {loss} {dtype}": f"the {what} of 7 elements of {dtype}, reduction 0, {THRESHOLDS[loss]}"
    for what in ("loss", "gradient")
    for loss in LOSSES
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
} | {"other_update": "parameter or momentum buffer of 1 elements, nesterov=False"}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_the_self_test_sees_a_difference_in_the_last_bits(cases, case):
    [(_, _, text)] = cases[case]["warnings"]
    assert text.endswith(f"its self-test failed: {DIFFERENCES[case]}")
    assert not cases[case]["enabled"]


MODE_NAMES = (
    "plain", "autocast", "inference_mode", "no_grad", "device('meta')", "set_default_device('meta')", "FakeTensorMode",
    "set_default_dtype(float64)", "one thread", "three threads", "deterministic", "saved_tensors_hooks",
    "DisableTorchFunction",
)  # fmt: skip


@pytest.mark.parametrize("name", MODE_NAMES)
def test_enable_inside_a_mode_works_and_changes_nothing_else(cases, name):
    assert cases[name] == {
        "warnings": [],
        "state kept": True,
        "rng kept": True,
        "enabled inside": True,
        "enabled": list(fastpatch.targets()),
        "served": LOSSES,
    }
