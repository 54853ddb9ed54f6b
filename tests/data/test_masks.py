"""Tokens that are marked are read like all others and never learned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from plait.data.loader import IGNORED_TARGET, Loader, Micro, SampleSelection, heldout_micros
from plait.data.order import make_order
from plait.data.preparation.synthetic import write_synthetic
from plait.data.samples.windows import WindowReader
from plait.data.shards import Corpus, open_corpus
from plait.errors import PlaitError

SEQUENCE = 12


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return open_corpus(write_synthetic(tmp_path, vocabulary=50, sequence=SEQUENCE, seed=3))


def samples(*parts: int, part: int = 0) -> SampleSelection:
    lockstep_replicas = range(part, part + 1)
    given = {"sequence": SEQUENCE, "documents": "mask", "device": torch.device("cpu")}
    return SampleSelection(
        sequences_per_replica=parts,
        data_parallel_rank=part,
        lockstep_replicas=lockstep_replicas,
        micro_sequences=40,
        **given,
    )


def counted(micros: list[Micro]) -> int:
    return sum(int((micro.targets != IGNORED_TARGET).sum()) for micro in micros)


def test_the_corpus_has_what_can_go_wrong(corpus: Corpus) -> None:
    assert len(corpus.train) > 1 and len(corpus.heldout) >= 1
    lengths = np.concatenate([np.diff(shard.starts) - 1 for shard in corpus.train])
    assert lengths.min() <= 2 and lengths.max() > 2 * SEQUENCE
    marks = np.concatenate([shard.mask for shard in corpus.train if shard.mask is not None])
    assert 0.1 < marks.mean() < 0.5
    assert len(marks) == corpus.train_tokens


def test_a_step_leaves_marked_targets_out_and_keeps_the_inputs(corpus: Corpus) -> None:
    order = make_order(corpus, 1, SEQUENCE)
    loader = Loader(corpus, WindowReader(corpus.train, order, corpus.vocabulary), samples(40))
    (micro,) = loader.micros(0)
    loader.close()
    left_out = 0
    for row, (shard, start) in enumerate(zip(*order.windows(np.arange(40)), strict=True)):
        source = corpus.train[shard]
        assert source.mask is not None
        window, marks = (part[start : start + SEQUENCE + 1] for part in (source.tokens, source.mask))
        assert micro.inputs[row].tolist() == window[:-1].tolist()
        wanted = [IGNORED_TARGET if mark else token for token, mark in zip(window[1:], marks[1:], strict=True)]
        assert micro.targets[row].tolist() == wanted
        left_out += int(marks[1:].sum())
    assert left_out > 0


def test_held_out_tokens_count_once_but_for_the_marked(corpus: Corpus) -> None:
    seen = [counted(list(heldout_micros(corpus, samples(20, 13, 7, part=part)))) for part in range(3)]
    unmarked = sum(
        len(shard.tokens) - 1 - int(shard.mask[1:].sum()) for shard in corpus.heldout if shard.mask is not None
    )
    assert sum(seen) == unmarked


def test_marks_belong_to_the_content_and_are_verified(corpus: Corpus) -> None:
    corpus.verify()
    name = f"{corpus.entries[0].name}.mask.bin"
    marks = bytearray((corpus.folder / name).read_bytes())
    marks[-1] ^= 1
    (corpus.folder / name).write_bytes(marks)
    with pytest.raises(PlaitError, match=rf"damaged \({name} is not what was written\); delete"):
        open_corpus(corpus.folder).verify()
    (corpus.folder / name).write_bytes(marks[:-1])
    with pytest.raises(PlaitError, match=rf"damaged \({name} has \d+ bytes, its index says \d+\); delete"):
        open_corpus(corpus.folder)


def test_equal_seeds_write_equal_corpora(corpus: Corpus, tmp_path: Path) -> None:
    for seed, equal in ((3, True), (4, False)):
        (folder := tmp_path / str(seed)).mkdir()
        other = open_corpus(write_synthetic(folder, vocabulary=50, sequence=SEQUENCE, seed=seed))
        assert (other.content_hash == corpus.content_hash) == equal
