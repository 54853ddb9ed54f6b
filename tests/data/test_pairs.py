"""Pairs of answers: what a record may look like, what is refused in one sentence, and how they are kept and packed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plait.data.conversations.examples import ChatExample
from plait.data.conversations.pairs import PairExample, preference_example
from plait.data.documents import Record
from plait.data.loader import Loader, Micro, SampleSelection, heldout_micros, micros_of_pairs
from plait.data.packing import zigzag_columns
from plait.data.preparation.build import DataRequest
from plait.data.preparation.prepare import prepare_corpus
from plait.data.preparation.synthetic import write_synthetic
from plait.data.preparation.tokens import corpus_tokenizer
from plait.data.rows import IGNORED_TARGET
from plait.data.samples.opening import all_pairs, train_pairs, training_samples
from plait.data.samples.sizes import corpus_sizes
from plait.data.shards import Corpus, open_corpus
from plait.data.sources import Source
from plait.errors import PlaitError

SEQUENCE, VOCABULARY = 24, 61
ASKED = {"role": "user", "content": "Who?"}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def pair(**values: Any) -> PairExample:
    return preference_example(Record(place="here:1", values=values))


def test_texts_and_lists_of_messages_are_pairs() -> None:
    texts = pair(prompt="Who?", chosen="I.", rejected="You.")
    assert texts.chosen.texts == ("Who?", "I.") and texts.rejected.texts == ("Who?", "You.")
    for values in (
        {"prompt": [ASKED], "chosen": [answer("I.")], "rejected": [answer("You.")]},
        {"prompt": "Who?", "chosen": [answer("I.")], "rejected": [answer("You.")]},
        {"chosen": [ASKED, answer("I.")], "rejected": [ASKED, answer("You.")]},
        {"prompt": "Who?", "chosen": [ASKED, answer("I.")], "rejected": [ASKED, answer("You.")]},
    ):
        one = pair(**values)
        assert isinstance(one.chosen, ChatExample) and isinstance(one.rejected, ChatExample)
        assert [message.content for message in one.chosen.messages] == ["Who?", "I."]
        assert [message.content for message in one.rejected.messages] == ["Who?", "You."]
        assert one.chosen.learned_from == one.rejected.learned_from == 1 and one.question == "Who?"


def test_answers_within_the_prompt_are_only_read() -> None:
    before = [ASKED, answer("I."), {"role": "user", "content": "Really?"}]
    one = pair(prompt=before, chosen=[answer("Yes.")], rejected=[answer("No.")])
    assert isinstance(one.chosen, ChatExample) and one.chosen.learned_from == 3


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"prompt": "a", "rejected": "b"}, 'here:1 has no column "chosen": a pair needs "prompt", "chosen" and'),
        ({"prompt": "a", "chosen": None, "rejected": "b"}, 'here:1: "chosen" is nothing; write both answers as texts'),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "here:1: the chosen and the rejected answer are equal"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, "here:1: the chosen answer is empty; correct or remove"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "here:1: the rejected answer is empty"),
        ({"chosen": "b", "rejected": "c"}, 'here:1 has no column "prompt"'),
        ({"prompt": [ASKED], "chosen": "b", "rejected": "c"}, '"prompt" is of the type list and the answers are texts'),
        ({"prompt": "a", "chosen": [answer("b")], "rejected": "c"}, '"rejected" is of the type str; write both'),
        ({"prompt": [ASKED], "chosen": [answer("b")], "rejected": [answer("b")]}, "answer are equal"),
        ({"prompt": [ASKED], "chosen": [], "rejected": [answer("b")]}, "the chosen answer is empty"),
        ({"prompt": [ASKED], "chosen": [answer("")], "rejected": [answer("b")]}, "chosen, message 2: the assistant"),
        ({"chosen": [ASKED, answer("b")], "rejected": [{**ASKED, "content": "x"}, answer("c")]}, "need one prompt"),
        ({"chosen": [ASKED, answer("b")], "rejected": [ASKED]}, "one answer is how the other begins"),
    ],
)  # fmt: skip
def test_what_is_no_pair_is_refused_in_one_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlaitError) as told:
        pair(**values)
    assert sentence in str(told.value) and str(told.value).startswith("here:1") and "\n" not in str(told.value)


Prepare = Callable[..., Corpus]


def test_sources_of_pairs_are_mixed_by_their_weights(tmp_path: Path, tokenizer_folder: Path) -> None:
    counts, sources = (40, 8), list[Source]()
    for name, count, weight in zip(("a", "b"), counts, (3.0, 1.0), strict=True):
        rows = [{"prompt": f"{name} {n}?", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources.append(Source(str(tmp_path / f"{name}.jsonl"), weight))
    request = DataRequest(sources=tuple(sources), tokenizer=str(tokenizer_folder), vocabulary=None, holdout=0.0)
    corpus = open_corpus(prepare_corpus(request, tmp_path / "cache", lambda *_: None))
    reader = training_samples(corpus, 1, 96)
    windows = [reader.read(reader.places(np.array([position]))).pairs for position in range(1000)]
    origins = [{int(number >= counts[0]) for number in one.numbers} for one in windows if one is not None]
    assert len(origins) == 1000 and all(len(one) == 1 for one in origins), "a window holds pairs of one source"
    assert sum(one.pop() for one in origins) == 250
    read = np.concatenate([one.numbers for one in windows if one is not None])
    assert set(read.tolist()) == set(range(sum(counts)))


@pytest.fixture
def prepare(tmp_path: Path, tokenizer_folder: Path) -> Prepare:
    def corpus(*rows: dict[str, Any], holdout: float = 0.0, **options: Any) -> Corpus:
        file = tmp_path / "pairs.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources = (Source(str(file)),)
        request = DataRequest(
            sources=sources, tokenizer=str(tokenizer_folder), vocabulary=None, holdout=holdout, **options
        )
        return open_corpus(prepare_corpus(request, tmp_path / "cache", lambda *_: None))

    return corpus


def rows_of(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"Question {n // 2}?", "chosen": f"yes {n}", "rejected": "no " * (n + 1)} for n in range(count)]


def test_pairs_are_kept_one_after_the_other_and_held_out_by_prompt(prepare: Prepare) -> None:
    corpus = prepare(*rows_of(60), holdout=0.3)
    assert corpus.layout == "pairs" and train_pairs(corpus) + sum(len(s.starts) // 2 for s in corpus.heldout) == 60
    assert 0 < train_pairs(corpus) < 60 and train_pairs(corpus) % 2 == 0, "both pairs of a prompt go the same way"
    for shard in (*corpus.train, *corpus.heldout):
        bounds = [*shard.starts.tolist(), len(shard.tokens) - 1]
        assert shard.mask is not None
        for first, middle, last in zip(bounds[:-2:2], bounds[1:-1:2], bounds[2::2], strict=True):
            prompts = [
                shard.tokens[begin:end][np.asarray(shard.mask[begin:end]) == 1].tolist()
                for begin, end in ((first, middle), (middle, last))
            ]
            assert prompts[0] == prompts[1] and len(prompts[0]) > 1


def test_chats_learn_from_their_last_answers_alone(prepare: Prepare) -> None:
    corpus = prepare({"prompt": [ASKED, answer("I."), ASKED], "chosen": [answer("Yes.")], "rejected": [answer("No.")]})
    (shard,) = corpus.train
    assert shard.mask is not None
    for number, wanted in enumerate(("Yes.", "No.")):
        bounds = [*shard.starts.tolist(), len(shard.tokens) - 1]
        part = slice(bounds[number], bounds[number + 1])
        learned = shard.tokens[part][np.asarray(shard.mask[part]) == 0].tolist()
        text = corpus_tokenizer(corpus).decode(learned)
        assert text.startswith(wanted) and "I." not in text


def test_answers_that_become_the_same_tokens_are_refused(prepare: Prepare, tmp_path: Path) -> None:
    trims = (
        "{% for m in messages %}{{ m.role + ':' + m.content | trim + ';' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    (tmp_path / "chat_template.jinja").write_text(trims)
    row = {"prompt": [ASKED], "chosen": [answer("Yes")], "rejected": [answer("Yes ")]}
    with pytest.raises(PlaitError, match=r"pairs.jsonl.*become the same tokens"):
        prepare(row, template_folders=(tmp_path,))


def test_pairs_and_chats_do_not_mix(tmp_path: Path, tokenizer_folder: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(rows_of(1)[0]) + "\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    sources = tuple(Source(str(tmp_path / name)) for name in ("a.jsonl", "b.jsonl"))
    request = DataRequest(sources=sources, tokenizer=str(tokenizer_folder), vocabulary=None, holdout=0.0)
    with pytest.raises(PlaitError, match=r"hold pairs .* and some do not"):
        prepare_corpus(request, tmp_path / "cache", lambda *_: None)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("pairs")
    return open_corpus(write_synthetic(folder, vocabulary=VOCABULARY, sequence=SEQUENCE, seed=5, layout="pairs"))


def samples(*parts: int, part: int = 0, context: tuple[int, int] = (0, 1), micro: int = 2) -> SampleSelection:
    return SampleSelection(
        sequence=SEQUENCE,
        sequences_per_replica=parts,
        data_parallel_rank=part,
        lockstep_replicas=range(part, part + 1),
        micro_sequences=micro,
        documents="mask",
        device=torch.device("cpu"),
        context_rank=context[0],
        context_degree=context[1],
    )


def answers_in(micro: Micro) -> dict[tuple[int, int], list[int]]:
    """The targets of each answer: pair number and which, in reading order."""
    assert micro.pairs is not None
    found: dict[tuple[int, int], list[int]] = {}
    for place, target in zip(micro.pairs.sequence.flatten().tolist(), micro.targets.flatten().tolist(), strict=True):
        assert place >= 0 or target == IGNORED_TARGET
        if target != IGNORED_TARGET:
            found.setdefault((int(micro.pairs.numbers[place // 2]), place % 2), []).append(target)
    return found


def from_files(corpus: Corpus) -> dict[tuple[int, int], list[int]]:
    """The same, read from the shards alone."""
    found, first = {}, 0
    for shard in (*corpus.train, *corpus.heldout):
        bounds = [*shard.starts.tolist(), len(shard.tokens) - 1]
        assert shard.mask is not None
        for number in range(len(bounds) - 1):
            part = slice(bounds[number], bounds[number + 1])
            kept = np.asarray(shard.mask[part]) == 0
            found[first + number // 2, number % 2] = shard.tokens[part][kept].tolist()
        first += len(shard.starts) // 2
    return found


def test_every_pair_is_read_once_whole_and_in_one_micro_batch(corpus: Corpus) -> None:
    wanted = from_files(corpus)
    assert len(wanted) == 2 * all_pairs(corpus)
    found: dict[tuple[int, int], list[int]] = {}
    for part in range(3):
        for micro in micros_of_pairs(corpus, samples(5, 2, 1, part=part)):
            for key, tokens in answers_in(micro).items():
                assert key not in found
                found[key] = tokens
            assert micro.pairs is not None
            assert micro.counted == len(micro.pairs.numbers) == micro.pairs.reported
            assert len({number for number, _ in answers_in(micro)}) == len(micro.pairs.numbers)
    assert found == wanted
    held = [micro for part in range(2) for micro in heldout_micros(corpus, samples(2, 1, part=part))]
    numbers = sorted(int(n) for micro in held if micro.pairs is not None for n in micro.pairs.numbers)
    assert numbers == list(range(train_pairs(corpus), all_pairs(corpus)))


def test_the_last_step_of_an_epoch_has_rows_without_pairs(corpus: Corpus) -> None:
    reader = training_samples(corpus, 1, SEQUENCE, epochs=1)
    loader = Loader(corpus, reader, samples(4, micro=4))
    try:
        seen = [micro for first in range(0, reader.samples, 4) for micro in loader.micros(first)]
        beyond = loader.micros((reader.samples // 4 + 3) * 4)
    finally:
        loader.close()
    numbers = [int(n) for micro in seen if micro.pairs is not None for n in micro.pairs.numbers]
    assert sorted(numbers) == list(range(train_pairs(corpus)))
    assert all(micro.pairs is not None and micro.counted == 0 for micro in beyond)
    every = {key: tokens for micro in seen for key, tokens in answers_in(micro).items()}
    assert every == {key: tokens for key, tokens in from_files(corpus).items() if key[0] < train_pairs(corpus)}


def test_ranks_of_a_context_share_a_pair_and_one_of_them_counts_it(corpus: Corpus) -> None:
    (whole, *_) = micros_of_pairs(corpus, samples(1))
    parts = [next(iter(micros_of_pairs(corpus, samples(1, context=(rank, 2))))) for rank in range(2)]
    assert whole.pairs is not None
    for rank, micro in enumerate(parts):
        assert micro.pairs is not None and torch.equal(micro.pairs.numbers, whole.pairs.numbers)
        columns = zigzag_columns(SEQUENCE, 2, rank)
        assert torch.equal(micro.pairs.sequence, whole.pairs.sequence[:, columns])
    assert [float(micro.counted) for micro in parts] == [len(whole.pairs.numbers), 0.0]
    assert sum(float(micro.tokens) for micro in parts) == float(whole.tokens)


def test_a_pair_that_leaves_no_room_is_refused_or_left_out(corpus: Corpus) -> None:
    sizes = corpus_sizes(corpus)
    assert sizes.longest_example == SEQUENCE
    short = SEQUENCE - 4
    with pytest.raises(PlaitError, match=r"longer than a window of 20 tokens, which must hold the prompt with both"):
        sizes.check_overlong(short, "refuse")
    with pytest.raises(PlaitError, match="which must hold the prompt with both answers"):
        training_samples(corpus, 1, short)
    reader = training_samples(corpus, 1, short, overlong="drop")
    assert 0 < reader.samples == sizes.epoch_windows(short, "drop")
    with pytest.raises(PlaitError, match="a source has no pair that fits"):
        training_samples(corpus, 1, 1, overlong="drop")


def test_a_pair_of_chats_keeps_its_system_column_and_loses_nothing() -> None:
    values: dict[str, Any] = {
        "chosen": [ASKED, answer("I.")],
        "rejected": [ASKED, answer("Me.")],
        "system": "Be short.",
    }
    found = pair(**values)
    assert found.chosen.texts == ("Be short.", "Who?", "I.") and found.rejected.texts == ("Be short.", "Who?", "Me.")
    assert isinstance(found.chosen, ChatExample) and found.chosen.learned_from == 2
    for more, sentence in (
        ({"functions": [{"name": "f"}]}, r'here:1 has "functions", which templates do not read'),
        (
            {"rejected": [ASKED, {**answer("Me."), "weight": 0}]},
            r"here:1: the rejected answer is said not to be learned",
        ),
        (
            {"chosen": [ASKED, {**answer("I."), "function_call": {"name": "f"}}]},
            r'here:1, chosen, message 2 has "function_call"',
        ),
    ):
        with pytest.raises(PlaitError, match=sentence):
            pair(**{**values, **more})
