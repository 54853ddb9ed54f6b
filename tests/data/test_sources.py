from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plait.data import documents
from plait.data.file_faults import read_content
from plait.data.folders import TEXT_SUFFIXES, find_text_files
from plait.data.holdout import Holdout, text_hash
from plait.data.sources import Source, open_source, open_sources
from plait.errors import PlaitError


def texts(source: Source) -> list[str]:
    return [b"".join(document.read()).decode() for document in open_source(source).documents()]


def read_all(source: Source) -> None:
    """Read a source as `plait data` does: first its text files as they are, then all documents."""
    opened = open_source(source)
    for file in opened.files:
        if file.suffix in TEXT_SUFFIXES and (fault := read_content(file).fault_of(file)):
            raise fault.error(source.removal(file))
    for document in opened.documents():
        assert "".join(document.text()).encode() == b"".join(document.read())


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_parquet(path: Path, columns: dict[str, Any]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path)
    return path


def test_a_glob_reads_files_of_all_folders_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/b/c.txt", "c.txt"):
        write(tmp_path / name, name)
    assert texts(Source(f"{tmp_path}/**/*.txt")) == ["a/b/c.txt", "b.txt", "c.txt"]
    assert texts(Source(f"{tmp_path}/**/*.md")) == ["a/z.md"]


def test_a_file_whose_name_looks_like_a_glob_is_a_file(tmp_path: Path) -> None:
    write(tmp_path / "a[1].txt", "one")
    write(tmp_path / "a1.txt", "other")
    assert texts(Source(f"{tmp_path}/a[1].txt")) == ["one"]


def test_bytes_of_a_text_file_arrive_unchanged(tmp_path: Path) -> None:
    content = "a\ufeff\r\nb\rc\n\n é 中".encode() * 50_000
    file = write(tmp_path / "a.txt", content)
    (document,) = open_source(Source(str(file))).documents()
    assert document.text_bytes == len(content)
    assert b"".join(document.read()) == content
    assert b"".join(document.read(3, 300_001)) == content[3:300_001]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    mark, text = b"\xef\xbb\xbf", "é\ufeff 中".encode() * 200_000
    write(tmp_path / "a.txt", mark + text)
    write(tmp_path / "b.txt", text)
    write(tmp_path / "c.txt", mark)
    marked, plain = open_source(Source(f"{tmp_path}/*.txt")).documents()
    assert marked.text_bytes == plain.text_bytes == len(text)
    for start, stop in ((0, None), (1, 7), (300_000, 700_001)):
        assert b"".join(marked.read(start, stop)) == b"".join(plain.read(start, stop))
    starts = {text_hash([text]): len(text) - len(text) // 10}
    for holdout in (Holdout(rule="documents", fraction=0.1, starts=starts), Holdout(rule="tails", fraction=0.1)):
        assert holdout.spans(marked, 0, "") == holdout.spans(plain, 0, "") and len(holdout.spans(plain, 0, "")) == 2
    write(tmp_path / "d.jsonl", mark + b'{"text": "one"}\n{"text": "two"}\n')
    assert texts(Source(str(tmp_path / "d.jsonl"))) == ["one", "two"]
    for name, rest in (("e.txt", b"abc\xff"), ("f.jsonl", b'"c\xff"')):
        file = write(tmp_path / name, mark + rest)
        with pytest.raises(PlaitError, match="not UTF-8 text at byte " + str(3 + rest.index(b"\xff"))):
            read_all(Source(str(file)))


def test_json_lines_and_parquet_give_the_named_field_and_skip_empty_texts(tmp_path: Path) -> None:
    rows = ["first", "", "zweite ü", "line\nbreak"]
    lines = "\n\n".join(json.dumps({"body": row, "text": 3}) for row in rows)
    file = write(tmp_path / "a.jsonl", lines)
    table = write_parquet(tmp_path / "a.parquet", {"body": rows, "n": [1, 2, 3, 4]})
    assert texts(Source(str(file), field="body")) == ["first", "zweite ü", "line\nbreak"]
    assert texts(Source(str(table), field="body")) == ["first", "zweite ü", "line\nbreak"]


BAD_FILES = [
    ("a.txt", b"", "a.txt is empty; fill it or take it out"),
    ("a.md", b"", "a.md is empty"),
    ("a.txt", b"some text\0more", r"a.txt is binary: it has a NUL byte at byte 9; convert"),
    ("a.txt", b"x" * 300_000 + b"\xe4 end", r"a.txt is not UTF-8 text at byte 300000; convert"),
    ("a.txt", b"x" * 262_143 + "é".encode() + b"\xff", r"not UTF-8 text at byte 262145; convert"),
    ("a.txt", b"cut short \xe4\xb8", r"not UTF-8 text at byte 10; convert"),
    ("a.jsonl", b'{"text": "a"}\n{"body": "b"}\n', r'a.jsonl:2 has no field "text"; name the field'),
    ("a.jsonl", b'{"text": "a"}\n["b"]\n', r"a.jsonl:2 is not a JSON object; write one JSON object on each line"),
    ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', r"a.jsonl:3 is not JSON \(.*\); write one JSON object on each line"),
    ("a.jsonl", b'{"text": "a"}\n{"text": 7}\n', r"a.jsonl:2: the text is int, not a string; choose a field"),
    ("a.jsonl", b'{"text": "a"}\n{"text": null}\n', r"a.jsonl:2: the text is NoneType, not a string; choose a field"),
    ("a.jsonl", b'{"text": "\\ud800"}\n', r"a.jsonl:1: the text holds half of a surrogate pair; correct"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}', r"a.jsonl:2 is not UTF-8 text at byte 24 of the file; convert"),
    ("a.parquet", b"PAR1 not really", r"a.parquet is not a readable Parquet file \(.*\); write it again"),
    ("a.doc", b"text\nx\n", r"a.doc has a type that plait does not read; convert it to .txt, .md, .csv, .tsv, .jsonl"),
    ("a.pdf", b"%PDF-1.7\n", r"a.pdf is a PDF; make text of it \(pdftotext .*a.pdf .*a.txt\) or take it out of data"),
    (
        "a.txt",
        "Füße".encode("utf-16"),
        r"a.txt is UTF-16 text, not UTF-8; convert it .*iconv -f utf-16 -t utf-8 .*a.txt",
    ),
    ("a.csv", b"body\nx\n", r'a.csv has no column "text"; name one of body'),
    ("a.csv", b"text,n\na,1\nb\n", r"a.csv has 1 column in line 3 and 2 in its header; correct that line"),
    ("a.csv", b'text,n\n"a,1\nb,2\n', r"a.csv is not a table from line 2 on \(unexpected end of data\); put texts"),
    ("a.csv", b"text,text\na,b\n", r'a.csv has two columns with the name "text"; give one of them another name'),
]


@pytest.mark.parametrize(("name", "content", "sentence"), BAD_FILES)
def test_a_bad_file_is_told_in_one_sentence_with_the_mend(
    tmp_path: Path, name: str, content: bytes, sentence: str
) -> None:
    file = write(tmp_path / name, content)
    with pytest.raises(PlaitError, match=sentence) as caught:
        read_all(Source(str(file)))
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("pattern", ["", "/*.txt"])
def test_a_file_in_a_folder_whose_name_is_not_utf_8_is_refused(tmp_path: Path, pattern: str) -> None:
    write(tmp_path / "a.txt", "a")
    write(tmp_path / os.fsdecode(b"b\xff.txt"), "b")
    with pytest.raises(PlaitError, match=r"b\udcff.txt\" is not UTF-8 text; rename that file"):
        open_source(Source(f"{tmp_path}{pattern}"))


def test_a_pattern_without_a_file_and_a_folder_without_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlaitError, match=r'no file matches ".*none\*\.txt" \(looked in .*\); correct the path in data'):
        open_source(Source(f"{tmp_path}/none*.txt"))
    write(tmp_path / "a.png", "a,b")
    with pytest.raises(PlaitError, match=r"no text is in the folder .*: 0 files, not looked at: 1 .png; put files in"):
        open_source(Source(str(tmp_path)))


def test_a_mend_names_what_the_user_typed(tmp_path: Path) -> None:
    binary = write(tmp_path / "a.txt", b"some text\0more")
    empty = write(tmp_path / "empty" / "b.txt", "")
    write(tmp_path / "only" / "c.txt", b"some text\0more")
    for source, sentence in (
        (Source(str(binary)), "convert it to UTF-8 text or take it out of data.files"),
        (Source(str(binary), given_as="--files"), "or take it out of --files"),
        (
            Source(f"{tmp_path}/*.txt"),
            rf"or change the pattern {tmp_path}/\*.txt in data.files so that it does not .*",
        ),
        (Source(str(binary.parent / "only")), f"or move it out of the folder {tmp_path}/only"),
        (
            Source(str(tmp_path)),
            r"none of the 3 files can be learned from: .*; \(2\) .*b.txt, which is empty; \(3\) .*c.txt, .*",
        ),
        (Source(str(empty), given_as="--text"), "b.txt is empty; fill it or take it out of --text"),
        (Source(" ", given_as="--text"), "--text has an empty name; name a file, a folder or a data set"),
        (Source("lost.txt", given_as="--files"), "correct the path in --files"),
    ):
        with pytest.raises(PlaitError, match=f"{sentence}$"):
            read_all(source)


def test_a_folder_is_read_with_all_folders_in_it_but_no_links(tmp_path: Path) -> None:
    home = tmp_path / "texts"
    for name in ("b.txt", "a/z.md", "a/b/c.txt", ".git/x.txt", ".hidden.txt", "d.png", "README"):
        write(home / name, name)
    write(home / "e.jsonl", '{"text": "line"}')
    write(home / "empty.txt", "")
    write(home / "report.pdf", "%PDF-1.7")
    write(tmp_path / "secret.txt", "not to be read")
    (home / "out.txt").symlink_to(tmp_path / "secret.txt")
    (home / "a" / "loop").symlink_to(home)
    (home / "gone.txt").symlink_to(tmp_path / "nothing")
    assert texts(Source(str(home))) == ["a/b/c.txt", "a/z.md", "b.txt", "line"]
    assert find_text_files(home).summary() == (
        f"{home}: 6 files, not looked at: 1 .png, 2 hidden, 3 linked, 1 without a suffix"
    )
    assert [fault.what for fault in open_sources([Source(str(home))]).left_out] == ["is empty", "is a PDF"]
    assert texts(Source(str(home / "a"))) == ["a/b/c.txt", "a/z.md"]


def test_a_folder_is_prepared_with_a_line_on_what_was_read(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / "texts" / f"{number}.txt", f"Some text {number}. " * 400)
    write(tmp_path / "texts" / "table.csv", "a,b\n1,2\n")
    write(tmp_path / "texts" / "drawing.svg", "<svg>")
    write(tmp_path / "r.toml", '[data]\nfiles = "texts"\n')
    command = [sys.executable, "-m", "plait", "data", "r.toml"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    said = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path, env=environment).stdout
    assert f"data     {tmp_path}/texts: 4 files, not looked at: 1 .svg\n" in said
    assert 'left out texts/table.csv, which has no column "text" (its columns: a, b); name the file apart' in said
    assert "3 documents" in said


def test_a_field_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    def sentence(record: dict[str, object], field: str = "text") -> str:
        file = write(tmp_path / "a.jsonl", json.dumps(record))
        with pytest.raises(PlaitError) as caught:
            read_all(Source(str(file), field=field))
        return str(caught.value).split("; ", 1)[1]

    name = "name the field that holds the text"
    assert sentence({"id": 3, "texts": "x"}) == f'{name}: id, texts; did you mean field = "texts"?'
    assert sentence({"title": "x", "body": "xxx"}) == f'{name}: title, body; did you mean field = "body"?'
    assert sentence({"id": 3}) == f"{name}: id"
    assert sentence({}) == f"{name}, or correct it"
    assert sentence({"a\nb\x1b": 1}) == f"{name}: a\\nb\\x1b"
    assert sentence({f"f{n}": n for n in range(20)}).endswith("f10, f11 and 8 more")


def test_deep_nesting_and_long_lines_of_json_are_told_with_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = write(tmp_path / "a.jsonl", b'{"text": "a"}\n{"text": ' + b"[" * 200_000)
    with pytest.raises(PlaitError, match=r"a.jsonl:2 nests its values too deeply; write one JSON object on each line"):
        read_all(Source(str(deep)))
    digits = write(tmp_path / "b.jsonl", b'{"text": ' + b"1" * 5000 + b"}")
    with pytest.raises(PlaitError, match=r"b.jsonl:1 is not JSON \(.*\); write one JSON object on each line"):
        read_all(Source(str(digits)))
    monkeypatch.setattr(documents, "LONGEST_LINE_BYTES", 100)
    long = write(tmp_path / "c.jsonl", json.dumps({"text": "a"}) + "\n" + json.dumps({"text": "a" * 100}))
    with pytest.raises(PlaitError, match=r"c.jsonl:2 is longer than 100 bytes; write one JSON object on each line"):
        read_all(Source(str(long)))


def test_a_data_set_that_is_a_program_is_never_run(tmp_path: Path) -> None:
    program = write(tmp_path / "evil" / "evil.py", f"open({str(tmp_path / 'ran')!r}, 'w')")
    for path in (program.parent, program):
        with pytest.raises(PlaitError, match=r"is a program \(evil.py\), which plait does not run; save its rows as"):
            open_source(Source(f"hf:{path}"))
    assert not (tmp_path / "ran").exists()


def test_parquet_without_the_column_and_with_a_hole_is_refused(tmp_path: Path) -> None:
    table = write_parquet(tmp_path / "a.parquet", {"body": ["x", None], "n": [1, 2]})
    with pytest.raises(PlaitError, match=r'a.parquet has no column "text"; name one of body, n$'):
        read_all(Source(str(table)))
    with pytest.raises(PlaitError, match=r"a.parquet:row 1: the text is NoneType, not a string"):
        read_all(Source(str(table), field="body"))
    with pytest.raises(PlaitError, match=r"a.parquet:row 0: the text is int, not a string"):
        read_all(Source(str(table), field="n"))


def test_parquet_whose_text_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa

    offsets, letters = pa.array([0, 2, 4], pa.int32()).buffers()[1], pa.py_buffer(b"ab\xff\xfe")
    broken = pa.Array.from_buffers(pa.string(), 2, [None, offsets, letters])
    table = write_parquet(tmp_path / "a.parquet", {"text": broken})
    with pytest.raises(PlaitError, match=r"a.parquet cannot be read after row 0 \(.*\); write it again, text as UTF-8"):
        read_all(Source(str(table)))


@pytest.mark.parametrize("path", ["hf:", "hf:a:b:c:d", "hf:a:b/c", "hf:a:"])
def test_a_malformed_data_set_name_is_refused(path: str) -> None:
    with pytest.raises(PlaitError, match=r'is not a data set; write "hf:NAME"'):
        open_source(Source(path))


HUGGING_FACE = """
import json, sys
from pathlib import Path
import datasets
from plait.data.sources import Source, open_source, open_sources
from plait.errors import PlaitError
def texts(path, field="text"):
    found = open_source(Source(path, field=field))
    assert found.files and all(file.is_file() for file in found.files)
    return [b"".join(document.read()).decode() for document in found.documents()]
def sentence(path, field="text"):
    try:
        texts(path, field)
    except PlaitError as error:
        return str(error)
home = Path(sys.argv[1])
rows = datasets.Dataset.from_dict({"text": [f"row {n}" for n in range(2000)], "n": list(range(2000))})
rows.save_to_disk(str(home / "flat"))
datasets.DatasetDict({"train": rows, "test": rows.select(range(3))}).save_to_disk(str(home / "split"))
(home / "files").mkdir()
(home / "files" / "train.jsonl").write_text(json.dumps({"text": "from lines"}) + "\\n")
print(json.dumps({
    "flat": texts(f"hf:{home}/flat") == [f"row {n}" for n in range(2000)],
    "split": texts(f"hf:{home}/split:test"),
    "files": texts(f"hf:{home}/files"),
    "column": sentence(f"hf:{home}/flat", "body"),
    "number": sentence(f"hf:{home}/flat", "n"),
    "no split": sentence(f"hf:{home}/split:dev"),
    "flat split": sentence(f"hf:{home}/flat:test"),
    "missing": sentence(f"hf:{home}/missing"),
}))
"""


def test_hugging_face_data_sets_from_local_folders(tmp_path: Path) -> None:
    # A process of its own, as the library reads these variables when it is imported.
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", HUGGING_FACE, str(tmp_path)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    found = json.loads(answer.splitlines()[-1])
    assert found["flat"] is True
    assert found["split"] == ["row 0", "row 1", "row 2"]
    assert found["files"] == ["from lines"]
    assert 'has no column "body"; name one of text, n' in found["column"]
    assert "row 0: the text is int, not a string; choose" in found["number"]
    assert 'has no split "dev"; choose one of train, test' in found["no split"]
    assert 'is one data set without splits; write it without ":test"' in found["flat split"]
    assert "cannot be loaded (" in found["missing"] and found["missing"].endswith("correct data.files")


def test_a_table_is_read_by_the_names_in_its_first_row(tmp_path: Path) -> None:
    rows = 'id,text\n1,"two lines\nand a ""quote"", too"\n2,\n\n3,last\n'
    file = write(tmp_path / "a.csv", b"\xef\xbb\xbf" + rows.encode())
    assert texts(Source(str(file))) == ['two lines\nand a "quote", too', "last"]
    assert [one.name for one in open_source(Source(str(file))).documents()] == [f"{file}:2", f"{file}:6"]
    for name, content, field in (
        ("german.csv", "Nr;Kritik\n1;gut, sehr gut\n2;schlecht\n", "Kritik"),
        ("tabs.csv", "n\tbody\n1\tgut, sehr gut\n2\tschlecht\n", "body"),
        ("tabs.TSV", "n\tbody\r\n1\tgut, sehr gut\r\n2\tschlecht\r\n", "body"),
        ("one.csv", 'body\n"gut, sehr gut"\nschlecht', "body"),
    ):
        file = write(tmp_path / name, content)
        assert texts(Source(str(file), field=field)) == ["gut, sehr gut", "schlecht"], name
    long = "x" * 200_000
    assert texts(Source(str(write(tmp_path / "long.csv", f"text\n{long}\n")))) == [long]


def test_a_table_in_another_encoding_is_one_sentence(tmp_path: Path) -> None:
    for name, content in (("a.csv", "tëxt\nx\n"), ("b.csv", "text\n" + "x\n" * 9000 + "ë\n")):
        file = write(tmp_path / name, content.encode("latin1"))
        with pytest.raises(PlaitError, match=r"[ab]\.csv is not UTF-8 text after line \d+; convert it to UTF-8 text"):
            texts(Source(str(file)))


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("blank.csv", "\n\ntext,n\nhello,1\n   \nyou,2\n \n", ["hello", "you"]),
        ("excel.csv", "sep=;\r\ntext;n\r\na, b;1\r\n\x1a", ["a, b"]),
        ("bare.tsv", 'n\ttext\n1\t"Hi" he said\n2\t"no end\n3\tc\n', ['"Hi" he said', '"no end', "c"]),
        ("quoted.tsv", 'n\ttext\n1\t"He said ""Hi"""\n2\t"two\nlines"\n', ['He said "Hi"', "two\nlines"]),
    ],
)
def test_tables_as_programs_write_them(tmp_path: Path, name: str, content: str, found: list[str]) -> None:
    (tmp_path / name).write_bytes(content.encode())
    assert texts(Source(str(tmp_path / name))) == found


def test_a_column_of_text_with_commas_is_told_of_quotes(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("\n\ntext\nHello, world\n")
    with pytest.raises(PlaitError, match=r'2 columns in line 4 and 1 in its header \(a text that holds "," must stand'):
        texts(Source(str(tmp_path / "a.csv")))
