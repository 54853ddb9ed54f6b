"""What a step costs outside forward and backward, one thread: `python -m benchmarks.lab.update_costs`.

CPU time of the calling thread, the 20th percentile of many repetitions, so that it holds on a busy machine too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import quantiles

import torch
from torch import nn

from benchmarks.peers.ddp_loop import GPT2
from benchmarks.workload import FIRST_RUN

REPETITIONS = 60


def main() -> None:
    torch.set_num_threads(1)
    parameters = list(GPT2(FIRST_RUN).parameters())
    flat = torch.randn(sum(parameter.numel() for parameter in parameters)) * 1e-3
    views = list(flat.split([parameter.numel() for parameter in parameters]))
    for parameter, view in zip(parameters, views, strict=True):
        parameter.grad = view.view_as(parameter)
    fresh = [torch.randn_like(view) for view in views]
    ways: dict[str, Callable[[], object]] = {
        "AdamW fused": _adamw(parameters, fused=True),
        "AdamW fused, scaling gradients": _adamw_that_scales(parameters),
        "AdamW foreach": _adamw(parameters, foreach=True),
        "AdamW, a tensor at a time": _adamw(parameters, foreach=False),
        "AdamW fused, one flat tensor": _adamw([_flat_parameter(flat)], fused=True),
        "clip_grad_norm_": lambda: nn.utils.clip_grad_norm_(parameters, FIRST_RUN.clip, foreach=True),
        "norm of the flat gradient": lambda: torch.linalg.vector_norm(flat),
        "scaling the flat gradient": lambda: flat.mul_(1.0),
        "zeroing the flat gradient": flat.zero_,
        "adding fresh gradients to views": lambda: [view.add_(each) for view, each in zip(views, fresh, strict=True)],
        "copying fresh gradients to views": lambda: [view.copy_(each) for view, each in zip(views, fresh, strict=True)],
    }
    print("| part of a step | ms CPU |\n| --- | --- |")
    for name, way in ways.items():
        flat.normal_(std=1e-3)
        print(f"| {name} | {_cpu_s(way) * 1e3:.1f} |")


def _adamw(parameters: list[nn.Parameter], **kind: bool) -> Callable[[], object]:
    return torch.optim.AdamW(parameters, lr=1e-9, betas=(FIRST_RUN.beta1, FIRST_RUN.beta2), **kind).step


def _adamw_that_scales(parameters: list[nn.Parameter]) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(parameters, lr=1e-9, fused=True)
    # The door that GradScaler uses: the kernel divides each gradient as it reads it.
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.7), torch.tensor(0.0)  # pyright: ignore
    return optimizer.step


def _flat_parameter(gradient: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.randn_like(gradient))
    parameter.grad = gradient
    return parameter


def _cpu_s(way: Callable[[], object]) -> float:
    way()
    seconds: list[float] = []
    for _ in range(REPETITIONS):
        start = time.thread_time()
        way()
        seconds.append(time.thread_time() - start)
    return quantiles(seconds, n=10)[1]


if __name__ == "__main__":
    main()
