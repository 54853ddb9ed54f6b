"""Whole examples in windows: none is cut, each is read once a pass, and the last step of a finite set is exact."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from plait.data.loader import IGNORED_TARGET, Loader, Micro, SampleSelection, heldout_micros
from plait.data.preparation.build import DataRequest
from plait.data.preparation.prepare import prepare_corpus
from plait.data.preparation.synthetic import write_synthetic
from plait.data.samples.best_fit import best_fit
from plait.data.samples.opening import training_samples
from plait.data.samples.sizes import corpus_sizes
from plait.data.shards import Corpus, open_corpus
from plait.data.sources import Source
from plait.errors import PlaitError

SEQUENCE = 16
SETS = next(
    (above / "shared" / "data" for above in Path(__file__).parents if (above / "shared" / "data").is_dir()), None
)
PART = Path(__file__).parents[1] / "fixtures" / "chats" / "chatterbot_part.jsonl"


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return open_corpus(write_synthetic(tmp_path, vocabulary=500, sequence=SEQUENCE, seed=3, layout="whole"))


def samples(*parts: int, part: int = 0, together: bool = False) -> SampleSelection:
    return SampleSelection(
        sequence=SEQUENCE,
        sequences_per_replica=parts,
        data_parallel_rank=part,
        lockstep_replicas=range(len(parts)) if together else range(part, part + 1),
        micro_sequences=3,
        documents="mask",
        device=torch.device("cpu"),
    )


Pairs = Counter[tuple[tuple[int, ...], tuple[int, ...]]]


def examples_of(corpus: Corpus) -> Pairs:
    """Inputs and targets of each training example, read from the files alone."""
    found: Pairs = Counter()
    for shard in corpus.train:
        assert shard.mask is not None
        bounds = [*shard.starts.tolist(), len(shard.tokens) - 1]
        for first, last in itertools.pairwise(bounds):
            ids, marks = shard.tokens[first:last].tolist(), shard.mask[first:last].tolist()
            wanted = [IGNORED_TARGET if mark else token for token, mark in zip(ids[1:], marks[1:], strict=True)]
            found[tuple(ids[:-1]), tuple(wanted)] += 1
    return found


def segments_of(micros: list[Micro]) -> Pairs:
    """Inputs and targets of each segment in micro-batches that something is learned from."""
    found: Pairs = Counter()
    for micro in micros:
        assert micro.lengths is not None and micro.positions is not None
        inputs, targets, positions = (
            each.flatten().tolist() for each in (micro.inputs, micro.targets, micro.positions)
        )
        begin = 0
        for length in micro.lengths:
            end = begin + length
            assert positions[begin:end] == list(range(length)), "positions restart with each example"
            if set(targets[begin:end]) != {IGNORED_TARGET}:
                found[tuple(inputs[begin:end]), tuple(targets[begin:end])] += 1
            begin = end
        assert begin == len(inputs)
    return found


def test_best_fit_keeps_every_length_in_a_window_and_wastes_little() -> None:
    draws = np.random.default_rng(1)
    for room in (1, 7, 64, 1000):
        lengths = draws.integers(1, room + 1, size=500)
        window = best_fit(lengths, room)
        sums = np.bincount(window, weights=lengths)
        assert set(window.tolist()) == set(range(len(sums))) and sums.max() <= room
        assert len(sums) <= 11 / 9 * -(-lengths.sum() // room) + 1
    assert best_fit(np.array([6, 5, 5, 4]), 10).tolist() == [0, 1, 1, 0]
    assert best_fit(np.zeros(0, dtype=np.int64), 10).tolist() == []


def test_windows_of_examples_around_half_a_window_are_95_percent_full() -> None:
    for seed, deviation in ((1, 0.1), (2, 0.2), (3, 0.3)):
        draws = np.random.default_rng(seed)
        lengths = np.clip(draws.normal(512, deviation * 512, size=2000).astype(np.int64), 1, 1024)
        full = lengths.sum() / ((best_fit(lengths, 1024).max() + 1) * 1024)
        assert full >= 0.95, f"deviation {deviation}: {full:.1%}"


def test_an_epoch_reads_every_example_once_whatever_the_ranks(corpus: Corpus) -> None:
    expected = examples_of(corpus)
    for parts in ((5,), (3, 1), (1, 2, 4)):
        found: Pairs = Counter()
        for part in range(len(parts)):
            reader = training_samples(corpus, 1, SEQUENCE, epochs=1)
            loader = Loader(corpus, reader, samples(*parts, part=part, together=True))
            for position in range(0, reader.samples, sum(parts)):
                found += segments_of(loader.micros(position))
            loader.close()
        assert found == expected


def test_three_epochs_end_on_one_step_and_the_last_batch_is_what_is_left(corpus: Corpus) -> None:
    reader = training_samples(corpus, 1, SEQUENCE, epochs=3)
    batch, end = 7, 3 * reader.samples
    assert end % batch, "the last step must be a smaller one"
    counts, found = list[list[int]](), Counter()
    for part in range(2):
        loader = Loader(corpus, training_samples(corpus, 1, SEQUENCE, epochs=3), samples(4, 3, part=part))
        steps = [loader.micros(position) for position in range(0, end, batch)]
        loader.close()
        for micros in steps:
            found += segments_of(micros)
        counts.append([sum(int((micro.targets != IGNORED_TARGET).sum()) for micro in micros) for micros in steps])
    assert found == Counter({pair: 3 * count for pair, count in examples_of(corpus).items()})
    whole = Loader(corpus, training_samples(corpus, 1, SEQUENCE), samples(end % batch))
    last = whole.micros(end - end % batch)
    whole.close()
    assert counts[0][-1] + counts[1][-1] == sum(int((micro.targets != IGNORED_TARGET).sum()) for micro in last)


def test_the_order_is_a_function_of_seed_and_position(corpus: Corpus) -> None:
    def step(position: int, seed: int = 1) -> list[list[int]]:
        loader = Loader(corpus, training_samples(corpus, seed, SEQUENCE), samples(6))
        found = [row for micro in loader.micros(position) for row in micro.inputs.tolist()]
        loader.close()
        return sorted(found)

    assert step(60) == step(60) != step(66)
    assert step(60) != step(60, seed=2)
    parts = [Loader(corpus, training_samples(corpus, 1, SEQUENCE), samples(2, 4, part=part)) for part in range(2)]
    rows = [row for loader in parts for micro in loader.micros(60) for row in micro.inputs.tolist()]
    for loader in parts:
        loader.close()
    assert sorted(rows) == step(60)


def test_each_held_out_token_that_is_learnt_counts_once(corpus: Corpus) -> None:
    seen = 0
    for part in range(3):
        for micro in heldout_micros(corpus, samples(4, 2, 1, part=part)):
            seen += int((micro.targets != IGNORED_TARGET).sum())
    assert seen == sum(int((shard.mask == 0).sum()) for shard in corpus.heldout if shard.mask is not None)


def test_examples_that_are_too_long_are_refused_left_out_or_cut_and_counted(corpus: Corpus) -> None:
    sizes, short = corpus_sizes(corpus), 8
    lengths = [len(inputs) for (inputs, _), count in examples_of(corpus).items() for _ in range(count)]
    longer = sum(length > short for length in lengths)
    held = sum(count for length, _, count in sizes.heldout if length > short)
    assert longer and held
    sentence = (
        rf"{longer + held} examples are longer than a window of {short} tokens \(the longest has {max(lengths)}\)"
    )
    with pytest.raises(PlaitError, match=sentence):
        sizes.check_overlong(short, "refuse")
    with pytest.raises(PlaitError, match="are longer than a window of 8 tokens"):
        training_samples(corpus, 1, short)
    for overlong in ("drop", "cut"):
        sizes.check_overlong(short, overlong)
        packed = sizes.packed(short, overlong)
        reader = training_samples(corpus, 1, short, overlong=overlong)
        assert packed.windows == reader.samples and packed.overlong == longer
        rows = reader.read(reader.places(np.arange(reader.samples)))
        expected: Pairs = Counter()
        for (inputs, targets), count in examples_of(corpus).items():
            kept = (inputs[:short], targets[:short])
            if (overlong == "cut" or len(inputs) <= short) and set(kept[1]) != {IGNORED_TARGET}:
                expected[kept] += count
        learned = sum(count * sum(t != IGNORED_TARGET for t in targets) for (_, targets), count in expected.items())
        assert int((rows.targets != IGNORED_TARGET).sum()) == learned
        filled = sum(count * len(inputs) for (inputs, _), count in expected.items())
        assert packed.share == pytest.approx(filled / (packed.windows * short))


def test_work_is_counted_as_it_is(corpus: Corpus) -> None:
    reader = training_samples(corpus, 1, SEQUENCE, epochs=1)
    places = reader.places(np.arange(reader.samples + 2))
    rows = reader.read(places)
    ends, begin = np.cumsum(rows.lengths), 0
    for row, (pairs, counted) in enumerate(
        zip(reader.attention_pairs(places), reader.counted_targets(places), strict=True)
    ):
        own = rows.lengths[(ends > row * SEQUENCE) & (ends <= (row + 1) * SEQUENCE)]
        begin += int(own.sum())
        assert begin == (row + 1) * SEQUENCE
        assert pairs == (own * (own + 1) // 2).sum()
        assert counted == (rows.targets[row] != IGNORED_TARGET).sum()
    assert reader.counted_targets(places)[-2:].tolist() == [0, 0]


def prepared(chats: Path, folder: Path, holdout: float = 0.05) -> Corpus:
    request = DataRequest(sources=(Source(str(chats)),), tokenizer="gpt2", vocabulary=None, holdout=holdout)
    return open_corpus(prepare_corpus(request, folder / "cache", lambda *_: None))


def test_a_few_real_chats_leave_less_than_a_window_free(tmp_path: Path) -> None:
    """So few fill so few windows that the last one weighs: shares of whole sets are below."""
    corpus = prepared(PART, tmp_path)
    sizes, answers = corpus_sizes(corpus), answer_bytes(PART)
    for sequence in (512, 1024):
        packed = sizes.packed(sequence, "refuse")
        assert packed.share > 1 - 1 / packed.windows, f"{sequence}: {packed}"
    assert corpus.train_bytes + corpus.heldout_bytes == answers


def answer_bytes(chats: Path) -> int:
    """Bytes of all answers in a set, each with its end of text."""
    with chats.open(encoding="utf-8") as file:
        rows = [json.loads(line)["messages"] for line in file]
    return sum(
        len(m["content"].encode()) + len("<|endoftext|>") for row in rows for m in row if m["role"] == "assistant"
    )


@pytest.mark.skipif(SETS is None, reason="the shared chat sets are not here")
@pytest.mark.parametrize(
    "name", ["sft_chatterbot_en.jsonl", pytest.param("sft_wordnet_define_3mb.jsonl", marks=pytest.mark.slow)]
)
def test_real_chats_fill_98_percent_of_usual_windows(name: str, tmp_path: Path) -> None:
    assert SETS is not None
    corpus = prepared(SETS / name, tmp_path)
    sizes = corpus_sizes(corpus)
    for sequence in (1024, 2048):
        packed = sizes.packed(sequence, "refuse")
        # The last window may be nearly empty, which is 3 % of 35.
        assert packed.share > min(0.98, 1 - 1 / packed.windows), f"{sequence}: {packed}"
    assert corpus.train_bytes + corpus.heldout_bytes == answer_bytes(SETS / name)
