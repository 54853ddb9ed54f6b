from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from plait.data.loader import IGNORED_TARGET, Loader, Micro, SampleSelection, heldout_micros, interleaved_replicas
from plait.data.order import make_order
from plait.data.packing import zigzag_columns
from plait.data.samples.micro import DocumentMode
from plait.data.samples.opening import training_samples
from plait.data.shards import Corpus

CPU = torch.device("cpu")


@pytest.fixture
def corpus(make_corpus: Callable[..., Corpus], text: str) -> Corpus:
    """Several shards, documents of many lengths, some held out."""
    documents = [text[n * 400 : n * 400 + 17 + n * 7] for n in range(60)]
    found = make_corpus(documents, holdout=0.3, shard_tokens=2500)
    assert len(found.train) > 2 and len(found.heldout) > 1
    return found


def samples(
    sequence: int, *parts: int, part: int = 0, micro: int = 3, documents: DocumentMode = "mask", **other: Any
) -> SampleSelection:
    """Of steps that are dealt out in these parts."""
    lockstep_replicas = range(part, part + 1)
    given: dict[str, Any] = {"lockstep_replicas": lockstep_replicas, **other}
    return SampleSelection(
        sequence=sequence,
        sequences_per_replica=parts,
        data_parallel_rank=part,
        micro_sequences=micro,
        documents=documents,
        device=CPU,
        **given,
    )


def rows(micros: list[Micro]) -> list[tuple[list[int], list[int]]]:
    return [pair for micro in micros for pair in zip(micro.inputs.tolist(), micro.targets.tolist(), strict=True)]


@pytest.fixture
def loader(corpus: Corpus) -> Iterator[Callable[[SampleSelection], Loader]]:
    opened: list[Loader] = []

    def make(taken: SampleSelection) -> Loader:
        opened.append(Loader(corpus, training_samples(corpus, 3, taken.sequence), taken))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def test_a_part_with_a_limit_of_its_own_keeps_to_it_and_loses_nothing(corpus: Corpus, loader) -> None:
    def sizes(part: int, **more: Any) -> list[int]:
        found = loader(samples(16, 6, 4, part=part, micro=6, micro_limits=(6, 2), documents="join", **more)).micros(40)
        return [len(micro.inputs) for micro in found]

    assert sizes(0) == [6] and sizes(1) == [2, 2]
    assert sizes(0, lockstep_replicas=range(2)) == [3, 3], "it takes as many as the part that it meets in each"
    both = [
        row for part in range(2) for row in rows(loader(samples(16, 6, 4, part=part, micro_limits=(6, 2))).micros(40))
    ]
    assert sorted(both) == sorted(rows(loader(samples(16, 10, micro=10)).micros(40)))


def test_a_step_is_the_windows_of_the_order_shifted_by_one(corpus: Corpus, loader) -> None:
    order = make_order(corpus, 3, 16)
    found = loader(samples(16, 8, documents="join")).micros(40)
    assert [tuple(micro.inputs.shape) for micro in found] == [(3, 16), (3, 16), (2, 16)]
    shard, start = order.windows(np.arange(40, 48))
    expected = [corpus.train[n].tokens[at : at + 17].tolist() for n, at in zip(shard, start, strict=True)]
    assert rows(found) == [(row[:-1], row[1:]) for row in expected]
    for micro in found:
        assert micro.inputs.dtype == micro.targets.dtype == torch.int64
        assert micro.inputs.is_contiguous() and micro.targets.is_contiguous()
    masked = loader(samples(16, 8)).micros(40)
    assert sorted(rows(masked)) == sorted(rows(found)), "documents decide on the order, and on nothing else"


@pytest.mark.parametrize("documents", ["mask", "join"])
@pytest.mark.parametrize("parts", [(8,), (4, 4), (1, 5, 2), (1, 1, 1, 5)])
def test_any_shares_together_read_the_same_samples_in_the_same_step(
    loader, parts: tuple[int, ...], documents: DocumentMode
) -> None:
    whole = loader(samples(64, 8, documents=documents))
    each = [loader(samples(64, *parts, part=n, micro=2, documents=documents)) for n in range(len(parts))]
    for position in (0, 8, 16, 800):
        taken = [rows(one.micros(position)) for one in each]
        assert tuple(map(len, taken)) == parts
        found, wanted = [row for part in taken for row in part], rows(whole.micros(position))
        assert found == wanted if documents == "join" else sorted(found) == sorted(wanted)


def test_masked_documents_burden_parts_and_micro_batches_alike(loader) -> None:
    parts = (48, 16)

    def pairs(micros: list[Micro]) -> list[float]:
        return [sum(n * (n + 1) / 2 for n in micro.lengths or ()) for micro in micros]

    by_part = [pairs(loader(samples(256, *parts, part=n, micro=8)).micros(0)) for n in range(2)]
    mean = sum(map(sum, by_part)) / 64
    for count, micros in zip(parts, by_part, strict=True):
        assert sum(micros) == pytest.approx(count * mean, rel=0.03)
        assert micros == pytest.approx([8 * mean] * (count // 8), rel=0.06)


def test_a_restart_at_any_position_goes_on_the_same(loader) -> None:
    through = loader(samples(16, 5, 3, part=1))
    steps = [rows(through.micros(position)) for position in range(0, 80, 8)]
    for step in (3, 7):
        again = loader(samples(16, 5, 3, part=1))
        assert [rows(again.micros(position)) for position in range(step * 8, 80, 8)] == steps[step:]
    assert rows(through.micros(8)) == steps[1], "back again, against what was fetched ahead"
    assert steps[0] != steps[1]


def test_other_shares_hold_from_the_next_step_on_whatever_was_fetched_ahead(loader) -> None:
    changing, after = loader(samples(16, 6, 2)), loader(samples(16, 3, 5))
    before = [rows(changing.micros(position)) for position in (0, 8)]
    assert [len(taken) for taken in before] == [6, 6]
    changing.set_selection(samples(16, 3, 5))
    assert [rows(changing.micros(position)) for position in (16, 24)] == [rows(after.micros(p)) for p in (16, 24)]
    changing.set_selection(samples(16, 6, 2))
    assert rows(changing.micros(8)) == before[1]


def test_masked_documents_restart_positions_where_the_input_is_an_end(corpus: Corpus, loader) -> None:
    inner_starts = 0
    for micro in loader(samples(256, 8)).micros(0):
        assert micro.positions is not None and micro.lengths is not None
        assert sum(micro.lengths) == micro.inputs.numel()
        flat = torch.cat([torch.arange(length) for length in micro.lengths])
        assert torch.equal(micro.positions.flatten(), flat)
        inner = micro.positions[:, 1:] == 0
        assert torch.equal(inner, micro.inputs[:, 1:] == corpus.eot)
        inner_starts += int(inner.sum())
        assert (micro.positions[:, 0] == 0).all()
    assert inner_starts > 3
    for micro in loader(samples(256, 8, documents="join")).micros(0):
        assert micro.positions is None and micro.lengths is None


def test_the_next_step_is_fetched_by_one_thread_that_close_ends(loader) -> None:
    before = set(threading.enumerate())
    fetching = loader(samples(16, 8))
    for position in range(0, 80, 8):
        fetching.micros(position)
        assert 0 <= fetching.wait_s < 60
    (thread,) = set(threading.enumerate()) - before
    fetching.close()
    assert not thread.is_alive()


@pytest.mark.parametrize("documents", ["mask", "join"])
@pytest.mark.parametrize("parts", [(8,), (1, 1), (3, 1), (1, 5, 2), (1,) * 200])
@pytest.mark.parametrize("sequence", [16, 10_000])
def test_every_held_out_token_is_a_target_once(
    corpus: Corpus, parts: tuple[int, ...], sequence: int, documents: DocumentMode
) -> None:
    owners = np.resize(interleaved_replicas(parts), 10_000)
    windows: dict[int, tuple[list[int], list[int]]] = {}
    for part in range(len(parts)):
        numbers = iter(np.flatnonzero(owners == part).tolist())
        for micro in heldout_micros(corpus, samples(sequence, *parts, documents=documents, part=part)):
            assert micro.inputs.shape == micro.targets.shape == (len(micro.inputs), sequence)
            assert (micro.lengths is None) == (documents == "join")
            assert micro.lengths is None or sum(micro.lengths) == micro.inputs.numel()
            for row in rows([micro]):
                if any(target != IGNORED_TARGET for target in row[1]):
                    windows[next(numbers)] = row
    assert sorted(windows) == list(range(len(windows)))
    inputs, targets = [], []
    for number in sorted(windows):
        counted = [n for n, target in enumerate(windows[number][1]) if target != IGNORED_TARGET]
        assert counted == list(range(len(counted))), "padding stands at the end only"
        assert all(token == corpus.eot for token in windows[number][0][len(counted) :])
        inputs += windows[number][0][: len(counted)]
        targets += windows[number][1][: len(counted)]
    assert targets == [token for shard in corpus.heldout for token in shard.tokens[1:].tolist()]
    assert inputs == [token for shard in corpus.heldout for token in shard.tokens[:-1].tolist()]


def test_equal_parts_take_held_out_windows_in_turns_and_others_by_their_shares(corpus: Corpus) -> None:
    assert interleaved_replicas((4, 4)).tolist() == [0, 1] * 4
    assert interleaved_replicas((3, 1)).tolist() == [0, 0, 1, 0]
    taken = [sum(len(m.inputs) for m in heldout_micros(corpus, samples(16, 6, 2, part=part))) for part in (0, 1)]
    assert sum(taken) > 40 and taken[0] == pytest.approx(3 * taken[1], abs=8)


def test_nothing_held_out_gives_no_windows(make_corpus: Callable[..., Corpus], text: str) -> None:
    corpus = make_corpus([text[:500]])
    assert list(heldout_micros(corpus, samples(8, 8))) == []


def test_who_has_no_held_out_window_has_a_micro_batch_all_the_same(corpus: Corpus) -> None:
    (micro,) = heldout_micros(corpus, samples(10_000, *(1,) * 200, part=199))
    assert (micro.targets == IGNORED_TARGET).all()


@pytest.mark.parametrize("parts", [(4, 4), (6, 2), (2, 1, 5), (1,) * 200])
def test_parts_that_meet_take_equally_many_micro_batches(corpus: Corpus, loader, parts: tuple[int, ...]) -> None:
    everybody = range(len(parts))
    for_all = [samples(16, *parts, part=part, lockstep_replicas=everybody, micro=2) for part in everybody]
    heldout = {len(list(heldout_micros(corpus, one))) for one in for_all}
    assert len(heldout) == 1 and heldout != {0}
    micros = [loader(one).micros(0) for one in for_all[:3]]
    assert {len(some) for some in micros} == {-(-max(parts) // 2)}
    for count, some in zip(parts, micros, strict=False):
        sizes = [int((micro.targets != IGNORED_TARGET).any(dim=1).sum()) for micro in some]
        assert sum(sizes) == count and max(sizes) - min(sizes) <= 1


def test_a_part_that_meets_nobody_takes_no_micro_batch_for_others(loader) -> None:
    assert [len(loader(samples(16, 7, 1, part=part, micro=2)).micros(0)) for part in (0, 1)] == [4, 1]


def test_a_rank_without_a_sequence_left_takes_one_that_is_not_counted(loader) -> None:
    found = loader(samples(16, 6, 2, part=1, lockstep_replicas=range(2), micro=2)).micros(0)
    assert [int((micro.targets != IGNORED_TARGET).sum()) for micro in found] == [16, 16, 0]
    assert found[2].lengths == (16,)


@pytest.mark.parametrize("documents", ["mask", "join"])
def test_context_ranks_see_every_token_of_a_sequence_once(loader, documents: DocumentMode) -> None:
    whole = loader(samples(16, 3, 5, documents=documents)).micros(8)[0]
    positions = torch.arange(16)[None].expand(3, -1) if whole.positions is None else whole.positions
    seen = torch.zeros(3, 16, dtype=torch.long)
    for context in range(4):
        part = loader(samples(16, 3, 5, documents=documents, context_rank=context, context_degree=4)).micros(8)[0]
        columns = torch.from_numpy(zigzag_columns(16, 4, context))
        assert part.lengths == whole.lengths and part.positions is not None
        assert torch.equal(part.inputs, whole.inputs[:, columns]) and torch.equal(
            part.targets, whole.targets[:, columns]
        )
        assert torch.equal(part.positions.expand(3, -1), positions[:, columns])
        seen[:, columns] += 1
    assert (seen == 1).all()
