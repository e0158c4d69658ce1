"""scripts/demo.py: its arithmetic, and a short run of the whole."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "scripts" / "demo.py"

pytest.importorskip("sklearn", reason="the demo's digits come with scikit-learn")


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("fastpatch_demo", DEMO)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_demo(*arguments):
    # This checkout's fastpatch, also where another one is installed.
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command, env = [sys.executable, str(DEMO), *arguments], {**os.environ, "PYTHONPATH": path}
    # The time-out leaves room for the first build of the native library on a slow machine.
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)


def boxes(*rows):
    return torch.tensor(rows, dtype=torch.float32)


def test_a_short_run_is_served_and_bit_identical():
    steps = 6
    done = run_demo("--steps", str(steps), "--batch", "4", "--threads", "1")
    output = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, output
    assert "bit-identical: yes" in done.stdout.splitlines(), output
    served = re.search(r"^served by compiled code .*: (.*)$", done.stdout, re.MULTILINE)
    counts = {target: int(count) for target, count in (pair.split() for pair in served[1].split(", "))}
    assert counts["smooth_l1_loss"] == steps, output
    assert counts["sgd"] > 0, output
    assert counts["sgd"] % steps == 0, output


@pytest.mark.parametrize(
    ("arguments", "quoted"),
    [(("--steps", "many"), "'many'"), (("--seed", "-1"), "'-1'"), (("--plot", "boxes.txt"), "'boxes.txt'")],
)
def test_a_bad_value_is_quoted(demo, monkeypatch, capsys, arguments, quoted):
    monkeypatch.setattr(sys, "argv", ["demo.py", *arguments])
    with pytest.raises(SystemExit) as stop:
        demo.parse_arguments()
    assert stop.value.code == 2
    assert quoted in capsys.readouterr().err


def test_a_plot_without_matplotlib_names_the_extra(demo, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["demo.py", "--plot", str(tmp_path / "boxes.png")])
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        demo.parse_arguments()
    assert "pip install 'fastpatch[bench]'" in capsys.readouterr().err


@pytest.mark.parametrize("scale", [2, 3, 4])
@pytest.mark.parametrize("corner", [(0, 0), (5, 17), "last"])
def test_the_box_is_the_extent_of_the_ink(demo, scale, corner):
    last = demo.CANVAS - 8 * scale
    top, left = (last, last) if corner == "last" else corner
    for digit in demo.load_digits().images[:20].astype(np.float32):
        canvas, (cx, cy, w, h) = demo.place(digit, scale, top, left)
        rows, columns = np.nonzero(canvas)
        assert canvas.shape == (demo.CANVAS, demo.CANVAS)
        assert (cx - w / 2, cx + w / 2) == (columns.min(), columns.max() + 1)
        assert (cy - h / 2, cy + h / 2) == (rows.min(), rows.max() + 1)
        assert canvas.sum() == digit.sum() * scale**2


def test_scenes_are_the_seed_s(demo, monkeypatch):
    monkeypatch.setattr(demo, "TRAIN_SCENES", 20)
    monkeypatch.setattr(demo, "HELD_OUT_SCENES", 10)
    (images, targets), (held_out_images, held_out_targets) = demo.load_scenes(seed=1)
    assert images.shape == (20, 1, demo.CANVAS, demo.CANVAS)
    assert targets.shape == (20, 4)
    assert held_out_images.shape == (10, 1, demo.CANVAS, demo.CANVAS)
    assert held_out_targets.shape == (10, 4)
    assert ((targets > 0) & (targets < 1)).all()
    assert torch.equal(images, demo.load_scenes(seed=1)[0][0])
    assert not torch.equal(images, demo.load_scenes(seed=2)[0][0])


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((5, 5, 4, 2), (5, 5, 4, 2), 1.0),
        ((2, 2, 4, 4), (4, 2, 4, 4), 8 / 24),  # half of each
        ((5, 5, 4, 4), (5, 5, 2, 2), 4 / 16),  # one within the other
        ((2, 2, 4, 4), (6, 2, 4, 4), 0.0),  # side by side
        ((2, 2, 4, 4), (20, 20, 4, 4), 0.0),  # apart in both directions: no product of two negatives
        ((2, 2, -4, -4), (2, 2, 4, 4), 0.0),  # what an untrained model may say
    ],
)
def test_iou(demo, a, b, expected):
    assert demo.iou(boxes(a), boxes(b)).item() == pytest.approx(expected)
    assert demo.iou(boxes(b), boxes(a)).item() == pytest.approx(expected)


def test_iou_goes_pair_by_pair(demo):
    found = demo.iou(boxes((2, 2, 4, 4), (2, 2, 4, 4)), boxes((2, 2, 4, 4), (4, 2, 4, 4)))
    assert found.tolist() == pytest.approx([1, 1 / 3])


def test_first_difference_goes_by_bits(demo):
    nan, one = torch.tensor([0.0, float("nan")]), torch.tensor(1)
    assert demo.first_difference({"a": nan, "b": one}, {"a": nan.clone(), "b": one.clone()}) is None
    signed = torch.tensor([-0.0, float("nan")])
    assert demo.first_difference({"a": nan}, {"a": signed}).startswith("a, element 0:")
    later = torch.tensor([1.0, 2.0, 3.0])
    found = demo.first_difference({"a": nan, "b": later}, {"a": nan, "b": torch.tensor([1.0, 2.0, 4.0])})
    assert found == "b, element 2: stock 3.0, fastpatch 4.0"


def test_first_difference_sees_other_names_shapes_and_dtypes(demo):
    one = torch.ones(2)
    assert "momentum" in demo.first_difference({"momentum": one}, {})
    assert "(1, 2)" in demo.first_difference({"a": one}, {"a": one[None]})
    assert "float64" in demo.first_difference({"a": one}, {"a": one.double()})


class _Report:
    def to_dict(self):
        return {
            "smooth_l1_loss": {"fast": 3, "fallback": {}},
            "sgd": {"fast": 0, "fallback": {"autocast": 3}},
        }


def test_a_target_that_was_never_served_is_named(demo, monkeypatch, capsys):
    monkeypatch.setattr(demo.fastpatch, "report", _Report)
    assert demo.report() == ["sgd"]
    assert "smooth_l1_loss 3, sgd 0" in capsys.readouterr().out
