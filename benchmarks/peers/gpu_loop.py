"""A plain torch loop on one GPU, to stand beside plait there: 125M at 1,024 tokens to 7B at 2,048, bfloat16 autocast.
The size "LoRA 8B" is gpu_lora.py's.

torch.compile over the whole model, fused AdamW, clipping; float32 master weights; no host sync in the loop. Attention
by the kernel that torch chooses, or by flash alone, as for all contenders. `--tiny --device cpu` runs the same code in
seconds anywhere, so that it is known to work before a GPU is at hand.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.machine import describe
from benchmarks.peers.ddp_loop import GPT2, build_optimizer
from benchmarks.workload import Workload

H200_BF16_FLOPS = 989e12
ROPE_THETA = 10_000.0

GPT2_125M = Workload(layers=12, width=768, heads=12, sequence=1024, vocabulary=50_304, sequences_per_rank=32)
LLAMA_1B = Workload(layers=16, width=2048, heads=16, sequence=4096, vocabulary=32_768, sequences_per_rank=4)
LLAMA_3B = Workload(layers=28, width=3072, heads=24, sequence=4096, vocabulary=32_768, sequences_per_rank=1)
LLAMA_7B = Workload(layers=32, width=4096, heads=32, sequence=2048, vocabulary=32_768, sequences_per_rank=1)
TINY = Workload(layers=2, width=64, heads=4, sequence=64, vocabulary=256, sequences_per_rank=2)
LLAMA_8B = Workload(layers=32, width=4096, heads=32, sequence=2048, vocabulary=128_256, sequences_per_rank=2)
SIZES = {"125M": GPT2_125M, "1B": LLAMA_1B, "3B": LLAMA_3B, "7B": LLAMA_7B, "LoRA 8B": LLAMA_8B}
FFN = {"1B": 5632, "3B": 8192, "7B": 11_008, "LoRA 8B": 14_336}

# Shapes: b sequences, t tokens, h heads, d head width, w width.


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the timed steps showed; `mfu` counts attention in full, `mfu_causal` the half that is needed."""

    tokens_per_s: float
    mfu: float
    mfu_causal: float
    step_s: float
    parameters: int
    peak_bytes: int
    first_loss: float
    last_loss: float
    planned_bytes: float | None = None
    """Of tensors, and seconds of a step, as plait's planner foretells them; None of other programs."""
    planned_step_s: float | None = None
    losses: tuple[float, ...] = ()
    """Of all steps, as plait's rows tell them."""


def ffn_of(size: str, shape: Workload) -> int:
    """Width of a Llama's feedforward."""
    return 3 * shape.width if shape.width == TINY.width else FFN[size]


class LlamaBlock(nn.Module):
    """RMSNorm, rotary multi-head attention and SwiGLU, no biases."""

    def __init__(self, width: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x_btw: torch.Tensor, cosine_td: torch.Tensor, sine_td: torch.Tensor) -> torch.Tensor:
        b, t, w = x_btw.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x_btw)).split(w, 2))
        q, k = _rotate(q, cosine_td, sine_td), _rotate(k, cosine_td, sine_td)
        y_bhtd = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_btw = x_btw + self.out(y_bhtd.transpose(1, 2).reshape(b, t, w))
        gate, up = self.gate_up(self.norm2(x_btw)).chunk(2, dim=-1)
        return x_btw + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """A Llama-like decoder with its own head; returns the mean loss."""

    def __init__(self, shape: Workload, ffn: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(LlamaBlock(shape.width, shape.heads, ffn) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, 1e-5)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        half = shape.width // shape.heads // 2
        angles = torch.outer(torch.arange(shape.sequence), ROPE_THETA ** (-torch.arange(half) / half))
        self.register_buffer("cosine", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sine", angles.sin().repeat(1, 2), persistent=False)

    def forward(self, inputs_bt: torch.Tensor, targets_bt: torch.Tensor) -> torch.Tensor:
        x_btw = self.tokens(inputs_bt)
        for block in self.blocks:
            x_btw = block(x_btw, self.cosine, self.sine)
        return F.cross_entropy(self.head(self.norm(x_btw)).flatten(0, 1), targets_bt.flatten())


def _rotate(x_bhtd: torch.Tensor, cosine_td: torch.Tensor, sine_td: torch.Tensor) -> torch.Tensor:
    first, second = x_bhtd.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x_bhtd * cosine_td + turned * sine_td).type_as(x_bhtd)


def build(size: str, shape: Workload) -> tuple[nn.Module, int]:
    """The model, with normal 0.02 weights, and its matmul FLOPs a token, forward and backward, attention in full."""
    torch.manual_seed(shape.seed)
    if size == "125M":
        model: nn.Module = GPT2(shape)
        flops = shape.flops_per_token
    else:
        ffn = ffn_of(size, shape)
        model = Llama(shape, ffn)
        matrices = shape.layers * (4 * shape.width**2 + 3 * shape.width * ffn) + shape.width * shape.vocabulary
        flops = 6 * matrices + attention_flops(shape)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    return model, flops


def attention_flops(shape: Workload) -> int:
    """Of a token, forward and backward, every position with every other."""
    return 12 * shape.layers * shape.sequence * shape.width


Build = Callable[[str, Workload], tuple[nn.Module, int]]
"""From a size and its workload to what `build` returns."""
Arrange = Callable[[nn.Module, argparse.Namespace], tuple[nn.Module, AbstractContextManager[object]]]
"""From a model on its device and the flags to what the loop calls, and the context in which it does."""


def compiled_whole(model: nn.Module, flags: argparse.Namespace) -> tuple[nn.Module, AbstractContextManager[object]]:
    """One graph of the whole model, in bfloat16 by autocast."""
    net = cast(nn.Module, torch.compile(model)) if flags.compile == "model" else model
    return net, torch.autocast(flags.device, torch.bfloat16)


def allowed_attention(flags: argparse.Namespace) -> AbstractContextManager[object]:
    """The kernels among which torch may choose. Its cache of compiled graphs does not know which were allowed (2.11):
    it is off where some were not."""
    torch.compiler.config.force_disable_caches = flags.attention != "any"
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if flags.attention == "flash" else nullcontext()


def train(
    flags: argparse.Namespace,
    shape: Workload,
    device: torch.device,
    arrange: Arrange = compiled_whole,
    build: Build = build,
) -> Measured:
    """Warm up, then time each step by events on the device; tokens are random and lie on the device already."""
    torch.set_float32_matmul_precision("high")
    with device:  # drawn where they are needed: a processor takes a minute for billions
        model, flops = build(flags.size, shape)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    net, precision = arrange(model, flags)
    optimizer = build_optimizer(model, shape)
    window = torch.randint(shape.vocabulary, (shape.sequences_per_rank, shape.sequence + 1), device=device)
    losses: list[torch.Tensor] = []
    forget_peak(device)
    marks = [mark(device)]
    with allowed_attention(flags):
        for _ in range(flags.warmup + flags.steps):
            loss = torch.zeros((), device=device)
            for part in window.chunk(flags.micro_batches):
                with precision:
                    own = net(part[:, :-1], part[:, 1:]) / flags.micro_batches
                own.backward()
                loss += own.detach()
            nn.utils.clip_grad_norm_(model.parameters(), shape.clip, foreach=True)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss)
            marks.append(mark(device))
    return figures(
        flags, shape, marks, flops=flops, parameters=parameters, losses=(losses[0].item(), losses[-1].item())
    )


def figures(
    flags: argparse.Namespace,
    shape: Workload,
    marks: list[torch.cuda.Event | float],
    *,
    flops: int,
    parameters: int,
    losses: tuple[float, float],
) -> Measured:
    """What the marks between steps say; `flops` are a token's, attention counted in full."""
    step_s = median(seconds_between(marks)[flags.warmup :])
    tokens_per_s = shape.tokens_per_rank / step_s
    return Measured(
        tokens_per_s=tokens_per_s,
        mfu=tokens_per_s * flops / flags.peak_flops,
        mfu_causal=tokens_per_s * (flops - attention_flops(shape) / 2) / flags.peak_flops,
        step_s=step_s,
        parameters=parameters,
        peak_bytes=torch.cuda.max_memory_allocated() if flags.device == "cuda" else 0,
        first_loss=losses[0],
        last_loss=losses[1],
    )


def forget_peak(device: torch.device) -> None:
    """What was held while a model was built is no part of its training."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def mark(device: torch.device) -> torch.cuda.Event | float:
    """Now, as the device sees it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(marks: list[torch.cuda.Event | float]) -> list[float]:
    """The times between marks; waits for the device."""
    if isinstance(marks[0], float):
        stamps = cast(list[float], marks)
        return [later - earlier for earlier, later in pairwise(stamps)]
    torch.cuda.synchronize()
    events = cast(list[torch.cuda.Event], marks)
    return [earlier.elapsed_time(later) / 1e3 for earlier, later in pairwise(events)]


def gpu_flags() -> argparse.Namespace:
    """The command line that every contender on a GPU understands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=tuple(SIZES), default="125M")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand parameters of the same kind")
    parser.add_argument("--attention", choices=("any", "flash"), default="any", help="kernels that torch may choose")
    parser.add_argument(
        "--documents", choices=("mask", "join"), default="mask", help="what plait's loader does with them"
    )
    parser.add_argument("--compile", choices=("model", "none"), default="model")
    parser.add_argument("--sequences", type=int, help="a step's sequences, if not the size's own number")
    parser.add_argument("--micro-batches", type=int, default=1, help="whose gradients a step adds up")
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--peak-flops", type=float, default=H200_BF16_FLOPS, help="dense bfloat16 peak (default: H200)")
    parser.add_argument("--out", type=Path, help="write the figures and the machine here as JSON")
    return parser.parse_args()


def workload_for(flags: argparse.Namespace) -> Workload:
    """The work that the flags name."""
    shape = TINY if flags.tiny else SIZES[flags.size]
    return replace(shape, sequences_per_rank=flags.sequences) if flags.sequences else shape


def answer(flags: argparse.Namespace, shape: Workload, measured: Measured) -> None:
    """Print the line that the runner reads, and write the figures where the flags want them."""
    print(json.dumps({"size": flags.size, **asdict(measured)}), flush=True)
    if flags.out:
        report = {"size": flags.size, "shape": asdict(shape), "machine": describe(), **asdict(measured)}
        flags.out.write_text(json.dumps(report, indent=2) + "\n")


def main(arrange: Arrange = compiled_whole, build: Build = build) -> None:
    flags = gpu_flags()
    shape = workload_for(flags)
    answer(flags, shape, train(flags, shape, torch.device(flags.device), arrange, build))


if __name__ == "__main__":
    main()
