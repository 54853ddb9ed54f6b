"""Tokenizers that give a text a prefix ("▁", a space): what goes on gets none, wherever long text is cut and a prompt
ends. The right tokens are those that the tokenizers library gives the whole text."""

from __future__ import annotations

import io
import json
import random
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import normalizers, pre_tokenizers
from transformers import AutoTokenizer

from plait.commands.data import prepare_text
from plait.data.preparation.cuts import cut_into_pieces
from plait.data.preparation.tokens import Tokenizer, load_tokenizer
from plait.screen.terminal import TerminalScreen
from tests.interop.test_interop_beginnings import corpus_of
from tests.interop.tokenizer_folders import PREFIXED, SHAKESPEARE, Kind, write_tokenizer
from tests.matrix import few_fast

DNA = "".join(random.Random(1).choices("ACGT", k=100_000))
LONG = {
    "play": SHAKESPEARE[:300_000],
    "without newlines": SHAKESPEARE[:300_000].replace("\n", " "),
    "a run": SHAKESPEARE[:20_000] + DNA + SHAKESPEARE[:20_000],
    "a letter": "a" * 100_000,
    "spaces": "word" + " " * 50_000 + "word\n\n" + " " * 50_000,
    "signs": "中文，字 é \u00a0—“x” " * 9_000,
}


def loaded(folder: Path, kind: Kind) -> Tokenizer:
    write_tokenizer(folder, kind)
    return load_tokenizer(folder)


def whole_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Of a tokenizer of its own, made from the same file."""
    own = tokenizers.Tokenizer.from_str(tokenizer.definition)
    own.encode_special_tokens = True
    return own.encode(text, add_special_tokens=False).ids


def in_pieces(tokenizer: Tokenizer, pieces: list[str]) -> list[int]:
    before = ["", *(piece[-1] for piece in pieces[:-1])]
    return list(chain.from_iterable(tokenizer.encode_pieces(pieces, before)))


@pytest.mark.parametrize("name", few_fast(LONG, "play", "a run"))
@pytest.mark.parametrize("kind", few_fast(PREFIXED, *PREFIXED[:2]))
def test_long_text_has_the_tokens_of_the_uncut_text(kind: Kind, name: str, tmp_path: Path) -> None:
    tokenizer, text = loaded(tmp_path, kind), LONG[name]
    blocks = (text[start : start + 70_001] for start in range(0, len(text), 70_001))
    pieces = list(cut_into_pieces(blocks, tokenizer.cut))
    assert len(pieces) > 1 or name in ("a letter", "spaces", "signs")
    assert in_pieces(tokenizer, pieces) == whole_ids(tokenizer, text)
    assert tokenizer.encode(text) == whole_ids(tokenizer, text)


PIECES = st.lists(
    st.sampled_from([" ", "  ", "\n", "a", "king", "The", ".", ",", "中", "é", "—", "'s", "1"]), max_size=30
)


@pytest.mark.parametrize("kind", few_fast(PREFIXED, PREFIXED[0]))
def test_every_cut_keeps_the_tokens_of_the_whole(kind: Kind, tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, kind)

    @settings(max_examples=300, deadline=None)
    @given(PIECES.map("".join))
    def check(text: str) -> None:
        edges = sorted({0, *(found.start() for found in tokenizer.cut.finditer(text)), len(text)})
        pieces = [text[start:stop] for start, stop in pairwise(edges)]
        assert not any(map(tokenizer.may_cut_token, ["", *(piece[-1] for piece in pieces[:-1])], pieces))
        assert not text or in_pieces(tokenizer, pieces) == whole_ids(tokenizer, text)

    check()


@pytest.mark.parametrize("spaces", [True, False])
def test_a_normalizer_that_changes_characters_is_cut_between_letters(spaces: bool, tmp_path: Path) -> None:
    """As T5's: its text is not the one that its vocabulary was made from."""
    built = write_tokenizer(tmp_path, "metaspace always")
    steps = [normalizers.NFKC(), normalizers.Strip(left=True, right=True)]
    built.normalizer = normalizers.Sequence(steps)  # type: ignore[assignment]
    if not spaces:
        values = json.loads(built.to_str())
        values["model"]["vocab"]["a▁b"] = len(values["model"]["vocab"])
        built = tokenizers.Tokenizer.from_str(json.dumps(values))
        built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    built.save(str(tmp_path / "tokenizer.json"))
    tokenizer, text = load_tokenizer(tmp_path), " \n" + SHAKESPEARE[:100_000] + " ﬁn ½ " * 9
    pieces = list(cut_into_pieces([text], tokenizer.cut))
    assert (len(pieces) > 2) == spaces, "a vocabulary with a token across a space allows no cut"
    assert in_pieces(tokenizer, pieces) == whole_ids(tokenizer, text)


def test_a_document_longer_than_a_cut_is_prepared_as_a_whole(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path / "base", "prepend")
    text = SHAKESPEARE[:200_000]
    corpus = corpus_of(tmp_path, [{"text": text}, {"text": "The end."}], tmp_path / "base")
    wanted = [[*tokenizer.bos, *whole_ids(tokenizer, one), tokenizer.eot] for one in (text, "The end.")]
    assert corpus.train[0].tokens.tolist() == [*wanted[0], *wanted[1]]
    assert corpus.boundary_tokens == 0


def test_a_run_without_any_place_to_cut_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = loaded(tmp_path / "base", "metaspace")
    said = prepared(tmp_path, monkeypatch, [{"text": "a" * 300_000}], show=0)
    assert "2 places in text without spaces had to be cut where a token may lie; tokens there may differ" in said
    corpus = corpus_of(tmp_path, [{"text": "a" * 300_000}], tmp_path / "base")
    assert corpus.boundary_tokens == 2
    ids = corpus.train[0].tokens[1:-1].tolist()
    assert tokenizer.decode(ids) == "a" * 300_000
    assert ids.count(tokenizer.backend.token_to_id("▁")) <= 1, "the text has no space, and its prefix once"


def prepared(folder: Path, monkeypatch: pytest.MonkeyPatch, records: list[dict[str, str]], *, show: int) -> str:
    """What `plait data --show` prints of these records, with the tokenizer in base."""
    monkeypatch.chdir(folder)
    (folder / "d.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    lines = ['[data]\nfiles = "d.jsonl"\ntokenizer = "base"\nholdout = 0\n[train]\nsequence = 64\n']
    (folder / "d.toml").write_text("".join(lines))
    out = io.StringIO()
    screen = TerminalScreen(Console(file=out, width=1000))
    prepare_text(folder / "d.toml", (), show=show, screen=screen)
    return out.getvalue()


def test_show_shows_what_the_tokens_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of example whole, and a space where a token has one: no more and no less than in the file."""
    write_tokenizer(tmp_path / "base", "prepend")
    records = [{"prompt": "12+30=", "completion": "42"}, {"prompt": "The king", "completion": " is here."}]
    said = prepared(tmp_path, monkeypatch, records, show=2)
    assert "12+30=⟦42</s>⟧" in said and "The king⟦ is here.</s>⟧" in said
    assert "each document and each prompt begins with <s>, as this model's tokenizer does" in said
    said = prepared(tmp_path, monkeypatch, [{"text": "The king."}, {"text": "The end."}], show=2)
    assert [line for line in said.splitlines() if "⟦" in line and "stands out" not in line] == [
        "<s>⟦ The king.</s>⟧",
        "<s>⟦ The end.</s>⟧",
    ]


def test_a_token_on_both_sides_of_a_prompts_end_is_divided_as_trl_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many tokens are read as the prompt has by itself; at least the last one is learned."""
    write_tokenizer(tmp_path / "base", "metaspace")
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path / "base")
    records = [
        {"prompt": "The king ", "completion": "is here, my lord."},
        {"prompt": "The king ", "completion": "is"},
        {"prompt": "The king", "completion": " is"},
    ]
    corpus = corpus_of(tmp_path, records, tmp_path / "base")
    (shard,) = corpus.train
    assert shard.mask is not None and corpus.boundary_tokens == 2
    bounds = [*shard.starts.tolist(), len(shard.tokens) - 1]
    for one, (first, last) in zip(records, pairwise(bounds), strict=True):
        whole = theirs(one["prompt"] + one["completion"]).input_ids
        known = min(len(theirs(one["prompt"]).input_ids), len(whole) - 1)
        assert shard.tokens[first:last].tolist() == [*whole, theirs.eos_token_id]
        assert shard.mask[first:last].tolist() == [1] * known + [0] * (len(whole) + 1 - known)
    said = prepared(tmp_path, monkeypatch, records, show=0)
    assert "the first characters of 2 completions share a token with the end of the prompt" in said
