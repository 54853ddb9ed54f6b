"""`make gpu-experiment`: where a step's time goes on one GPU, and what each lever of gpu_levers.py gains.

Two calls of four to five minutes, for a GPU that is lent for a quarter of an hour. Each call is one process; each part
has a time limit of its own, a part that fails says why, and every result is a line of JSON that is written at once, so
that no second of the card is lost.

    python -m benchmarks.gpu_experiment 1 --out results.jsonl    # then 2
    python -m benchmarks.gpu_experiment 1 --smoke                # every part, tiny, on the processor
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_levers import (
    ENDS,
    adamw_kernel,
    adamw_plain,
    bf16_stream,
    cudnn_documents,
    fp8_feedforward,
    product_weights,
    ragged_backward,
    ragged_forward,
    replaced,
)
from benchmarks.one_gpu import gpu_name, known_peak
from benchmarks.one_gpu_brief import forget, group
from benchmarks.peers.gpu_loop import Measured, train, workload_for
from benchmarks.peers.gpu_titan import sharded_blocks
from plait.model import attention
from plait.model.attention import cumulative_lengths, of_any_length
from plait.trainer.assemble import Assembly
from plait.trainer.state import TrainState

Figures = dict[str, Any]
CALL_S = 250
"""Seconds after which no part of a call begins."""


def _inductor() -> Any:
    return importlib.import_module("torch._inductor.config")


OPEN: Mapping[str, Callable[[], AbstractContextManager[object]]] = {
    "cudnn": cudnn_documents,
    "bf16 stream": bf16_stream,
    "combo kernels": lambda: _inductor().patch(combo_kernels=True),
}
"""Levers that are open from before a model is built."""
AROUND: Mapping[str, Callable[[Assembly], AbstractContextManager[object]]] = {
    "product weights": product_weights,
    "fp8": lambda assembly: nullcontext(fp8_feedforward(assembly)),
}
"""Levers that change an assembly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A program that trains one size for a few steps."""

    size: str = "1B"
    program: str = "plait"
    limit_s: int = 40
    sequences: int | None = None
    micro_batches: int = 1
    documents: str = "mask"
    attention: str = "any"
    levers: tuple[str, ...] = ()
    traced: bool = False
    replayed: bool = False
    """Whether steps are replayed as CUDA graphs (plait/trainer/step_graph.py)."""

    @property
    def name(self) -> str:
        sequences = f" x{self.sequences}" if self.sequences else ""
        micros = f" in {self.micro_batches}" if self.micro_batches > 1 else ""
        joined = ", joined" if self.documents == "join" else ""
        way = ["replayed"] if self.replayed else []
        return ", ".join([f"{self.program} {self.size}{sequences}{micros}{joined}", self.attention, *self.levers, *way])


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A reading that trains nothing."""

    name: str
    read: Callable[[torch.device], Figures]
    limit_s: int = 30


def calls() -> dict[int, tuple[Row | Part, ...]]:
    """What each call reads, in order: what decides most comes first."""
    both = ("cudnn", "product weights")
    first = (
        Part(name="card", read=card),
        Part(name="AdamW alone", read=adamw_alone),
        Part(name="products alone", read=products_alone),
        Part(name="attention alone", read=attention_alone, limit_s=90),
        Row(traced=True, limit_s=60),
        Row(levers=("cudnn",), traced=True),
        Row(levers=("product weights",)),
        Row(levers=both),
        Row(documents="join"),
        Row(documents="join", attention="flash"),
        Row(program="titan loop"),
        Row(program="titan loop", attention="flash"),
        Row(size="3B", sequences=2, limit_s=50),
        Row(size="3B", sequences=2, levers=("product weights",), limit_s=50),
        Row(size="3B", sequences=2, levers=both, limit_s=50),
        Row(size="3B", program="titan loop", sequences=2, limit_s=50),
    )
    second = (
        Row(),
        Row(size="7B", sequences=2, limit_s=60),
        Row(size="7B", sequences=2, levers=("product weights",), limit_s=60),
        Row(size="7B", sequences=2, levers=both, limit_s=60),
        Row(size="3B", sequences=8, micro_batches=4, limit_s=60),
        Row(size="3B", sequences=8, micro_batches=4, levers=("cudnn",), limit_s=60),
        Row(size="3B", sequences=8, micro_batches=4, documents="join", limit_s=60),
        Row(size="3B", program="titan loop", sequences=8, micro_batches=4, limit_s=60),
        Row(size="125M", traced=True),
        Row(size="125M", levers=("cudnn",)),
        Row(size="125M", program="titan loop"),
        Row(size="125M", sequences=3),
        Row(size="125M", sequences=3, levers=("combo kernels",)),
        Row(size="LoRA 8B", limit_s=60),
        Row(size="LoRA 8B", levers=("cudnn",), limit_s=60),
        Row(levers=("fp8",)),
        Row(levers=("bf16 stream",)),
        Row(size="125M", levers=("bf16 stream",)),
        Row(program="torch loop", limit_s=120),
        Row(program="torch loop", attention="flash", limit_s=120),
        Row(replayed=True, limit_s=60),
        Row(size="125M", replayed=True, limit_s=60),
        Row(size="125M", sequences=3, replayed=True, limit_s=60),
        Row(size="125M", sequences=3, documents="join", replayed=True, limit_s=60),
        Row(size="125M", sequences=3, documents="join"),
    )
    return {1: first, 2: second}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("call", type=int, choices=(1, 2))
    parser.add_argument("--out", type=Path, help="append the results to this file as they come")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the processor")
    parser.add_argument("--only", default="", help="the parts in whose names this regular expression is found")
    asked = parser.parse_args()
    began = time.monotonic()
    with group(asked):
        write({"call": asked.call, "gpu": gpu_name(), "torch": torch.__version__}, asked.out)
        for one in calls()[asked.call]:
            if not re.search(asked.only, one.name):
                continue
            if time.monotonic() - began > CALL_S and not asked.smoke:
                write({"name": one.name, "why": "the call's time was over"}, asked.out)
                continue
            write(figures_of(one, asked), asked.out)


def figures_of(one: Row | Part, asked: argparse.Namespace) -> Figures:
    """A part's figures, or why there are none, and how long it took."""
    device, began = torch.device("cpu" if asked.smoke else "cuda"), time.monotonic()
    try:
        with limited(600 if asked.smoke else one.limit_s):
            found = one.read(device) if isinstance(one, Part) else trained(one, asked)
    except Exception as error:
        traceback.print_exc()
        found = {"why": f"{type(error).__name__}: {str(error).strip()[:300]}"}
    forget(device)
    return {"name": one.name, "took_s": round(time.monotonic() - began, 1), **found}


def write(line: Figures, out: Path | None) -> None:
    """Print a result, and append it to the file, now."""
    text = json.dumps(line)
    print(text[:1500], flush=True)
    if out:
        with out.open("a") as file:
            file.write(text + "\n")


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the block after this time."""

    def over(*_: object) -> None:
        raise TimeoutError(f"not done in {seconds} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# Programs that train.


def trained(row: Row, asked: argparse.Namespace) -> Figures:
    """A row's program in this process."""
    flags = argparse.Namespace(
        size=row.size,
        device="cpu" if asked.smoke else "cuda",
        tiny=asked.smoke,
        attention="any" if asked.smoke else row.attention,
        documents=row.documents,
        compile="none" if asked.smoke and not row.levers else "model",
        sequences=row.sequences,
        micro_batches=row.micro_batches,
        warmup=12 if row.replayed else 1 if asked.smoke else 3,
        steps=2 if asked.smoke else 8,
        peak_flops=known_peak(),
    )
    if row.program == "torch loop":
        return asdict(train(flags, workload_for(flags), torch.device(flags.device)))
    if row.program == "titan loop":
        return asdict(train(flags, workload_for(flags), torch.device(flags.device), sharded_blocks))
    with ExitStack() as levers:
        if asked.smoke and row.replayed:
            levers.enter_context(replaced(attention, attend=_tested().attend_by_ends))
        if asked.smoke and "cudnn" in row.levers:
            levers.enter_context(documents_as_on_cards())
        for name in row.levers:
            if name in OPEN:
                levers.enter_context(OPEN[name]())
        return train_plait(flags, row)


def train_plait(flags: argparse.Namespace, row: Row) -> Figures:
    """plait as plait_gpu.py trains it, with the row's levers around its steps."""
    from benchmarks import plait_gpu

    more = After()
    with tempfile.TemporaryDirectory() as folder:
        measured: Measured = plait_gpu.train(
            flags, workload_for(flags), Path(folder), partial(with_levers, row=row, more=more)
        )
    return {**asdict(measured), **more.figures}


@dataclass(slots=True)
class After:
    """What is read after the timed steps."""

    figures: Figures = field(default_factory=dict)


@contextmanager
def with_levers(assembly: Assembly, row: Row, more: After) -> Iterator[None]:
    """The row's levers around the steps of an assembly, and what it asks for after them."""
    with ExitStack() as levers:
        for name in row.levers:
            if name in AROUND:
                levers.enter_context(AROUND[name](assembly))
        if row.replayed:
            levers.enter_context(replays(assembly, more, smoke=assembly.device.type == "cpu"))
        yield
        if row.traced:
            more.figures["kernels"] = kernels_of_a_step(assembly)


@contextmanager
def documents_as_on_cards() -> Iterator[None]:
    """On a processor, the way that documents take on a card, but for the kernel."""
    from benchmarks import gpu_levers

    with replaced(attention, attend=partial(gpu_levers.attend_by_cudnn)):
        yield


def kernels_of_a_step(assembly: Assembly) -> dict[str, tuple[float, int]]:
    """Milliseconds and calls of each kernel of one step, the longest first."""
    state = TrainState()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if assembly.device.type == "cuda" else [])]
    with profile(activities=kinds) as watched:
        assembly.step(state)
        if assembly.device.type == "cuda":
            torch.cuda.synchronize()
    on_device = assembly.device.type == "cuda"
    spent = {
        event.key[:90]: (
            round((event.self_device_time_total if on_device else event.self_cpu_time_total) / 1e3, 3),
            event.count,
        )
        for event in watched.key_averages()
        if not on_device or event.device_type.name == "CUDA"
    }
    return dict(sorted(spent.items(), key=lambda item: -item[1][0])[:60])


@contextmanager
def replays(assembly: Assembly, more: After, *, smoke: bool) -> Iterator[None]:
    """Steps that are replayed as CUDA graphs, whatever is gained; on a processor they are repeated."""
    from plait.trainer import step_graph

    recorder: Any = _tested().Repeats() if smoke else step_graph.CudaRecorder()
    assembly.graphs = step_graph.StepGraphs(
        assembly.update_from, recorder, partial(more.figures.__setitem__, "decision")
    )
    with replaced(step_graph, HOST_BOUND=0.0, WORTHWHILE=math.inf):
        yield
    assembly.graphs = None


def _tested() -> Any:
    """What tests put in a GPU's place on a processor."""
    return importlib.import_module("tests.trainer.test_step_graph")


# Readings that train nothing.


def seconds_of(call: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """The median of some calls on the device, after two that are not timed."""
    took: list[float] = []
    for number in range(repeats + 2):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            seconds = begin.elapsed_time(end) / 1e3
        else:
            began = time.perf_counter()
            call()
            seconds = time.perf_counter() - began
        if number >= 2:
            took.append(seconds)
    return median(took)


def card(device: torch.device) -> Figures:
    """Bytes a second of a copy, read and written, and operations a second of a large product of random numbers."""
    large = device.type == "cuda"
    source = torch.empty(2**30 if large else 2**20, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    copied = seconds_of(lambda: target.copy_(source), device)
    width = 8192 if large else 256
    left, right = (torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = seconds_of(lambda: left @ right, device)
    host = seconds_of(lambda: left[:1, :1] + 1, device)
    return {
        "copy_bytes_per_s": 2 * source.nbytes / copied,
        "product_flops": 2 * width**3 / product,
        "small_kernel_s": host,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }


def adamw_alone(device: torch.device) -> Figures:
    """torch's fused AdamW beside the kernel that reads bfloat16 gradients and writes bfloat16 weights: the numbers of
    three updates that differ, and the seconds of one."""
    large = device.type == "cuda"
    kernels: dict[str, Callable[..., None]] = {"plain": adamw_plain}
    if large:
        kernels = {math: partial(adamw_kernel, math=math) for math in ("float64", "float32")}
    found: Figures = {}
    for name, kernel in kernels.items():
        ours, theirs = (adamw_state(2**22 if large else 2**10, device) for _ in range(2))
        for number in range(3):
            gradient = torch.randn(ours["weight"].shape, device=device, generator=seeded(device, number)).bfloat16()
            scale, skip = torch.full((), 37.25, device=device), torch.zeros((), device=device)
            fused_update(theirs, gradient.float(), scale, skip)
            our_update(kernel, ours, gradient, scale, skip)
            apart = [(ours[name] - theirs[name]).abs() for name in ("weight", "mean", "square")]
            found.setdefault(f"{name}, differing", []).append([int((one != 0).sum()) for one in apart])
            found.setdefault(f"{name}, largest", []).append([float(one.max()) for one in apart])
        found[f"{name}, copy equal"] = bool(torch.equal(ours["copy"], ours["weight"].bfloat16()))
    state = adamw_state(400_000_000 if large else 2**10, device)
    gradient = torch.randn(state["weight"].shape, device=device, dtype=torch.bfloat16)
    exact = gradient.float()
    scale, skip = torch.ones((), device=device), torch.zeros((), device=device)
    count = len(exact)
    found["fused_bytes_per_number"], found["kernel_bytes_per_number"] = 32, 28
    found["fused_s_per_billion"] = seconds_of(lambda: fused_update(state, exact, scale, skip), device) / count * 1e9
    for name, kernel in kernels.items():
        ours_s = seconds_of(partial(our_update, kernel, state, gradient, scale, skip), device)
        found[f"{name}, s_per_billion"] = ours_s / count * 1e9
    return found


def seeded(device: torch.device, seed: int) -> torch.Generator:
    """A generator of random numbers on the device."""
    return torch.Generator(device).manual_seed(seed)


def adamw_state(numbers: int, device: torch.device) -> dict[str, Tensor]:
    """A weight and its moments, always the same ones."""
    weight = torch.randn(numbers, device=device, generator=seeded(device, 99))
    zeros = {name: torch.zeros_like(weight) for name in ("mean", "square")}
    return {"weight": weight, "copy": weight.bfloat16(), "count": torch.zeros((), device=device), **zeros}


def fused_update(state: Mapping[str, Tensor], gradient: Tensor, scale: Tensor, skip: Tensor) -> None:
    """torch's."""
    state["count"].add_(1)
    cast(Any, torch)._fused_adamw_(
        [state["weight"]], [gradient], [state["mean"]], [state["square"]], [], [state["count"]], amsgrad=False,
        lr=3e-4, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, maximize=False, grad_scale=scale, found_inf=skip,
    )  # fmt: skip


def our_update(
    kernel: Callable[..., None], state: Mapping[str, Tensor], gradient: Tensor, scale: Tensor, skip: Tensor
) -> None:
    """The lever's."""
    state["count"].add_(1)
    kernel(
        state["weight"], state["copy"], gradient, state["mean"], state["square"], state["count"], scale, skip,
        lr=3e-4, betas=(0.9, 0.95), decay=0.1,
    )  # fmt: skip


def products_alone(device: torch.device) -> Figures:
    """A weight's gradient in the three ways that it can be added up, in seconds: rounded to bfloat16 and added, as
    today; a product with a float32 result, added; and a product that adds in float32 itself."""
    large = device.type == "cuda"
    found: Figures = {}
    exact: Any = torch.float32
    for tokens, rows, columns in ((8192, 8192, 3072), (8192, 3072, 3072)) if large else ((64, 32, 16),):
        grad = torch.randn(tokens, rows, device=device, dtype=torch.bfloat16)
        x = torch.randn(tokens, columns, device=device, dtype=torch.bfloat16)
        total = torch.zeros(rows, columns, device=device)
        ways: dict[str, Callable[[], object]] = {
            "product": lambda grad=grad, x=x: grad.t() @ x,
            "rounded, added": lambda grad=grad, x=x, total=total: total.add_(grad.t() @ x),
        }
        if large:
            ways["float32, added"] = lambda grad=grad, x=x, total=total: total.add_(
                torch.ops.aten.mm.dtype(grad.t(), x, exact)
            )
            ways["adds itself"] = lambda grad=grad, x=x, total=total: torch.ops.aten.addmm.dtype_out(
                total, grad.t(), x, exact, out=total
            )
        for name, way in ways.items():
            try:
                found[f"{tokens}x{rows}x{columns}: {name}"] = seconds_of(way, device)
            except Exception as error:
                found[f"{tokens}x{rows}x{columns}: {name}"] = f"{type(error).__name__}: {str(error)[:200]}"
    return found


def attention_alone(device: torch.device) -> Figures:
    """Forward, and forward with backward, of one layer's attention in seconds, by kernel; and each kernel's errors
    beside float64, with documents of one token, of none, and with fewer heads of keys."""
    large = device.type == "cuda"
    found: Figures = {"errors": {}}
    for label, heads, kv_heads, head_width in (("16 heads", 16, 16, 128), ("8 of 32 heads", 32, 8, 128)):
        lengths = (1, 700, 300, 1, 46, 1000) if large else (1, 7, 3, 5)
        try:
            found["errors"][label] = errors_of(lengths, heads, kv_heads, head_width, device)
        except Exception as error:
            traceback.print_exc()
            found["errors"][label] = f"{type(error).__name__}: {str(error)[:300]}"
    sizes = {"1B": (4, 4096, 16, 128), "125M": (32, 1024, 12, 64)} if large else {"tiny": (2, 32, 2, 16)}
    for size, (rows, tokens, heads, head_width) in sizes.items():
        for documents in (rows, 8 * rows):
            lengths = tuple([tokens * rows // documents] * documents)
            for name, call in ways_of(rows, tokens, heads, head_width, lengths, device).items():
                key = f"{size}, {documents} documents, {name}"
                try:
                    found[key] = seconds_of(call, device)
                except Exception as error:
                    found[key] = f"{type(error).__name__}: {str(error)[:300]}"
    return found


def ways_of(
    rows: int, tokens: int, heads: int, head_width: int, lengths: tuple[int, ...], device: torch.device
) -> dict[str, Callable[[], object]]:
    """Kernels by name, forward alone and with backward."""
    q, k, v, grad = (
        torch.randn(rows * tokens, heads, head_width, device=device, dtype=torch.bfloat16) for _ in range(4)
    )
    leaves = [one.requires_grad_() for one in (q, k, v)]
    ends = cumulative_lengths(lengths).to(device)
    padded = cumulative_lengths((*lengths, *[0] * (ENDS - len(lengths)))).to(device)

    def dense() -> Tensor:
        q, k, v = (one.view(rows, tokens, heads, head_width).transpose(1, 2) for one in leaves)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(grad.shape)

    def by_cudnn(ends: Tensor) -> Tensor:
        return ragged_forward(*leaves, ends, tokens)[0]

    kernels: dict[str, Callable[[], Tensor]] = {
        "dense": dense,
        "cudnn": partial(by_cudnn, ends),
        "cudnn, padded": partial(by_cudnn, padded),
    }
    if device.type == "cuda":
        from torch.nn.attention.varlen import varlen_attn

        flash: Any = varlen_attn
        kernels["flash"] = lambda: flash(*leaves, ends, ends, tokens, tokens, window_size=(-1, 0))
    calls: dict[str, Callable[[], object]] = {}
    for name, kernel in kernels.items():
        calls[f"{name}, forward"] = partial(without_gradients, kernel)
        calls[f"{name}, both"] = lambda kernel=kernel: torch.autograd.grad(kernel(), leaves, grad)
    return calls


def without_gradients(call: Callable[[], Tensor]) -> Tensor:
    """A forward pass alone."""
    with torch.no_grad():
        return call()


def errors_of(
    lengths: tuple[int, ...], heads: int, kv_heads: int, head_width: int, device: torch.device
) -> dict[str, list[float]]:
    """By kernel: the relative errors of the result and of the gradients of queries, keys and values beside float64."""
    tokens = sum(lengths)
    shapes = (heads, kv_heads, kv_heads, heads)
    q, k, v, grad = (
        torch.randn(tokens, count, head_width, device=device, generator=seeded(device, number)).bfloat16()
        for number, count in enumerate(shapes)
    )
    ends = cumulative_lengths(lengths).to(device)
    padded = cumulative_lengths((*lengths, *[0] * (64 - len(lengths)))).to(device)
    exact = on_processor(q, k, v, grad, ends)
    found: dict[str, list[float]] = {}
    for name, own in {"cudnn": ends, "cudnn, padded": padded}.items():
        mixed, kept = ragged_forward(q, k, v, own, max(lengths))
        gradients = ragged_backward(grad, q, k, v, mixed, kept, own, max(lengths))
        found[name] = [relative(*pair) for pair in zip((mixed, *gradients), exact, strict=True)]
    if device.type == "cuda":
        from torch.nn.attention.varlen import varlen_attn

        flash: Any = varlen_attn
        leaves = [one.clone().requires_grad_() for one in (q, k, v)]
        spread = [leaves[0], *(one.repeat_interleave(heads // kv_heads, dim=1) for one in leaves[1:])]
        mixed = flash(*spread, of_any_length(ends), ends, max(lengths), max(lengths), window_size=(-1, 0))
        gradients = torch.autograd.grad(mixed, leaves, grad)
        found["flash"] = [relative(*pair) for pair in zip((mixed, *gradients), exact, strict=True)]
    return found


def on_processor(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, ends: Tensor) -> list[Tensor]:
    """The result and the three gradients in float64 on the processor."""
    exact = [one.detach().cpu().double() for one in (q, k, v, grad)]
    mixed, kept = ragged_forward(*exact[:3], ends.cpu(), 0)
    return [mixed, *ragged_backward(exact[3], *exact[:3], mixed, kept, ends.cpu(), 0)]


def relative(found: Tensor, exact: Tensor) -> float:
    """The norm of the difference over the norm."""
    return float((found.detach().cpu().double() - exact).norm() / exact.norm())


if __name__ == "__main__":
    sys.exit(main())
