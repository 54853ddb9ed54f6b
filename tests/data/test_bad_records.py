"""Records that nothing can be learned from are skipped, counted and named, up to a limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.commands.preparing.corpus import example_lines
from plait.data.preparation.build import DataRequest
from plait.data.preparation.prepare import prepare_corpus
from plait.data.shards import Corpus, open_corpus
from plait.data.sources import Source
from plait.errors import PlaitError


def chat(answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"Say {answer}"}, {"role": "assistant", "content": answer}]}


def request(folder: Path, tokenizer: Path, rows: list[Any], limit: float, **more: Any) -> DataRequest:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines))
    sources = (Source(str(folder / "rows.jsonl")),)
    return DataRequest(
        sources=sources, tokenizer=str(tokenizer), vocabulary=None, holdout=0.0, bad_records=limit, **more
    )


def prepared(folder: Path, asked: DataRequest, **more: Any) -> Corpus:
    return open_corpus(prepare_corpus(asked, folder / "cache", lambda *_: None, **more))


BAD_CHATS = [
    '{"messages": [',
    "[1]",
    {"messages": [{"role": "user", "content": "Hi"}]},
    {"text": "no chat"},
    chat("a <|endoftext|> b"),
    {"messages": [{"role": "user", "content": "stop"}, {"role": "assistant", "content": "Hello."}]},
]
KINDS: dict[str, tuple[list[Any], list[Any], list[int]]] = {
    "chats": ([chat(f"answer {n}") for n in range(594)], BAD_CHATS, [1, 2, 3]),
    "completions": (
        [{"prompt": f"{n} + 1 =", "completion": f" {n + 1}"} for n in range(297)],
        [{"prompt": "a", "completion": ""}, {"prompt": "a"}, {"prompt": ["a"], "completion": "b"}],
        [1, 2, 3],
    ),
    "pairs": (
        [{"prompt": "Who?", "chosen": f"I {n}.", "rejected": "You."} for n in range(198)],
        [{"prompt": "a", "chosen": "b", "rejected": "b"}, {"prompt": "a", "chosen": "b"}],
        [1, 2],
    ),
}
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'stop' %}{{ raise_exception('no') }}{% endif %}"
    "{{ m.role + ':' + m.content + eos_token }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.mark.parametrize("kind", KINDS)
def test_one_in_a_hundred_is_skipped_counted_and_named(kind: str, tmp_path: Path, tokenizer_folder: Path) -> None:
    good, bad, lines = KINDS[kind]
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    rows = [good[0], *bad, *good[1:]]
    asked = request(tmp_path, tokenizer_folder, rows, 0.01, chat_template=str(tmp_path / "own.jinja"))
    corpus = prepared(tmp_path, asked)
    counts = corpus.counts
    assert (counts.records, counts.skipped) == (len(good) + len(bad), len(bad))
    documents = sum(len(shard.starts) for shard in corpus.train)
    assert documents == len(good) * (2 if kind == "pairs" else 1)
    assert all(f"rows.jsonl:{line + 1}" in first for line, first in zip(lines, counts.first_skipped, strict=True))
    (said,) = [line for line in example_lines(corpus, 0.01) if line.startswith("skipped")]
    assert said.startswith(f"skipped  {len(bad)} of {len(rows)} records, as data.bad_records = 0.01 allows: ")
    again = prepared(tmp_path, asked)
    assert again.folder == corpus.folder and again.counts == counts, "a corpus that is found says so too"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", [0.0, 0.001])
def test_more_than_the_limit_is_refused_with_the_counts(
    kind: str, limit: float, tmp_path: Path, tokenizer_folder: Path
) -> None:
    good, bad, _ = KINDS[kind]
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    asked = request(tmp_path, tokenizer_folder, [*good, *bad], limit, chat_template=str(tmp_path / "own.jinja"))
    with pytest.raises(PlaitError) as raised:
        prepared(tmp_path, asked)
    sentence = str(raised.value)
    assert f" cannot be learned from, and data.bad_records = {limit:g} allows none; the first is " in sentence
    assert f"rows.jsonl:{len(good) + 1}" in sentence and "\n" not in sentence
    assert sentence.startswith("1 of " if limit == 0 else f"{4 if kind == 'chats' else len(bad)} of {len(good + bad)} ")


def test_the_limit_is_a_share_of_all_records(tmp_path: Path, tokenizer_folder: Path) -> None:
    good, bad, _ = KINDS["pairs"]
    assert prepared(tmp_path, request(tmp_path, tokenizer_folder, good + bad, 0.01)).counts.skipped == 2
    with pytest.raises(PlaitError, match=r"^3 of 201 records cannot .* = 0\.01 allows 2; the first is .*:199"):
        prepared(tmp_path, request(tmp_path, tokenizer_folder, [*good, *bad, bad[0]], 0.01))


@pytest.mark.slow
def test_a_preparation_that_was_killed_counts_no_record_twice(tmp_path: Path, tokenizer_folder: Path) -> None:
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    stops = [{"messages": [{"role": "user", "content": "stop"}, {"role": "assistant", "content": "w " * 99}]}]
    good = [chat(f"{n} " + "word " * 200) for n in range(1500)]
    rows = [*stops, *good[:700], *stops, *good[700:], *stops]
    asked = request(tmp_path, tokenizer_folder, rows, 0.01, chat_template=str(tmp_path / "own.jinja"))

    def stop(done: int, total: int, stage: str) -> None:
        if stage == "tokenizing" and done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_corpus(asked, tmp_path / "cache", stop, keep_every_bytes=1 << 16)
    assert list((tmp_path / "cache" / "data").glob(".*.part/kept.json"))
    counts = prepared(tmp_path, asked).counts
    assert (counts.records, counts.skipped, counts.chats) == (1503, 3, 1500)


def test_what_a_template_leaves_out_is_said_with_the_number_of_chats(tmp_path: Path, tokenizer_folder: Path) -> None:
    drops = "{% for m in messages if m.role != 'system' %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}"
    (tmp_path / "own.jinja").write_text(drops)
    rows = [chat(f"answer {n}") for n in range(5)]
    for row in rows[:2]:
        row["messages"].insert(0, {"role": "system", "content": "Be kind."})
    corpus = prepared(
        tmp_path, request(tmp_path, tokenizer_folder, rows, 0.0, chat_template=str(tmp_path / "own.jinja"))
    )
    assert example_lines(corpus, 0.0) == [
        f"template of chats: {tmp_path}/own.jinja",
        "left out of 5 chats the template leaves out the system message in 2: the model neither reads nor learns it; "
        "another data.chat_template may keep it",
    ]
