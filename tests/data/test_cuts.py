"""Text without spaces: split at the same places everywhere, tokens kept where a word ends, a signal heeded."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.data.preparation.bpe_process import train_bpe_apart
from plait.data.preparation.cuts import LONGEST_RUN, cut_into_pieces, split_long_runs
from plait.data.preparation.tokens import load_tokenizer, train_bpe
from plait.data.shards import open_corpus
from plait.errors import PlaitError
from tests.matrix import few_fast


def dna(letters: int) -> str:
    return "".join(random.Random(1).choices("ACGT", k=letters))


WITHOUT_SPACES = {
    "dna": dna(600_000),
    "one letter": "a" * 600_000,
    "spaces": " " * 300_000 + "\n" * 300_000,
    "signs": "=-" * 300_000,
    "tabs": "word\t" * 100_000,
}


@pytest.mark.parametrize("name", few_fast(WITHOUT_SPACES, "dna", "spaces"))
@pytest.mark.parametrize("front", few_fast(["", "An ordinary line.\nAnd "], "An ordinary line.\nAnd "))
def test_text_without_spaces_has_the_same_tokens_in_pieces_and_as_a_whole(name: str, front: str) -> None:
    tokenizer, text = load_tokenizer("gpt2"), front + WITHOUT_SPACES[name]
    blocks = (text[start : start + 70_001] for start in range(0, len(text), 70_001))
    pieces = list(cut_into_pieces(blocks, tokenizer.cut))
    ids = list(chain.from_iterable(tokenizer.encode_pieces(pieces)))
    assert ids == tokenizer.encode(text)
    assert tokenizer.decode(ids) == text


def test_code_without_spaces_keeps_its_tokens(text: str) -> None:
    tokenizer = load_tokenizer("gpt2")
    minified = text.replace(" ", "(").replace("\n", ";")
    assert len(split_long_runs(minified)) > 10
    assert tokenizer.encode(minified) == tokenizer.backend.encode(minified, add_special_tokens=False).ids


def test_ordinary_text_is_not_split(text: str) -> None:
    assert split_long_runs(text) == [text]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("a, \n.é中_"), st.integers(1, 2 * LONGEST_RUN)), max_size=6))
def test_the_parts_are_the_text_and_none_has_a_longer_run(runs: list[tuple[str, int]]) -> None:
    text = "".join(letter * count for letter, count in runs)
    parts = split_long_runs(text)
    assert "".join(parts) == text and (all(parts) or not text)
    for part in parts:
        assert max(map(len, part.split()), default=0) <= LONGEST_RUN
        assert not part.isspace() or len(part) <= LONGEST_RUN


def test_a_tokenizer_trained_apart_is_the_same(text: str) -> None:
    waited: list[None] = []
    apart = train_bpe_apart([text[:9000], text[9000:]], 700, lambda: waited.append(None))
    here = train_bpe([text[:9000], text[9000:]], 700)
    assert (apart.definition, apart.hash) == (here.definition, here.hash)
    with pytest.raises(PlaitError, match=r"model.vocabulary = 100 is too small"):
        train_bpe_apart([text], 100, lambda: None)


def prepare(folder: Path, text: str) -> subprocess.Popen[str]:
    (folder / "a.txt").write_text(text)
    (folder / "a.toml").write_text('[data]\nfiles = "a.txt"\n')
    command = [sys.executable, "-m", "plait", "data", "a.toml"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes)


@pytest.mark.slow
def test_two_megabytes_of_one_letter_are_prepared(tmp_path: Path) -> None:
    said, error = prepare(tmp_path, "a" * 2_000_000).communicate(timeout=60)
    assert "ready " in said, error
    corpus = open_corpus(Path(tmp_path / said.rsplit(maxsplit=1)[-1]))
    tokenizer = load_tokenizer(corpus.tokenizer_path)
    assert tokenizer.decode(corpus.heldout[0].tokens[1:-1].tolist()) == "a" * 100_000


@pytest.mark.parametrize(
    ("number", "code"), few_fast([(signal.SIGINT, 130), (signal.SIGTERM, 143)], (signal.SIGTERM, 143))
)
def test_a_signal_ends_the_training_of_a_tokenizer_at_once(tmp_path: Path, number: signal.Signals, code: int) -> None:
    began = prepare(tmp_path, dna(8_000_000))
    child = _child_that_works(began.pid)
    began.send_signal(number)
    sent = time.monotonic()
    said, error = began.communicate(timeout=60)
    assert time.monotonic() - sent < 5, "a second on a machine that does nothing else"
    assert began.returncode == code
    assert "Traceback" not in said + error
    assert not Path(f"/proc/{child}").exists(), "its child lives on"
    assert not list((tmp_path / ".plait" / "data").glob(".*.part"))


def _child_that_works(parent: int) -> int:
    """The process that trains, once it has used a second of processor time."""
    while True:
        for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            if int(fields[11]) > 100:
                return int(child)
