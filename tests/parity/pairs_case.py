"""One step's loss of pairs and its gradients, in float64, by plait and by plain torch with transformers' own model.

The model that learns and the reference are two random GPT-2, saved by transformers and read by plait (of other families
transformers computes rotary positions in float32, whatever the model's precision). By hand each
answer is one sequence of its own, its log-probability the sum that log_softmax gives, and the loss TRL's formula. As a
program it prints the largest relative error, so that a mutated copy of plait can be asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from plait.data.loader import Loader, Micro, SampleSelection
from plait.data.preparation.synthetic import write_synthetic
from plait.data.samples.opening import all_pairs, training_samples
from plait.data.shards import Corpus, open_corpus
from plait.interop.base_model import BaseModel, read_base_model
from plait.interop.read_weights import load_model_from
from plait.model.gpt import GPT
from plait.parallel.sharded_model import unsharded
from plait.trainer.preference.formulas import PreferenceLoss
from plait.trainer.preference.pair_losses import PairLosses
from plait.trainer.step import make_forward
from tests.interop.random_models import SEQUENCE, VOCABULARY, random_config, random_model

BETA, ROWS = 0.7, 9
LOSS = PreferenceLoss(kind="dpo", beta=BETA, compared_with="base")
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
WAYS = ("one micro-batch", "a row at a time", "by hand")


def losses_and_gradients(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Of each way the sum of losses, the pairs, and the gradient of every weight divided by them."""
    (folder / "corpus").mkdir()
    corpus = open_corpus(
        write_synthetic(folder / "corpus", vocabulary=VOCABULARY, sequence=SEQUENCE, seed=5, layout="pairs")
    )
    learning, reference = saved(folder / "learning", 0), saved(folder / "reference", 0, another=True)
    return {
        "one micro-batch": _through_plait(corpus, ROWS, learning, reference),
        "a row at a time": _through_plait(corpus, 1, learning, reference),
        "by hand": _by_hand(corpus, learning, reference),
    }


def saved(folder: Path, seed: int, *, another: bool = False) -> BaseModel:
    """A random GPT-2's folder; `another` has the same shape and other weights."""
    model: Any = random_model(random_config(seed))
    if another:
        torch.manual_seed(8)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.05 * torch.randn_like(weight)
    model.save_pretrained(folder)
    return read_base_model(folder)


def _micros(corpus: Corpus, micro_sequences: int) -> list[Micro]:
    selection = SampleSelection(
        sequence=SEQUENCE,
        sequences_per_replica=(ROWS,),
        data_parallel_rank=0,
        lockstep_replicas=range(1),
        micro_sequences=micro_sequences,
        documents="mask",
        device=torch.device("cpu"),
    )
    loader = Loader(corpus, training_samples(corpus, 1, SEQUENCE), selection)
    try:
        return loader.micros(0)
    finally:
        loader.close()


def _through_plait(corpus: Corpus, micro: int, learning: BaseModel, reference: BaseModel) -> dict[str, Tensor]:
    micros = _micros(corpus, micro)
    model, first = (load_model_from(one, SEQUENCE, torch.device("cpu")).double() for one in (learning, reference))
    forward = make_forward(nullcontext)
    recorder = PairLosses(unsharded(first), all_pairs(corpus), LOSS, nullcontext)
    with torch.no_grad(), recorder.record() as table:
        for one in micros:
            recorder.loss_of(forward(first, one, None), first, one)
    pairs = PairLosses(unsharded(model), all_pairs(corpus), LOSS, nullcontext)
    pairs.set_reference(table)
    for weight in model.parameters():
        weight.requires_grad_(True)
    total, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for one in micros:
        loss = pairs.loss_of(forward(model, one, None), model, one)
        loss.backward()
        total, count = total + loss.detach(), count + one.counted
    return {"loss": total, "pairs": count, **_gradients(model, learning, float(count))}


def _gradients(model: GPT, base: BaseModel, count: float) -> dict[str, Tensor]:
    """By transformers' names, and as it lays them out: queries, keys and values as one, [in, out]."""
    parts: dict[str, list[Tensor]] = {}
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        parts.setdefault(base.places[name].stored.name, []).append(weight.grad / count)
    found = {name: torch.cat(grads) for name, grads in parts.items()}
    return {name: grad.T if name.endswith(TRANSPOSED) else grad for name, grad in found.items()}


def _by_hand(corpus: Corpus, learning: BaseModel, reference: BaseModel) -> dict[str, Tensor]:
    from transformers import AutoModelForCausalLM

    model, first = (AutoModelForCausalLM.from_pretrained(one.folder).double() for one in (learning, reference))
    numbers = [int(n) for one in _micros(corpus, ROWS) if one.pairs is not None for n in one.pairs.numbers]
    total = torch.zeros((), dtype=torch.float64)
    for chosen, rejected in (_pair(corpus, number) for number in numbers):
        with torch.no_grad():
            before = [_log_probability(first, *one) for one in (chosen, rejected)]
        after = [_log_probability(model, *one) for one in (chosen, rejected)]
        loss = -F.logsigmoid(BETA * ((after[0] - after[1]) - (before[0] - before[1])))
        loss.backward()
        total = total + loss.detach()
    gradients = {
        name: weight.grad / len(numbers) for name, weight in model.named_parameters() if weight.grad is not None
    }
    return {"loss": total, "pairs": torch.tensor(float(len(numbers))).double(), **gradients}


def _pair(corpus: Corpus, number: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and marks of the chosen and the rejected example, read from the files alone."""
    for shard in corpus.train:
        if number < len(shard.starts) // 2:
            bounds = [*shard.starts.tolist(), len(shard.tokens) - 1]
            assert shard.mask is not None
            for one in (2 * number, 2 * number + 1):
                part = slice(bounds[one], bounds[one + 1])
                tokens, marks = (np.array(values[part]).astype(np.int64) for values in (shard.tokens, shard.mask))
                yield torch.from_numpy(tokens), torch.from_numpy(marks)
            return
        number -= len(shard.starts) // 2


def _log_probability(model: Any, tokens_n: Tensor, marks_n: Tensor) -> Tensor:
    scores_nv = model(tokens_n[None, :-1]).logits[0].double()
    picked_n = F.log_softmax(scores_nv, dim=-1).gather(1, tokens_n[1:, None]).squeeze(1)
    return picked_n[marks_n[1:] == 0].sum()


def largest_error(found: dict[str, dict[str, Tensor]]) -> float:
    """The largest difference between a way and the one by hand, relative to the tensor's largest value."""
    expected = found["by hand"]
    assert all(found[way].keys() == expected.keys() for way in WAYS)
    return max(
        float((found[way][name] - other).abs().max() / other.abs().max().clamp(min=1e-30))
        for way in WAYS
        for name, other in expected.items()
    )
