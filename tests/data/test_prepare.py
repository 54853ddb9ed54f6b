from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from plait.data.index import file_sha256
from plait.data.preparation import build
from plait.data.preparation.build import DataRequest
from plait.data.preparation.prepare import find_prepared, prepare_corpus
from plait.data.preparation.tokens import load_tokenizer
from plait.data.shards import open_corpus
from plait.data.sources import Source
from plait.errors import PlaitError


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def visible(cache: Path) -> list[str]:
    return [path.name for path in (cache / "data").iterdir() if path.is_dir() and not path.name.startswith(".")]


class Stages:
    """Keeps the names of the stages that were reported."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, str]] = []

    def __call__(self, done: int, total: int, stage: str) -> None:
        self.seen.append((done, total, stage))

    @property
    def names(self) -> set[str]:
        return {stage for _, _, stage in self.seen}


def changed(request: DataRequest, **fields) -> DataRequest:
    names = ("sources", "tokenizer", "vocabulary", "holdout")
    return DataRequest(**{name: fields.get(name, getattr(request, name)) for name in names})


def test_one_file_keeps_its_last_five_percent_aside(request_: DataRequest, tmp_path: Path, text: str) -> None:
    corpus = open_corpus(prepare_corpus(request_, tmp_path, Stages()))
    tokenizer = load_tokenizer(corpus.tokenizer_path)
    cut = len(text) - len(text) // 20
    assert (corpus.train_bytes, corpus.heldout_bytes) == (cut, len(text) // 20)
    assert tokenizer.decode(corpus.train[0].tokens[1:-1].tolist()) == text[:cut]
    assert tokenizer.decode(corpus.heldout[0].tokens[1:-1].tolist()) == text[cut:]
    corpus.verify()


def test_a_second_call_reuses_without_reading(request_: DataRequest, tmp_path: Path, file: Path, text: str) -> None:
    first, second = Stages(), Stages()
    folder = prepare_corpus(request_, tmp_path, first)
    assert {"reading", "tokenizing"} <= first.names
    assert first.seen[-1] == (len(text), len(text), "tokenizing")
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert prepare_corpus(request_, tmp_path, second) == folder
    assert not {"reading", "tokenizing"} & second.names
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    moved = file.rename(file.with_name("other.txt"))
    assert prepare_corpus(changed(request_, sources=(Source(str(moved)),)), tmp_path, second) == folder, (
        "names do not matter"
    )


def test_a_settled_file_is_not_hashed_again_and_a_changed_one_is(
    request_: DataRequest, tmp_path: Path, file: Path
) -> None:
    # A file system's clock may be coarse, so a file is trusted by its times only when they are some seconds old.
    past = file.stat().st_mtime_ns - 60 * 10**9
    os.utime(file, ns=(past, past))
    memory = tmp_path / "data" / "hashes.json"
    folder = prepare_corpus(request_, tmp_path, Stages())
    assert not json.loads(memory.read_text()), "its change time is from just now"
    stamp = file.stat()
    invented = [stamp.st_size, stamp.st_mtime_ns, stamp.st_ctime_ns, "0" * 64, "", "utf-8", 1]
    memory.write_text(json.dumps({str(file.resolve()): invented}))
    by_memory = prepare_corpus(request_, tmp_path, Stages())
    assert by_memory != folder, "the remembered hash was not used"
    file.write_text(file.read_text().replace("KING", "QUOY"))
    os.utime(file, ns=(stamp.st_mtime_ns, stamp.st_mtime_ns))
    assert prepare_corpus(request_, tmp_path, Stages()) not in (folder, by_memory), "same size and time, other content"


def test_what_was_prepared_is_found_without_reading_and_nothing_else(
    request_: DataRequest, tmp_path: Path, file: Path
) -> None:
    assert find_prepared(request_, tmp_path) is None
    folder = prepare_corpus(request_, tmp_path, Stages())
    assert find_prepared(request_, tmp_path) is None, "written just now: its times could stay the same"
    stamp = file.stat()
    entry = [stamp.st_size, stamp.st_mtime_ns, stamp.st_ctime_ns, file_sha256(file), "", "utf-8", 1]
    (tmp_path / "data" / "hashes.json").write_text(json.dumps({str(file.resolve()): entry}))
    assert find_prepared(request_, tmp_path) == folder
    assert find_prepared(changed(request_, holdout=0.1), tmp_path) is None, "another request"
    file.write_text(file.read_text() + "more")
    assert find_prepared(request_, tmp_path) is None, "changed since"


@pytest.mark.parametrize(
    "fields",
    [
        {"holdout": 0.1},
        {"tokenizer": "bpe", "vocabulary": 300},
        {"tokenizer": "bpe", "vocabulary": 301},
    ],
)
def test_another_request_gets_another_folder(request_: DataRequest, tmp_path: Path, fields: dict) -> None:
    folders = {prepare_corpus(each, tmp_path, Stages()) for each in (request_, changed(request_, **fields))}
    assert len(folders) == 2
    assert prepare_corpus(changed(request_, **fields), tmp_path, Stages()) in folders


def test_the_models_vocabulary_may_grow_without_new_work(request_: DataRequest, tmp_path: Path) -> None:
    folder = prepare_corpus(request_, tmp_path, Stages())
    assert prepare_corpus(changed(request_, vocabulary=512), tmp_path, Stages()) == folder
    with pytest.raises(PlaitError, match=r"has 300 entries, more than model.vocabulary = 299; raise model.vocabulary"):
        prepare_corpus(changed(request_, vocabulary=299), tmp_path, Stages())


def test_a_damaged_folder_is_made_again(request_: DataRequest, tmp_path: Path) -> None:
    folder = prepare_corpus(request_, tmp_path, Stages())
    good = contents(folder)
    (folder / "train-00000.bin").write_bytes(b"short")
    assert prepare_corpus(request_, tmp_path, Stages()) == folder
    assert contents(folder) == good


def test_a_file_that_changes_meanwhile_is_noticed(request_: DataRequest, tmp_path: Path, file: Path) -> None:
    def meddle(done: int, total: int, stage: str) -> None:
        if stage == "reading":
            with file.open("a") as handle:
                handle.write("more")

    with pytest.raises(PlaitError, match=r"play.txt was changed while it was being prepared; run the same command"):
        prepare_corpus(request_, tmp_path, meddle)
    assert visible(tmp_path) == []


def test_sources_without_weights_are_one_stream_and_with_weights_apart(
    request_: DataRequest, tmp_path: Path, text: str
) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name * 30)
    joined = tuple(Source(str(tmp_path / name)) for name in ("a.txt", "b.txt"))
    apart = tuple(Source(source.path, weight) for source, weight in zip(joined, (1.0, 3.0), strict=True))
    one = open_corpus(prepare_corpus(changed(request_, sources=joined), tmp_path, Stages()))
    two = open_corpus(prepare_corpus(changed(request_, sources=apart), tmp_path, Stages()))
    assert [shard.source for shard in one.train] == [0] and one.weights == ()
    assert [shard.source for shard in two.train] == [0, 1] and two.weights == (1.0, 3.0)
    assert one.train_bytes == two.train_bytes
    assert np.concatenate([shard.tokens[:-1] for shard in two.train]).tolist() == one.train[0].tokens[:-1].tolist()


def test_the_tokenizer_is_trained_on_the_training_part_within_its_limit(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"{n:05d}" for n in range(40_000, 60_000)]
    (tmp_path / "a.txt").write_text(text[:20_000] + " zqxjkvzqxjkv" * 600)
    request = DataRequest(sources=(Source(str(tmp_path / "a.txt")),), tokenizer="bpe", vocabulary=400, holdout=0.3)
    entries = load_tokenizer(prepare_corpus(request, tmp_path, Stages())).backend.get_vocab()
    assert not any("zqx" in entry for entry in entries), "the held-out part was seen"
    monkeypatch.setattr(build, "TOKENIZER_SAMPLE_BYTES", 30_000)
    sample = list(build.sample_of_text(words, total=100_000))
    assert 22_000 < sum(map(len, sample)) <= 30_000
    assert sorted(build.sample_of_text(words[::-1], total=100_000)) == sample


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"sources": ()}, r"data.files is empty; name at least one file"),
        ({"sources": (Source("a.txt", 1), Source("b.txt"))}, r"some have none; give all of them one, or none"),
        ({"sources": (Source("a.txt", 0),)}, r"data weights \[0\] must be positive numbers; take"),
        ({"sources": (Source("a.txt", float("nan")),)}, r"must be positive numbers"),
        ({"holdout": 1.0}, r"data.holdout = 1.0 is not a fraction; choose for example 0.05"),
        ({"holdout": 0.00001}, r"data.holdout = 1e-05 of 60000 bytes holds nothing out; give more text"),
        ({"tokenizer": "bpe", "vocabulary": 100}, r"model.vocabulary = 100 is too small; choose at least 257"),
    ],
)
def test_a_bad_request_is_told(request_: DataRequest, tmp_path: Path, fields: dict, sentence: str) -> None:
    with pytest.raises(PlaitError, match=sentence):
        prepare_corpus(changed(request_, **fields), tmp_path / "cache", Stages())
    assert not (tmp_path / "cache" / "data").exists() or visible(tmp_path / "cache") == []


def test_a_source_of_empty_texts_is_refused(request_: DataRequest, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n' * 3)
    with pytest.raises(PlaitError, match=r"a.jsonl holds no text; fill it or take it out of data.files"):
        prepare_corpus(changed(request_, sources=(Source(str(tmp_path / "a.jsonl")),)), tmp_path, Stages())


def test_a_cache_that_cannot_be_written_is_told(request_: DataRequest, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(
        PlaitError, match=r"cache.*: Not a directory; free space or check its permissions, then run it again"
    ):
        prepare_corpus(request_, tmp_path / "cache", Stages())
