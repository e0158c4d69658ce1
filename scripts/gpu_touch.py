"""Every CUDA kernel once, over sizes around their edges: short enough for compute-sanitizer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import fastpatch


def main() -> None:
    fastpatch.enable(strict=True)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        params = []
        for n in (1, 7, 4097, 16385, 100_001):
            x = torch.randn(n + 1, device="cuda").to(dtype)[1:].requires_grad_()  # no whole vectors
            y = torch.randn(n, device="cuda").to(dtype)
            for loss in (F.smooth_l1_loss, F.huber_loss):
                for reduction in ("none", "mean", "sum"):
                    out = loss(x, y, reduction=reduction)
                    out.backward(torch.ones_like(out))
            params.append(torch.nn.Parameter(y))
            params[-1].grad = torch.ones_like(y)
        for options in ({"momentum": 0.0}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}):
            optimizer = torch.optim.SGD(params, lr=0.1, **options)  # type: ignore[arg-type]
            for _ in range(2):
                optimizer.step()
    torch.cuda.synchronize()
    print(f"{sum(counts['fast'] for counts in fastpatch.report().to_dict().values())} calls served")


if __name__ == "__main__":
    main()
