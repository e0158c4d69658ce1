"""Find handwritten digits on a canvas, trained twice from one seed: by stock PyTorch, and with fastpatch.

A small CNN regresses the bounding box of a digit with SmoothL1Loss and SGD. `Training` is an ordinary user's
script and knows nothing of fastpatch; all that concerns the library is in `build`, `train_both` and `report`.

    python scripts/demo.py --plot boxes.png
"""

import argparse
import contextlib
import importlib.util
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import fastpatch

CANVAS = 64  # pixels a side
SCALES = (2, 3, 4)  # a digit of 8x8 pixels is drawn at one of these sizes
NOISE = 0.1  # standard deviation; ink goes up to 1
TRAIN_SCENES, HELD_OUT_SCENES = 4000, 500
BLOCK = 5  # steps that one training takes before it is the other's turn
TARGETS = ("smooth_l1_loss", "sgd")  # what of fastpatch the training below uses


def place(digit, scale, top, left):
    """Draw one digit; return the canvas (CANVAS, CANVAS) and the box of its ink, (cx, cy, w, h) in pixels."""
    patch = digit.repeat(scale, axis=0).repeat(scale, axis=1)
    canvas = np.zeros((CANVAS, CANVAS), dtype=np.float32)
    canvas[top : top + len(patch), left : left + len(patch)] = patch
    rows, columns = np.flatnonzero(patch.any(axis=1)), np.flatnonzero(patch.any(axis=0))
    y0, y1 = top + rows[0], top + rows[-1] + 1
    x0, x1 = left + columns[0], left + columns[-1] + 1
    return canvas, ((x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0)


def make_scenes(digits, count, rng):
    """Return noisy canvases, (count, 1, CANVAS, CANVAS), and boxes, (count, 4), in parts of a canvas."""
    images, boxes = [], []
    for _ in range(count):
        scale = int(rng.choice(SCALES))
        top, left = rng.integers(0, CANVAS - 8 * scale + 1, size=2)
        canvas, box = place(digits[rng.integers(len(digits))], scale, top, left)
        images.append(canvas + NOISE * rng.standard_normal(canvas.shape, dtype=np.float32))
        boxes.append(box)
    return torch.from_numpy(np.stack(images)).unsqueeze(1), torch.tensor(boxes, dtype=torch.float32) / CANVAS


def load_scenes(seed):
    """Return the training and the held-out scenes; no digit is in both."""
    rng = np.random.default_rng(seed)
    digits = rng.permutation(load_digits().images.astype(np.float32) / 16)
    split = len(digits) * 4 // 5
    return make_scenes(digits[:split], TRAIN_SCENES, rng), make_scenes(digits[split:], HELD_OUT_SCENES, rng)


def iou(a, b):
    """Return the intersection over union of boxes (n, 4), given as (cx, cy, w, h), pair by pair: (n,)."""
    low = torch.maximum(a[:, :2] - a[:, 2:] / 2, b[:, :2] - b[:, 2:] / 2)
    high = torch.minimum(a[:, :2] + a[:, 2:] / 2, b[:, :2] + b[:, 2:] / 2)
    both = (high - low).clamp(min=0).prod(dim=1)
    return both / (a[:, 2:].clamp(min=0).prod(dim=1) + b[:, 2:].clamp(min=0).prod(dim=1) - both)


# --- an ordinary user's script: a model and its training


def conv(inputs, outputs, size, stride=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


def box_net():
    """Make a small CNN: a canvas in, (cx, cy, w, h) in parts of a canvas out."""
    return nn.Sequential(
        *(conv(1, 16, 5, stride=4), conv(16, 16, 3), conv(16, 16, 3)),
        *(conv(16, 32, 3, stride=2), conv(32, 32, 3), conv(32, 32, 3)),
        *(conv(32, 64, 3, stride=2), conv(64, 64, 3), conv(64, 64, 3)),
        *(nn.Flatten(), nn.Linear(64 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 4)),
    )


class Training:
    """Everything that a training needs, made from the seed; `step()` advances it by one batch."""

    def __init__(self, steps, batch, seed):
        torch.manual_seed(seed)
        (self.images, self.boxes), self.held_out = load_scenes(seed)
        self.batch = batch
        self.model = box_net()
        self.criterion = nn.SmoothL1Loss(beta=0.02)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=steps)
        self.shuffle = torch.Generator().manual_seed(seed)
        self.losses, self.times = [], []

    def step(self):
        times = [time.perf_counter()]
        chosen = torch.randint(len(self.images), (self.batch,), generator=self.shuffle)
        images, boxes = self.images[chosen], self.boxes[chosen]
        self.optimizer.zero_grad()
        predicted = self.model(images)
        times.append(time.perf_counter())
        loss = self.criterion(predicted, boxes)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        self.optimizer.step()
        times.append(time.perf_counter())
        self.scheduler.step()
        self.losses.append(loss.item())
        times.append(time.perf_counter())
        self.times.append(times)

    @torch.no_grad()
    def predict(self):
        """Return the boxes predicted for the held-out scenes."""
        self.model.eval()
        return self.model(self.held_out[0])


# --- what concerns fastpatch


def build():
    """Compile the native library, unless it is in the cache, so that no step has the compiler in its time."""
    try:
        # strict: raise where a user's script would get a warning and go on with stock; nothing to show then.
        with fastpatch.enabled(strict=True):
            pass
    except fastpatch.BuildError as error:
        sys.exit(f"demo.py: fastpatch cannot serve here, so there is nothing to compare.\n{error}")
    fastpatch.reset_report()


def train_both(steps, batch, seed):
    """Run the stock and the fast training; return both.

    A script of your own needs `fastpatch.enable()` at its top, and no more. Here a scope is used, because
    the trainings take turns, so that whatever else the machine does slows both down alike. While it is
    stock's turn, no scope is open, and PyTorch is as it would be without fastpatch.
    """
    stock = Training(steps, batch, seed)
    with fastpatch.enabled():
        fast = Training(steps, batch, seed)
    for start in range(0, steps, BLOCK):
        block = min(BLOCK, steps - start)
        # Who goes first changes from block to block, so that neither always finds the other's caches.
        for training in (stock, fast) if start // BLOCK % 2 == 0 else (fast, stock):
            with fastpatch.enabled() if training is fast else contextlib.nullcontext():
                for _ in range(block):
                    training.step()
        show_progress(start, start + block, steps, stock.losses[-1], fast.losses[-1])
    return stock, fast


def report():
    """Print which calls the compiled code served; return those of `TARGETS` that it never served."""
    counts = fastpatch.report().to_dict()
    fast = {target: counts.get(target, {}).get("fast", 0) for target in TARGETS}
    print(f"\n{fastpatch.report()}\n")
    served = ", ".join(f"{target} {count}" for target, count in fast.items())
    print(f"served by compiled code (loss calls; parameters updated): {served}")
    return [target for target, count in fast.items() if count == 0]


def show_progress(before, done, steps, stock_loss, fast_loss):
    """Print a live line on a terminal; elsewhere, a line at every fifth of the way."""
    line = f"step {done}/{steps}  loss: stock {stock_loss:.5f}, fastpatch {fast_loss:.5f}"
    if sys.stderr.isatty():
        print(f"\r{line}\033[K", end="\n" if done == steps else "", file=sys.stderr, flush=True)
    elif before * 5 // steps < done * 5 // steps:
        print(line, file=sys.stderr, flush=True)


def tensors(training):
    """Return all that a training made, by name: losses, weights and buffers, the optimizer's state."""
    made = {f"loss of step {n}": torch.tensor(loss) for n, loss in enumerate(training.losses, start=1)}
    made |= training.model.state_dict()
    for name, parameter in training.model.named_parameters():
        state = training.optimizer.state[parameter]
        made |= {f"{key} of {name}": value for key, value in state.items() if torch.is_tensor(value)}
    return made


def first_difference(stock, fast):
    """Say where two dicts of tensors differ first, or return None."""
    if stock.keys() != fast.keys():
        return f"what there is: only one of the two has {sorted(stock.keys() ^ fast.keys())}"
    for name, a in stock.items():
        b = fast[name]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"{name}: stock {a.dtype} {tuple(a.shape)}, fastpatch {b.dtype} {tuple(b.shape)}"
        # Bytes: by ==, 0.0 would be the same as -0.0, and nan not the same as nan.
        bytes_a, bytes_b = (t.numpy().reshape(-1, 1).view(np.uint8) for t in (a, b))
        differing = np.flatnonzero((bytes_a != bytes_b).any(axis=1))
        if differing.size:
            values = [t.flatten()[differing[0]].item() for t in (a, b)]
            return f"{name}, element {differing[0]}: stock {values[0]!r}, fastpatch {values[1]!r}"
    return None


def print_table(stock, fast):
    """Print the median time of a step and of its parts, and how well the boxes fit."""
    print(f"\n{'median time of':<18}{'stock':>20}{'fastpatch':>20}{'speed-up':>10}")
    for label, begin, end in (("whole step", 0, 5), ("loss, forward", 1, 2), ("optimizer.step()", 3, 4)):
        a, b = (statistics.median(times[end] - times[begin] for times in run.times) for run in (stock, fast))
        if label == "whole step":
            whole_a, whole_b = a, b
        cells = [f"{1e3 * t:.3f} ms {100 * t / w:5.1f} %" for t, w in ((a, whole_a), (b, whole_b))]
        print(f"{label:<18}{cells[0]:>20}{cells[1]:>20}{a / b:>9.2f}x")
    a, b = (iou(run.predict(), run.held_out[1]).mean() for run in (stock, fast))
    print(f"{'mean IoU, held out':<18}{a:>20.3f}{b:>20.3f}")
    print("The rest of a step is the model's, which fastpatch leaves alone, and the gradient of the loss.")


def plot(stock, fast, file):
    """Draw both loss curves, and true and predicted boxes on some held-out scenes."""
    from matplotlib.figure import Figure  # not pyplot, which would look for a display
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.4))
    axes = left.subplots()
    axes.semilogy(stock.losses, color="tab:blue", alpha=0.4, linewidth=3, label="stock")
    axes.semilogy(fast.losses, color="black", linewidth=0.6, label="fastpatch")
    axes.set(title="Smooth L1 loss in training", xlabel="step", ylabel="loss")
    axes.legend()
    (images, truth), predicted = fast.held_out, fast.predict()
    for index, axes in enumerate(right.subplots(2, 4).flat):
        axes.imshow(images[index, 0], cmap="gray_r")
        for boxes, colour, style in ((truth, "tab:green", "-"), (predicted, "tab:red", "--")):
            cx, cy, w, h = (boxes[index] * CANVAS).tolist()
            corner = (cx - w / 2 - 0.5, cy - h / 2 - 0.5)  # imshow draws pixel 0 from -0.5 to 0.5
            axes.add_patch(Rectangle(corner, w, h, fill=False, color=colour, linestyle=style))
        axes.set(xticks=[], yticks=[])
    right.suptitle("Held-out digits: true box green, predicted box red")
    figure.savefig(file, dpi=120)
    print(f"wrote {file}")


def whole_number(least, most=2**31 - 1):
    def parse(text):
        if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
        return int(text)

    return parse


def png_file(text):
    # Looked at before two trainings are run, not after.
    if not (text.endswith(".png") and Path(text).parent.is_dir()):
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a .png file in a folder that exists")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(f"{text!r} needs matplotlib: pip install 'fastpatch[bench]'")
    return Path(text)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, least, value, what in (
        ("--steps", 1, 800, "of each training"),
        ("--batch", 1, 16, "scenes a step"),
        ("--threads", 1, min(2, torch.get_num_threads()), "of PyTorch"),
        ("--seed", 0, 0, "of the data and the first weights"),
    ):
        what += f" (default {value})"
        parser.add_argument(name, type=whole_number(least), default=value, metavar="N", help=what)
    parser.add_argument("--plot", type=png_file, metavar="FILE.png", help="draw losses and predicted boxes")
    return parser.parse_args()


def main():
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    settings = f"threads {options.threads}, batch {options.batch}, steps {options.steps}, seed {options.seed}"
    print(f"torch {torch.__version__}, {settings}", flush=True)
    build()
    stock, fast = train_both(options.steps, options.batch, options.seed)
    difference = first_difference(tensors(stock), tensors(fast))
    print_table(stock, fast)
    unserved = report()
    print(f"bit-identical: {'no' if difference else 'yes'}", flush=True)
    if options.plot:
        plot(stock, fast, options.plot)
    if difference:
        sys.exit(f"demo.py: stock and fastpatch differ, first in {difference}")
    if unserved:
        sys.exit(f"demo.py: compiled code served no call of: {', '.join(unserved)}")


if __name__ == "__main__":
    main()
