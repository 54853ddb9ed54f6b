from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.data.index import file_sha256, token_dtype
from plait.data.preparation.tokens import load_tokenizer
from plait.data.preparation.writer import ShardWriter
from plait.data.shards import Corpus, open_corpus
from plait.errors import PlaitError

EOT = 0


def test_ids_take_the_smallest_type() -> None:
    assert token_dtype(65_536).itemsize == 2
    assert token_dtype(65_537).itemsize == 4
    assert token_dtype(300).str == "<u2"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 60_000), min_size=1, max_size=40), min_size=1, max_size=12), st.integers(8, 64))
def test_every_token_stands_once_between_ends_and_no_shard_is_too_long(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], limit: int
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    writer = ShardWriter(folder, "train", eot=EOT, dtype=token_dtype(60_001), shard_tokens=limit)
    for document in documents:
        writer.begin_document(0)
        for half in (document[: len(document) // 2], document[len(document) // 2 :]):
            writer.add(np.array(half, dtype=np.uint32))
    writer.close_shard()
    kept = []
    for entry in writer.entries:
        stream = np.fromfile(folder / f"{entry.name}.bin", dtype="<u2")
        starts = np.load(folder / f"{entry.name}.starts.npy")
        assert len(stream) == entry.tokens <= limit
        assert len(starts) == entry.documents
        assert entry.sha256 == file_sha256(folder / f"{entry.name}.bin")
        assert stream[-1] == EOT
        assert starts.tolist() == np.flatnonzero(stream == EOT)[:-1].tolist()
        kept += stream[stream != EOT].tolist()
    assert kept == list(chain.from_iterable(documents))


def test_a_prepared_stream_is_end_document_end_document_end(make_corpus: Callable[..., Corpus]) -> None:
    texts = ["To be, or not", "that is the question:\n\n", "é 中"]
    corpus = make_corpus(texts)
    tokenizer = load_tokenizer(corpus.tokenizer_path)
    expected = [corpus.eot]
    starts = []
    for text in texts:
        starts.append(len(expected) - 1)
        expected += [*tokenizer.encode(text), corpus.eot]
    (shard,) = corpus.train
    assert shard.tokens.tolist() == expected
    assert shard.starts.tolist() == starts
    assert corpus.train_bytes == len("".join(texts).encode())
    assert (corpus.vocabulary, corpus.eot) == (tokenizer.vocabulary, tokenizer.eot)


def test_the_content_hash_follows_content_not_names(make_corpus: Callable[..., Corpus]) -> None:
    first = make_corpus(["one text here", "two"])
    assert make_corpus(["one text here", "two"]).content_hash == first.content_hash
    assert make_corpus(["one text here", "too"]).content_hash != first.content_hash
    weighted = make_corpus(["one text here"], ["two"], weights=[1, 2])
    assert make_corpus(["one text here"], ["two"], weights=[2, 1]).content_hash != weighted.content_hash


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("name", ["train-00000.bin", "heldout-00000.bin", "train-00000.starts.npy"])
def test_a_file_of_another_length_is_refused(make_corpus: Callable[..., Corpus], name: str, change: int) -> None:
    corpus = make_corpus(["some words to keep " * 40], holdout=0.2)
    file = corpus.folder / name
    file.write_bytes(file.read_bytes()[:change] if change < 0 else file.read_bytes() + b"x")
    with pytest.raises(PlaitError, match=r"the prepared data in .* are damaged \(.*\); delete that folder"):
        open_corpus(corpus.folder)
        raise AssertionError("it was opened")


@pytest.mark.parametrize("name", ["train-00000.bin", "heldout-00000.bin", "train-00000.starts.npy"])
def test_verify_finds_a_flipped_bit(make_corpus: Callable[..., Corpus], name: str) -> None:
    corpus = make_corpus(["some words to keep " * 40], holdout=0.2)
    corpus.verify()
    content = bytearray((corpus.folder / name).read_bytes())
    content[-3] ^= 16
    (corpus.folder / name).write_bytes(content)
    with pytest.raises(PlaitError, match=rf"damaged \({name} is not what was written\); delete"):
        open_corpus(corpus.folder).verify()


@pytest.mark.parametrize("index", ["", "[]", "{", '{"format": 2}', '{"format": 1, "shards": [{}]}'])
def test_a_bad_index_is_refused_in_a_sentence(tmp_path: Path, index: str) -> None:
    (tmp_path / "index.json").write_text(index)
    with pytest.raises(PlaitError, match=r"are damaged \(.*\); delete that folder and run `plait data` again"):
        open_corpus(tmp_path)


def test_rows_are_the_tokens_from_each_start(make_corpus: Callable[..., Corpus], text: str) -> None:
    (shard,) = make_corpus([text]).train
    starts = np.array([0, 7, len(shard.tokens) - 9])
    rows = shard.rows(starts, 9)
    assert rows.tolist() == [shard.tokens[start : start + 9].tolist() for start in starts]
