"""The loss of the real SmolLM2-135M on real text, by `plait eval` and by transformers on the same windows.

    make smollm2
    python -m benchmarks.real_model                 # 100 KB of Shakespeare; writes results/real-model-DATE.json
    python -m benchmarks.real_model --bytes 10000 --smoke       # fewer; saves nothing

transformers gets the inputs and targets that plait's reader of held-out text makes, and computes all else by itself.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

import plait
from benchmarks.machine import describe
from benchmarks.pairing import save
from plait.commands.preparing.base import model_folder
from plait.data.loader import SampleSelection, heldout_micros
from plait.data.preparation.build import DataRequest
from plait.data.preparation.prepare import prepare_corpus
from plait.data.rows import IGNORED_TARGET
from plait.data.shards import open_corpus
from plait.data.sources import Source
from plait.screen.screen import ignore_progress
from plait.working_folder import WorkingFolder

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "models" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = ROOT / "recipes" / "shakespeare.txt"
BYTES, SEQUENCE, BAR = 100_000, 512, 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedLosses:
    """One text's loss in nats per token, by both."""

    tokens: int
    bytes: int
    plait: float
    transformers: float

    @property
    def difference(self) -> float:
        return abs(self.plait - self.transformers)


def main() -> int:
    """Print both losses and save them; 1 where they are further apart than the bar."""
    parser = argparse.ArgumentParser(description="the loss of a real model, by plait and by transformers")
    parser.add_argument("--bytes", type=int, default=BYTES)
    parser.add_argument("--smoke", action="store_true")
    asked = parser.parse_args()
    if not MODEL.is_file():
        sys.exit(f"plait: there is no {MODEL}; bring it with: make smollm2")
    with tempfile.TemporaryDirectory() as folder:
        found = compare_losses(MODEL, Path(folder), asked.bytes)
    values = {field: getattr(found, field) for field in ("tokens", "bytes", "plait", "transformers", "difference")}
    print(values)
    if not asked.smoke:
        named = {"model": MODEL.name, "text": f"the first bytes of {TEXT.name}", "sequence": SEQUENCE, "bar": BAR}
        print(f"wrote {save('real-model', {'machine': describe(), **named, **values})}")
    return int(found.difference > BAR)


def compare_losses(model: Path, folder: Path, nbytes: int) -> ComparedLosses:
    """Both losses on the first bytes of TEXT; `folder` is for what is made on the way."""
    working, text = WorkingFolder(folder), folder / "text.txt"
    text.write_bytes(TEXT.read_bytes()[:nbytes])
    ours = plait.evaluate(str(model), [str(text)], sequence=SEQUENCE, folder=folder)
    base = model_folder(str(model), working)
    total, tokens = _theirs(base, text, folder / "cache")
    assert tokens == ours["tokens"], (tokens, ours)
    return ComparedLosses(
        tokens=tokens, bytes=int(ours["bytes"]), plait=ours["nats_per_token"], transformers=total / tokens
    )


def _theirs(base: Path, text: Path, cache: Path) -> tuple[float, int]:
    """transformers' summed loss on the windows of a text, and their tokens."""
    request = DataRequest(sources=(Source(str(text)),), tokenizer=str(base), vocabulary=None, holdout=0.0)
    corpus = open_corpus(prepare_corpus(request, cache, ignore_progress))
    assert sum(len(shard.starts) for shard in corpus.train) == 1, "one document, or windows would have masks"
    samples = SampleSelection(
        sequence=SEQUENCE,
        sequences_per_replica=(1,),
        data_parallel_rank=0,
        lockstep_replicas=range(1),
        micro_sequences=1,
        documents="join",
        device=torch.device("cpu"),
    )
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    total, tokens = 0.0, 0
    heldout = replace(corpus, train=(), heldout=corpus.train)
    with torch.no_grad():
        for micro in heldout_micros(heldout, samples):
            logits = model(micro.inputs).logits[0]
            total += float(
                cross_entropy(logits.double(), micro.targets[0], ignore_index=IGNORED_TARGET, reduction="sum")
            )
            tokens += int((micro.targets != IGNORED_TARGET).sum())
    return total, tokens


if __name__ == "__main__":
    sys.exit(main())
