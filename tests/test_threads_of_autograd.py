"""Other threads record and run backwards over the same parameters: nobody waits for ever, nothing is freed in use.

PyTorch locks a leaf's metadata while it waits for the GIL; whoever asked for that lock with the GIL held would hang.
Each script runs in a process of its own, since a hang or a crash is what would fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from _scripts import run_text

SCRIPT = """
import faulthandler, os, threading, time
import torch, fastpatch
import torch.nn.functional as F
faulthandler.dump_traceback_later(60, exit=True)
torch.set_num_threads(1)
n = {n}
p, x = torch.nn.Parameter(torch.randn(n)), torch.randn(n)
p.grad = torch.zeros(n)
optimizer = torch.optim.SGD([p], lr=1e-9, momentum=0.9)
done = 0
def other():
    global done
    while True:
        try:
            {other}
            done += 1
        except RuntimeError:  # of a step between its forward and its backward
            pass
fastpatch.enable(strict=True)
threading.Thread(target=other, daemon=True).start()
end, calls = time.monotonic() + 3, 0
while time.monotonic() < end:
    {call}
    calls += 1
print(calls > 0, done > 0, fastpatch.report().to_dict()[{target!r}]["fast"] >= calls)
os._exit(0)
"""
CALLS = {
    "step": ("sgd", "optimizer.step()"),
    "recorded loss": ("smooth_l1_loss", "F.smooth_l1_loss(p, x)"),
    "recorded L1 loss": ("smooth_l1_loss", "F.smooth_l1_loss(p, x, beta=0)"),
    "recorded loss, broadcast": ("huber_loss", "F.huber_loss(p.unsqueeze(0), x)"),
    "loss": ("huber_loss", "F.huber_loss(p.detach(), x)"),
}
OTHERS = {"records": "(p * x).sum()", "runs backwards": "(p * x).sum().backward()"}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.filterwarnings("ignore")
def test_nobody_waits_for_ever(call: str, other: str, tmp_path: Path) -> None:
    target, code = CALLS[call]
    text = "import warnings; warnings.simplefilter('ignore')\n" + SCRIPT.format(
        n=10, other=OTHERS[other], call=code, target=target
    )
    assert run_text(text, folder=tmp_path).stdout.split() == ["True"] * 3


@pytest.mark.parametrize("n", [1000, 900_000])
def test_a_gradient_that_a_backward_replaces_is_not_freed_in_use(n: int, tmp_path: Path) -> None:
    """With create_graph=True a backward puts a new gradient in place of the former one, without the GIL."""
    other = "(p * x).sum().backward(create_graph=True)"
    text = "import warnings; warnings.simplefilter('ignore')\n" + SCRIPT.format(
        n=n, other=other, call="optimizer.step()", target="sgd"
    )
    assert run_text(text, folder=tmp_path).stdout.split() == ["True"] * 3
