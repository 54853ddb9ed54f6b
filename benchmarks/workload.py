"""The work that every contender of the first-run benchmark does: shape, optimizer, tokens, order and initial weights.

`prepare` writes it into a folder once; the contenders read that folder and nothing else, so all of them see the very
same windows in the same step and start from the same bytes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import ByteLevelBPETokenizer

from benchmarks.processes import Mode

TEXT = Path(__file__).parent.parent / "recipes" / "shakespeare.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A GPT-2 (learned positions, biases, tanh GELU, tied head, no dropout) and how it is trained."""

    layers: int = 6
    width: int = 384
    heads: int = 6
    sequence: int = 256
    vocabulary: int = 512
    sequences_per_rank: int = 4
    learning_rate: float = 3e-4  # Note [learning rate]
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    norm_epsilon: float = 1e-5
    seed: int = 7

    @property
    def tokens_per_rank(self) -> int:
        return self.sequences_per_rank * self.sequence

    @property
    def parameters(self) -> int:
        """Of matrices and embeddings; vectors are few."""
        return 12 * self.layers * self.width**2 + (self.vocabulary + self.sequence) * self.width

    @property
    def flops_per_token(self) -> int:
        """Matmul work forward and backward, three times the forward's, attention counted in full."""
        matrices = 12 * self.layers * self.width**2 + self.width * self.vocabulary
        return 6 * matrices + 12 * self.layers * self.sequence * self.width


# Note [learning rate]: equal losses say something only where rounding stays small. At 1e-3 without warm-up the loss
# jumps by up to 3 within 20 steps, and float32 against float64 of one and the same loop differed by 1.5e-5, 2e-3 and
# 8e-2 (three seeds); at 3e-4 by at most 8e-6. The speed does not depend on it.
FIRST_RUN = Workload()
SMOKE = Workload(layers=2, width=64, heads=2, sequence=64, vocabulary=300)
SMALL = Workload(layers=4, width=160, heads=5)
LARGE = Workload(layers=10, width=640, heads=10, sequences_per_rank=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchCase:
    """One table of the benchmark: a model and batch, ranks and threads, and who takes part beside plait."""

    workload: Workload
    mode: Mode
    peers: tuple[str, ...] = ("loop",)
    everywhere: bool = False
    """Also with a one-thread process a core."""

    @property
    def name(self) -> str:
        work = self.workload
        return f"{work.parameters / 1e6:.1f}M, {work.sequences_per_rank} × {work.sequence} tokens, {self.mode}"


def bench_cases(mode: Mode) -> list[BenchCase]:
    """The main case with all peers, then other sizes and lengths with the loop, 1,024 tokens a rank in most."""
    main = BenchCase(workload=FIRST_RUN, mode=mode, peers=("loop", "half the threads", "trainer"), everywhere=True)
    lengths = [replace(FIRST_RUN, sequence=1024 // rows, sequences_per_rank=rows) for rows in (8, 2, 1)]
    return [main, *(BenchCase(workload=work, mode=mode) for work in (SMALL, LARGE, *lengths))]


def prepare(workload: Workload, folder: Path, *, steps: int, world_size: int) -> None:
    """Write tokens.bin (uint16), order.npy (int64 window numbers), init.safetensors and workload.json into `folder`.

    Window w covers tokens [w * sequence, w * sequence + sequence + 1); its last token is a target only. In step s,
    rank r of W takes the `sequences_per_rank` entries of order.npy that start at (s * W + r) * sequences_per_rank.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.array(_tokenize(workload.vocabulary), dtype=np.uint16)
    tokens.tofile(folder / "tokens.bin")
    windows = (len(tokens) - 1) // workload.sequence
    needed = steps * world_size * workload.sequences_per_rank
    generator = np.random.default_rng(workload.seed)
    epochs = [generator.permutation(windows) for _ in range(-(-needed // windows))]
    np.save(folder / "order.npy", np.concatenate(epochs)[:needed].astype(np.int64))
    save_file(initial_weights(workload), folder / "init.safetensors")
    (folder / "workload.json").write_text(json.dumps(asdict(workload), indent=2) + "\n")


def load_workload(folder: Path) -> Workload:
    """Read back what `prepare` wrote."""
    return Workload(**json.loads((folder / "workload.json").read_text()))


def initial_weights(workload: Workload) -> dict[str, torch.Tensor]:
    """GPT-2's own scheme: normal 0.02, what writes to the residual divided by sqrt(2 * layers); matrices are [out, in].

    The names are those of `benchmarks.peers.ddp_loop.GPT2`: qkv holds query, key and value rows in this order.
    """
    width, ffn = workload.width, 4 * workload.width
    generator = torch.Generator().manual_seed(workload.seed)
    shapes = {"tokens.weight": (workload.vocabulary, width), "positions.weight": (workload.sequence, width)}
    for layer in range(workload.layers):
        shapes |= _norm(f"blocks.{layer}.norm1", width)
        shapes |= _linear(f"blocks.{layer}.qkv", 3 * width, width) | _linear(f"blocks.{layer}.out", width, width)
        shapes |= _norm(f"blocks.{layer}.norm2", width)
        shapes |= _linear(f"blocks.{layer}.up", ffn, width) | _linear(f"blocks.{layer}.down", width, ffn)
    shapes |= _norm("norm", width)
    return {name: _draw(name, shape, workload.layers, generator) for name, shape in shapes.items()}


def _draw(name: str, shape: tuple[int, ...], layers: int, generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape) if "norm" in name and name.endswith("weight") else torch.zeros(shape)
    residual = name.endswith(("out.weight", "down.weight"))
    std = 0.02 / (2 * layers) ** 0.5 if residual else 0.02
    return torch.randn(shape, generator=generator) * std


def _linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _tokenize(vocabulary: int) -> list[int]:
    text = TEXT.read_text(encoding="utf-8")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(text.splitlines(keepends=True), vocab_size=vocabulary, show_progress=False)
    lines = tokenizer.encode_batch(text.splitlines(keepends=True))
    return [token for line in lines for token in line.ids]
