"""Files that cannot be learned from are left out beside others, said and recorded; alone they are refused."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from plait.commands.preparing.corpus import unread_file_lines
from plait.data.file_faults import FileFault
from plait.data.preparation.build import DataRequest
from plait.data.preparation.prepare import find_prepared, prepare_corpus
from plait.data.shards import open_corpus
from plait.data.sources import Source
from plait.errors import PlaitError
from tests.matrix import slow

PROSE = "Some prose that is long enough to learn from. " * 200
LATIN = "Füße. " * 50


class Prepared:
    """A preparation of sources, and what it said of files that it left out."""

    def __init__(self, folder: Path, *sources: Source) -> None:
        self.faults: list[FileFault] = []
        self.request = DataRequest(sources=sources, tokenizer="gpt2", vocabulary=None, holdout=0.1)
        self.folder = prepare_corpus(self.request, folder / "cache", lambda *_: None, self._say)
        self.lines = unread_file_lines(self.faults)

    def _say(self, faults: Sequence[FileFault]) -> None:
        self.faults = list(faults)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "novel.txt").write_text(PROSE)
    (texts / "reviews.csv").write_text("stars,text\n" + "".join(f'{n},"Good, {n} times."\n' for n in range(40)))
    (texts / "table.csv").write_text("a,b\n1,2\n")
    (texts / "torn.csv").write_text('text,b\n"no end,2\n')
    (texts / "old.txt").write_bytes(LATIN.encode("latin1"))
    (texts / "older.txt").write_bytes(f"“{LATIN}”".encode("windows-1252"))
    (texts / "report.pdf").write_bytes(b"%PDF-1.7")
    (texts / "empty.md").write_text("")
    for file in texts.iterdir():
        os.utime(file, (1e9, 1e9))
    return texts


SAID = [
    "left out texts/empty.md, which is empty",
    "left out texts/report.pdf, which is a PDF; make text of it:",
    "         pdftotext texts/report.pdf texts/report.txt",
    "left out texts/old.txt, which is not UTF-8 text at byte 1; convert it from Latin-1:",
    "         iconv -f latin1 -t utf-8 texts/old.txt > texts/old-utf8.txt",
    "left out texts/older.txt, which is not UTF-8 text at byte 0; convert it from Windows-1252:",
    "         iconv -f windows-1252 -t utf-8 texts/older.txt > texts/older-utf8.txt",
    "left out texts/torn.csv, which is not a table from line 2 on (unexpected end of data); correct it",
    'left out texts/table.csv, which has no column "text" (its columns: a, b); name the file apart in data.files, with '
    "the column that holds its text as field",
]


def test_a_folder_is_read_without_what_cannot_be_and_says_and_records_it(folder: Path) -> None:
    found = Prepared(folder.parent, Source(str(folder)))
    assert found.lines == SAID
    (source,) = json.loads((found.folder / "index.json").read_text())["sources"]
    assert [file["name"] for file in source["files"]] == ["novel.txt", "reviews.csv"] and source["documents"] == 41
    recorded = json.loads((found.folder / "index.json").read_text())["left_out"]
    assert {"name": "report.pdf", "why": "is a PDF"} in recorded and len(recorded) == 6
    assert open_corpus(found.folder).train_tokens > 1000
    only = Prepared(folder.parent, Source(str(folder / "novel.txt")), Source(str(folder / "reviews.csv")))
    assert not only.lines
    assert open_corpus(only.folder).content_hash == open_corpus(found.folder).content_hash


def test_files_that_are_named_are_left_out_as_those_of_a_folder(folder: Path) -> None:
    named = [Source(str(folder / name)) for name in ("novel.txt", "old.txt", "report.pdf", "empty.md")]
    assert len(Prepared(folder.parent, *named).faults) == 3


def test_what_was_found_out_by_reading_is_remembered(folder: Path) -> None:
    found = Prepared(folder.parent, Source(str(folder)))
    known = folder.parent / "cache" / "data" / "hashes.json"
    entries = {}
    for file in folder.iterdir():  # as if it had been read long after it was written
        if file.suffix != ".pdf" and file.stat().st_size:
            stamp = file.stat()
            fault = {"old.txt": "is not", "older.txt": "is not", "torn.csv": "is no"}.get(file.name, "")
            index = json.loads((found.folder / "index.json").read_text())
            hashes = {one["name"]: one["sha256"] for one in index["sources"][0]["files"]}
            times = [stamp.st_size, stamp.st_mtime_ns, stamp.st_ctime_ns]
            entries[str(file)] = [*times, hashes.get(file.name, "0" * 64), fault, "latin1" if fault else "utf-8", 1]
    known.write_text(json.dumps(entries))
    assert find_prepared(found.request, folder.parent / "cache") == found.folder


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["old.txt"], r"old\.txt is not UTF-8 text at byte 1; convert it .*iconv.* or take it out of data\.files$"),
        (["report.pdf"], r"report\.pdf is a PDF; make text of it \(pdftotext .*\) or take it out of data\.files$"),
        (["torn.csv"], r"torn\.csv is not a table from line 2 on \(unexpected end of data\); correct it or take"),
        (["table.csv"], r'table\.csv has no column "text"; name one of a, b$'),
        (
            ["old.txt", "report.pdf"],
            r"none of the 2 files can be learned from: \(1\) texts/report.pdf, which is a PDF; .*; \(2\) texts/old",
        ),
        (["novel.txt", "gone.txt"], r'no file matches ".*gone\.txt"'),
    ],
)
def test_where_nothing_is_left_it_is_refused(folder: Path, names: list[str], sentence: str) -> None:
    with pytest.raises(PlaitError, match=sentence) as refused:
        Prepared(folder.parent, *(Source(str(folder / name)) for name in names))
    assert refused.value.exit_code == 2


def test_a_file_with_a_share_of_the_mix_is_not_left_out(folder: Path) -> None:
    with pytest.raises(PlaitError, match=r"old\.txt is not UTF-8 text at byte 1"):
        Prepared(folder.parent, Source(str(folder / "novel.txt"), 1), Source(str(folder / "old.txt"), 1))


def test_a_damaged_utf_8_file_is_not_called_latin_1(folder: Path) -> None:
    (folder / "old.txt").write_bytes("Füße. ".encode() * 9 + b"\xe9")
    (folder / "older.txt").write_bytes("Füße. ".encode()[:-4])
    lines = Prepared(folder.parent, Source(str(folder))).lines
    assert [line for line in lines if "/old" in line] == [
        "left out texts/old.txt, which is not UTF-8 text at byte 72; convert it to UTF-8 text",
        "left out texts/older.txt, which is not UTF-8 text at byte 3; convert it to UTF-8 text",
    ]


def test_very_many_that_are_left_out_are_a_few_lines() -> None:
    faults = [FileFault(file=Path(f"{number}.pdf"), what="is a PDF") for number in range(40)]
    lines = unread_file_lines(faults)
    assert len(lines) == 7 and lines[0] == "left out 0.pdf, which is a PDF"
    assert lines[-1] == f"left out also {', '.join(f'{number}.pdf' for number in range(6, 18))} and 22 more files"


CSV_CHATS = {
    "qa.csv": "question,answer\n" + "".join(f"What is {n}?,It is {n}.\n" for n in range(60)),
    "tuned.csv": "instruction,input,output\n" + "".join(f"Add,{n} + 1,{n + 1}\n" for n in range(60)),
    "replies.tsv": "prompt\tresponse\n" + "".join(f"Say {n}\t{n}!\n" for n in range(60)),
    "plain.csv": "prompt,completion\n" + "".join(f"{n} =, {n}\n" for n in range(60)),
}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qa.csv", "User:\nWhat is 7?\n\nAssistant:\nIt is 7.<|endoftext|>"),
        slow(("tuned.csv", "User:\nAdd\n\n7 + 1\n\nAssistant:\n8<|endoftext|>")),
        slow(("replies.tsv", "User:\nSay 7\n\nAssistant:\n7!<|endoftext|>")),
        ("plain.csv", "7 = 7<|endoftext|>"),
    ],
)
def test_prompts_and_answers_in_tables_are_examples(tmp_path: Path, name: str, text: str) -> None:
    from plait.data.preparation.tokens import corpus_tokenizer

    (tmp_path / name).write_text(CSV_CHATS[name])
    corpus = open_corpus(Prepared(tmp_path, Source(str(tmp_path / name))).folder)
    assert corpus.layout == "whole" and sum(len(shard.starts) for shard in (*corpus.train, *corpus.heldout)) == 60
    tokens = [token for shard in (*corpus.train, *corpus.heldout) for token in shard.tokens.tolist()]
    assert text in corpus_tokenizer(corpus).decode(tokens)


def test_a_folder_of_chats_leaves_other_tables_out(folder: Path) -> None:
    chats = folder.parent / "chats"
    chats.mkdir()
    for name in ("qa.csv", "plain.csv"):
        (chats / name).write_text(CSV_CHATS[name])
    (chats / "a.csv").write_text("x,y\n1,2\n")
    (line, other) = Prepared(folder.parent, Source(str(chats))).lines
    assert line.startswith(
        "left out chats/a.csv, which has no columns of prompts with completions (its columns: x, y); "
    )
    assert other.startswith(
        'left out chats/qa.csv, which holds chat ("question"), and other files prompts with completions ('
    )


def test_a_fault_of_one_source_leaves_the_file_to_another(folder: Path) -> None:
    reviews = folder / "table.csv"
    reviews.write_text("stars,review\n" + "".join(f"{n},Good for the {n}th time.\n" for n in range(40)))
    (folder / "other.csv").write_text("a,b\n1,2\n")
    sources = Source(str(folder / "[ort]*.csv")), Source(str(reviews), field="review")
    found = Prepared(folder.parent, *sources)
    assert [fault.file.name for fault in found.faults] == ["torn.csv", "other.csv"]
    assert [len(list(source.files)) for source in open_corpus(found.folder).sources] == [1, 1]


def test_every_table_of_very_many_is_looked_at_and_a_damaged_one_alone_does_not_end_all(folder: Path) -> None:
    many = folder.parent / "many"
    many.mkdir()
    for number in range(70):
        (many / f"{number}.csv").write_text("text\nSome words to learn.\n")
    (many / "odd.csv").write_text("a,b\n1,2\n")
    (many / "no.parquet").write_bytes(b"PAR1 not really")
    found = Prepared(folder.parent, Source(str(many / "*.csv")), Source(str(many / "no.parquet")))
    assert [fault.file.name for fault in found.faults] == ["odd.csv", "no.parquet"]
    assert found.lines[1].startswith("left out many/no.parquet, which is not a readable Parquet file (")


def test_commands_overwrite_nothing_and_take_no_name_for_an_option(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "-x.pdf").write_bytes(b"%PDF")
    (folder / "report.txt").write_text(PROSE)
    (folder / "report-2.txt").write_text(PROSE)
    (folder / "old.txt").write_bytes("你好，世界".encode("utf-16"))
    lines = Prepared(folder.parent, Source(str(folder))).lines
    assert "         pdftotext ./-x.pdf ./-x.txt" in lines
    assert "         pdftotext report.pdf report-3.txt" in lines
    assert "left out old.txt, which is UTF-16 text, not UTF-8; convert it from UTF-16:" in lines


def test_files_are_read_again_after_an_upgrade(folder: Path) -> None:
    from plait.data.preparation.fingerprint import cached_contents, file_stamp

    file, known = folder / "novel.txt", folder / "hashes.json"
    entry = [*file_stamp(file), "0" * 64, "is wrong", "utf-8"]
    for written in (entry, [*entry, 0]):
        known.write_text(json.dumps({str(file): written}))
        assert cached_contents([file], known) is None


def test_a_table_without_answers_is_no_chat_and_what_stands_beside_a_question_is_read(tmp_path: Path) -> None:
    from plait.data.conversations.examples import chat_example, question_column
    from plait.data.documents import Record

    assert not question_column({"": "0", "query": "What?", "label": "x"})
    record = Record("a.csv:2", {"question": "Why?", "context": "It rains.", "answer": "Clouds."})
    assert chat_example(record, "question").messages[0].content == "Why?\n\nIt rains."
