"""What the data tests share: a small tokenizer, a text, and a way to prepare a corpus from texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from plait.data.preparation.build import DataRequest
from plait.data.preparation.prepare import prepare_corpus
from plait.data.preparation.tokens import train_bpe
from plait.data.shards import Corpus, open_corpus
from plait.data.sources import Source

SHAKESPEARE = Path(__file__).parents[2] / "recipes" / "shakespeare.txt"


@pytest.fixture(scope="session")
def text() -> str:
    return SHAKESPEARE.read_text(encoding="utf-8")[:60_000]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory, text: str) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe([text], 300).save(folder)
    return folder


@pytest.fixture
def make_corpus(tmp_path: Path, tokenizer_folder: Path) -> Callable[..., Corpus]:
    """Prepare lists of documents, one list a source, with optional weights."""

    def make(
        *sources: list[str], weights: list[float] | None = None, holdout: float = 0.0, shard_tokens: int = 2**28
    ) -> Corpus:
        entries = []
        for number, documents in enumerate(sources):
            for order, document in enumerate(documents):
                file = tmp_path / f"source-{number}" / f"{order:04d}.txt"
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(document.encode("utf-8"))
            weight = weights[number] if weights else None
            entries.append(Source(str(tmp_path / f"source-{number}" / "*.txt"), weight))
        request = DataRequest(sources=tuple(entries), tokenizer=str(tokenizer_folder), vocabulary=None, holdout=holdout)
        return open_corpus(prepare_corpus(request, tmp_path / "cache", lambda *_: None, shard_tokens=shard_tokens))

    return make


@pytest.fixture
def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "play.txt"
    path.write_text(text)
    return path


@pytest.fixture
def request_(file: Path, tokenizer_folder: Path) -> DataRequest:
    return DataRequest(sources=(Source(str(file)),), tokenizer=str(tokenizer_folder), vocabulary=None, holdout=0.05)
