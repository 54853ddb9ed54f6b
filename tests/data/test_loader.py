from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from math import ceil
from typing import Any

import numpy as np
import pytest
import torch

from plait.data.loader import NOT_COUNTED, DocumentMode, Loader, Micro, Samples, heldout_micros
from plait.data.order import Order, make_order
from plait.data.packing import zigzag_columns
from plait.data.shards import Corpus

CPU = torch.device("cpu")


@pytest.fixture
def corpus(make_corpus: Callable[..., Corpus], text: str) -> Corpus:
    """Several shards, documents of many lengths, some held out."""
    documents = [text[n * 400 : n * 400 + 17 + n * 7] for n in range(60)]
    found = make_corpus(documents, holdout=0.3, shard_tokens=2500)
    assert len(found.train) > 2 and len(found.heldout) > 1
    return found


def loader(
    corpus: Corpus, order: Order, first: int, count: int, *, micro: int = 3, documents: DocumentMode = "mask"
) -> Loader:
    return Loader(corpus, order, samples(order.sequence, first, count, micro=micro, documents=documents))


def samples(
    sequence: int, first: int, count: int, *, micro: int = 3, documents: DocumentMode = "mask", **other: int
) -> Samples:
    given: dict[str, Any] = {"micros": ceil(count / micro), **other}
    return Samples(
        sequence=sequence,
        batch_sequences=8,
        first=first,
        count=count,
        micro_sequences=micro,
        documents=documents,
        device=CPU,
        **given,
    )


def rows(micros: list[Micro]) -> list[tuple[list[int], list[int]]]:
    return [pair for micro in micros for pair in zip(micro.inputs.tolist(), micro.targets.tolist(), strict=True)]


@pytest.fixture
def closing() -> Iterator[Callable[[Loader], Loader]]:
    opened: list[Loader] = []

    def keep(each: Loader) -> Loader:
        opened.append(each)
        return each

    yield keep
    for each in opened:
        each.close()


def test_a_step_is_the_windows_of_the_order_shifted_by_one(corpus: Corpus, closing) -> None:
    order = make_order(corpus, 3, 16)
    found = closing(loader(corpus, order, 0, 8)).micros(40)
    assert [tuple(micro.inputs.shape) for micro in found] == [(3, 16), (3, 16), (2, 16)]
    shard, start = order.windows(np.arange(40, 48))
    expected = [corpus.train[n].tokens[at : at + 17].tolist() for n, at in zip(shard, start, strict=True)]
    assert rows(found) == [(row[:-1], row[1:]) for row in expected]
    for micro in found:
        assert micro.inputs.dtype == micro.targets.dtype == torch.int64
        assert micro.inputs.is_contiguous() and micro.targets.is_contiguous()


@pytest.mark.parametrize("shares", [(8,), (4, 4), (1, 5, 2), (3, 0, 4, 1)])
def test_any_shares_together_read_the_same_samples_in_the_same_step(
    corpus: Corpus, closing, shares: tuple[int, ...]
) -> None:
    order = make_order(corpus, 3, 16)
    whole = closing(loader(corpus, order, 0, 8))
    edges = np.cumsum([0, *shares]).tolist()
    parts = [closing(loader(corpus, order, edges[n], share, micro=2)) for n, share in enumerate(shares)]
    for position in (0, 8, 16, 800):
        assert [row for part in parts for row in rows(part.micros(position))] == rows(whole.micros(position))


def test_a_restart_at_any_position_goes_on_the_same(corpus: Corpus, closing) -> None:
    order = make_order(corpus, 3, 16)
    through = closing(loader(corpus, order, 0, 8))
    steps = [rows(through.micros(position)) for position in range(0, 80, 8)]
    for step in (3, 7):
        again = closing(loader(corpus, make_order(corpus, 3, 16), 0, 8))
        assert [rows(again.micros(position)) for position in range(step * 8, 80, 8)] == steps[step:]
    assert rows(through.micros(8)) == steps[1], "back again, against what was fetched ahead"
    assert steps[0] != steps[1]


def test_masked_documents_restart_positions_where_the_input_is_an_end(corpus: Corpus, closing) -> None:
    order, inner_starts = make_order(corpus, 3, 256), 0
    for micro in closing(loader(corpus, order, 0, 8)).micros(0):
        assert micro.positions is not None and micro.lengths is not None
        assert sum(micro.lengths) == micro.inputs.numel()
        flat = torch.cat([torch.arange(length) for length in micro.lengths])
        assert torch.equal(micro.positions.flatten(), flat)
        inner = micro.positions[:, 1:] == 0
        assert torch.equal(inner, micro.inputs[:, 1:] == corpus.eot)
        inner_starts += int(inner.sum())
        assert (micro.positions[:, 0] == 0).all()
    assert inner_starts > 3
    for micro in closing(loader(corpus, order, 0, 8, documents="join")).micros(0):
        assert micro.positions is None and micro.lengths is None


def test_the_next_step_is_fetched_by_one_thread_that_close_ends(corpus: Corpus) -> None:
    before = set(threading.enumerate())
    fetching = loader(corpus, make_order(corpus, 3, 16), 0, 8)
    for position in range(0, 80, 8):
        fetching.micros(position)
        assert 0 <= fetching.wait_s < 60
    (thread,) = set(threading.enumerate()) - before
    fetching.close()
    assert not thread.is_alive()


@pytest.mark.parametrize("documents", ["mask", "join"])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5, 200])
@pytest.mark.parametrize("sequence", [16, 10_000])
def test_every_held_out_token_is_a_target_once(
    corpus: Corpus, parts: int, sequence: int, documents: DocumentMode
) -> None:
    windows: dict[int, tuple[list[int], list[int]]] = {}
    for part in range(parts):
        number = part
        mine = samples(sequence, 0, 8, documents=documents, part=part, parts=parts)
        for micro in heldout_micros(corpus, mine):
            assert micro.inputs.shape == micro.targets.shape == (len(micro.inputs), sequence)
            assert (micro.lengths is None) == (documents == "join")
            assert micro.lengths is None or sum(micro.lengths) == micro.inputs.numel()
            for row in rows([micro]):
                if any(target != NOT_COUNTED for target in row[1]):
                    windows[number] = row
                    number += parts
    assert sorted(windows) == list(range(len(windows)))
    inputs, targets = [], []
    for number in sorted(windows):
        counted = [n for n, target in enumerate(windows[number][1]) if target != NOT_COUNTED]
        assert counted == list(range(len(counted))), "padding stands at the end only"
        assert all(token == corpus.eot for token in windows[number][0][len(counted) :])
        inputs += windows[number][0][: len(counted)]
        targets += windows[number][1][: len(counted)]
    assert targets == [token for shard in corpus.heldout for token in shard.tokens[1:].tolist()]
    assert inputs == [token for shard in corpus.heldout for token in shard.tokens[:-1].tolist()]


def test_nothing_held_out_gives_no_windows(make_corpus: Callable[..., Corpus], text: str) -> None:
    corpus = make_corpus([text[:500]])
    assert list(heldout_micros(corpus, samples(8, 0, 8))) == []


def test_all_parts_take_the_same_number_of_held_out_micro_batches(corpus: Corpus) -> None:
    for parts in (2, 3, 200):
        numbers = {
            len(list(heldout_micros(corpus, samples(16, 0, 8, part=part, parts=parts)))) for part in range(parts)
        }
        assert len(numbers) == 1 and numbers != {0}


def test_a_rank_without_a_sequence_left_takes_one_that_is_not_counted(corpus: Corpus, closing) -> None:
    order = make_order(corpus, 3, 16)
    found = closing(Loader(corpus, order, samples(16, 4, 2, micro=1, micros=3))).micros(0)
    assert [int((micro.targets != NOT_COUNTED).sum()) for micro in found] == [16, 16, 0]
    assert found[2].lengths == (16,)


@pytest.mark.parametrize("documents", ["mask", "join"])
def test_context_ranks_see_every_token_of_a_sequence_once(corpus: Corpus, closing, documents: DocumentMode) -> None:
    order = make_order(corpus, 3, 16)
    whole = closing(Loader(corpus, order, samples(16, 0, 3, documents=documents))).micros(8)[0]
    positions = torch.arange(16)[None].expand(3, -1) if whole.positions is None else whole.positions
    seen = torch.zeros(3, 16, dtype=torch.long)
    for context in range(4):
        mine = samples(16, 0, 3, documents=documents, context=context, contexts=4)
        part = closing(Loader(corpus, order, mine)).micros(8)[0]
        columns = torch.from_numpy(zigzag_columns(16, 4, context))
        assert part.lengths == whole.lengths and part.positions is not None
        assert torch.equal(part.inputs, whole.inputs[:, columns]) and torch.equal(
            part.targets, whole.targets[:, columns]
        )
        assert torch.equal(part.positions.expand(3, -1), positions[:, columns])
        seen[:, columns] += 1
    assert (seen == 1).all()
