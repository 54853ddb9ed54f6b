"""Prepared data that were damaged: found before they are used, named, and never a traceback."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from plait.data.index import read_index
from plait.data.integrity import BackgroundVerification, verify_at_start
from plait.data.loader import Loader, SampleSelection, heldout_micros
from plait.data.preparation.tokens import corpus_tokenizer
from plait.data.samples.opening import training_samples
from plait.data.shards import Corpus, open_corpus
from plait.errors import PlaitError, RunFailed

FILES = ["train-00000.bin", "heldout-00000.bin", "train-00000.starts.npy", "heldout-00000.starts.npy"]


@pytest.fixture
def corpus(make_corpus: Callable[..., Corpus], text: str) -> Corpus:
    return make_corpus([text[start : start + 2000] for start in range(0, 60_000, 2000)], holdout=0.2)


def flip(path: Path, at: int = -9) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def selection(corpus: Corpus) -> SampleSelection:
    return SampleSelection(
        sequence=16,
        sequences_per_replica=(4,),
        data_parallel_rank=0,
        lockstep_replicas=range(1),
        micro_sequences=4,
        documents="join",
        device=torch.device("cpu"),
    )


def loader_of(corpus: Corpus) -> Loader:
    return Loader(corpus, training_samples(corpus, 0, 16), selection(corpus))


@pytest.mark.parametrize("name", FILES)
def test_one_bit_is_found_before_a_start(corpus: Corpus, name: str) -> None:
    verify_at_start(corpus)
    flip(corpus.folder / name)
    with pytest.raises(PlaitError, match=rf"are damaged \({name} is not what was written\); delete that folder") as at:
        verify_at_start(open_corpus(corpus.folder))
    assert at.value.exit_code == 2


def test_of_a_large_corpus_only_the_held_out_part_is_read_before_a_start(corpus: Corpus) -> None:
    between = (corpus.heldout_tokens + corpus.train_tokens) * 2 // 2
    flip(corpus.folder / "train-00000.bin")
    verify_at_start(corpus, limit_bytes=between)
    flip(corpus.folder / "heldout-00000.bin")
    with pytest.raises(PlaitError, match="heldout-00000"):
        verify_at_start(corpus, limit_bytes=between)


@pytest.mark.parametrize("name", FILES)
def test_the_background_check_finds_one_bit(corpus: Corpus, name: str) -> None:
    sound = BackgroundVerification(corpus)
    sound.wait()
    sound.raise_if_damaged()
    flip(corpus.folder / name)
    check = BackgroundVerification(corpus)
    check.wait()
    with pytest.raises(RunFailed, match=rf"are damaged \({name} is not what was written\); delete that folder") as at:
        check.raise_if_damaged()
    assert at.value.exit_code == 1
    (corpus.folder / name).unlink()
    check = BackgroundVerification(corpus)
    check.wait()
    with pytest.raises(RunFailed, match=rf"\({name} cannot be read: No such file"):
        check.raise_if_damaged()


def test_a_loader_that_verifies_ends_the_run(corpus: Corpus) -> None:
    loader = loader_of(corpus)
    loader.verify_in_background()
    loader.micros(0)
    loader.close()
    flip(corpus.folder / "train-00000.bin")
    loader = loader_of(corpus)
    loader.verify_in_background()
    with pytest.raises(RunFailed, match=r"train-00000.bin is not what was written"):
        for step in range(10**9):
            loader.micros(4 * step)
    loader.close()


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_an_id_that_the_tokenizer_lacks_is_refused(corpus: Corpus, split: str) -> None:
    path = corpus.folder / f"{split}-00000.bin"
    tokens = np.fromfile(path, dtype="<u2")
    tokens[1:] = 60_000
    tokens.tofile(path)
    opened = open_corpus(corpus.folder)
    sentence = rf"{split}-00000.bin of the prepared data is damaged: it holds the id 60000 and the tokenizer has 300"
    with pytest.raises(RunFailed, match=sentence):
        loader_of(opened).micros(0) if split == "train" else list(heldout_micros(opened, selection(opened)))


def test_another_tokenizer_in_the_folder_is_refused(corpus: Corpus) -> None:
    assert corpus_tokenizer(corpus).vocabulary == 300
    path = corpus.tokenizer_path
    definition = json.loads(path.read_text())
    vocabulary = definition["model"]["vocab"]
    (one, first), (two, second) = list(vocabulary.items())[40:42]
    vocabulary[one], vocabulary[two] = second, first
    path.write_text(json.dumps(definition))
    with pytest.raises(PlaitError, match=r"are damaged \(tokenizer.json is not what was written\)"):
        corpus_tokenizer(corpus)


def test_an_index_without_a_hash_of_itself_is_read(corpus: Corpus) -> None:
    path = corpus.folder / "index.json"
    values = json.loads(path.read_text())
    del values["index_sha256"]
    path.write_text(json.dumps(values))
    assert open_corpus(corpus.folder).content_hash == corpus.content_hash


BAD_VALUES = [None, [], {}, "", "x", -1, 0, 1.5, 10**30, True, float("nan"), [[[]]], "../../etc/passwd"]


def mutated(values: object, draws: random.Random) -> None:
    """Change one value or key somewhere in nested values."""
    while True:
        keys = list(values) if isinstance(values, dict) else list(range(len(values)))  # type: ignore[arg-type,call-overload]
        key = draws.choice(keys)
        if isinstance(values[key], dict | list) and values[key] and draws.random() < 0.7:  # type: ignore[index]
            values = values[key]  # type: ignore[index]
            continue
        if draws.random() < 0.2:
            del values[key]  # type: ignore[attr-defined]
        else:
            values[key] = draws.choice(BAD_VALUES)  # type: ignore[index]
        return


@pytest.mark.parametrize("hashed", ["with a hash", "without"])
def test_damaged_indexes_give_a_sentence_or_the_same_corpus(corpus: Corpus, hashed: str) -> None:
    path, draws, refused = corpus.folder / "index.json", random.Random(7), 0
    sound = json.loads(path.read_text())
    if hashed == "without":
        del sound["index_sha256"]
    for _ in range(500):
        values = json.loads(json.dumps(sound))
        mutated(values, draws)
        path.write_text(json.dumps(values))
        try:
            open_corpus(corpus.folder).verify()
        except PlaitError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 600
            continue
        assert hashed == "without" or values == sound or "index_sha256" not in values
    assert refused > 200


@pytest.mark.parametrize("name", [*FILES, "index.json", "tokenizer.json", "tokenizer_config.json"])
def test_damaged_bytes_give_a_sentence_or_the_same_corpus(corpus: Corpus, name: str) -> None:
    path, draws = corpus.folder / name, random.Random(11)
    sound = path.read_bytes()
    for turn in range(60):
        content = bytearray(sound)
        for _ in range(draws.randint(1, 8)):
            content[draws.randrange(min(len(content), 200) if turn % 2 else len(content))] = draws.randrange(256)
        path.write_bytes(content[: draws.choice([0, 1, 100, len(content), len(content)])])
        try:
            opened = open_corpus(corpus.folder)
            verify_at_start(opened)
            corpus_tokenizer(opened)
        except PlaitError as error:
            assert "\n" not in str(error)
            continue
        assert opened.content_hash == corpus.content_hash


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("", "index.json is not JSON"),
        ("[" * 100_000, "index.json is not JSON"),
        ("[]", "index.json: it is not what was written"),
        ('{"format": 7}', "the format in index.json is 7, this version reads 1"),
        ('{"format": 1}', "index.json: dtype is not what was written"),
    ],
)
def test_an_index_says_what_is_wrong_with_it(tmp_path: Path, content: str, what: str) -> None:
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(PlaitError) as caught:
        read_index(tmp_path)
    assert f"({what})" in str(caught.value)
    with pytest.raises(PlaitError, match=r"there are no prepared data in .*none; make them again: plait data with"):
        read_index(tmp_path / "none")


def test_starts_that_do_not_ascend_are_refused(corpus: Corpus) -> None:
    path = corpus.folder / "train-00000.starts.npy"
    starts = np.load(path, allow_pickle=False)
    for wrong in (starts[::-1], starts + 1, np.append(starts[:-1], corpus.train_tokens), np.zeros_like(starts)):
        np.save(path, wrong, allow_pickle=False)
        with pytest.raises(PlaitError, match=r"\(train-00000.starts.npy is not what was written\)"):
            open_corpus(corpus.folder)
    np.save(path, starts.astype("<f8"), allow_pickle=False)
    with pytest.raises(PlaitError, match=r"starts.npy does not list"):
        open_corpus(corpus.folder)


def test_a_mask_is_compared_too(tmp_path: Path) -> None:
    from plait.data.preparation.synthetic import write_synthetic

    corpus = open_corpus(write_synthetic(tmp_path, vocabulary=50, sequence=16, seed=3))
    verify_at_start(corpus)
    flip(tmp_path / "train-00001.mask.bin")
    with pytest.raises(PlaitError, match=r"train-00001.mask.bin is not what was written"):
        verify_at_start(corpus)
    assert replace(corpus, heldout=()).train_tokens == corpus.train_tokens
