"""Preparing that is killed, that meets a full disk, or that two processes begin at once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from plait.data.preparation.build import DataRequest
from plait.data.preparation.prepare import prepare_corpus
from plait.data.sources import Source
from tests.matrix import few_fast

CHILD = """
import json, os, signal, sys
from pathlib import Path
from plait.data.preparation.build import DataRequest
from plait.data.preparation.prepare import prepare_corpus
from plait.data.sources import Source
from plait.errors import PlaitError
def run(on_progress, **more):
    path, tokenizer, cache = sys.argv[1:4]
    vocabulary = 700 if tokenizer == "bpe" else None
    request = DataRequest(sources=(Source(path),), tokenizer=tokenizer, vocabulary=vocabulary, holdout=0.05)
    try:
        print(prepare_corpus(request, Path(cache), on_progress, shard_tokens=100_000, **more), flush=True)
    except PlaitError as error:
        sys.exit(str(error))
"""


def child(script: str, *arguments: object, **options) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD + script, *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, **pipes, **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def visible(cache: Path) -> list[str]:
    return [path.name for path in (cache / "data").iterdir() if path.is_dir() and not path.name.startswith(".")]


def silent(done: int, total: int, stage: str) -> None:
    """Nobody watches."""


@pytest.fixture(scope="module")
def long_file(tmp_path_factory: pytest.TempPathFactory, text: str) -> Path:
    """A little more than one MiB, so that preparing reports more than once in each stage."""
    path = tmp_path_factory.mktemp("long") / "a.txt"
    path.write_text(text * 20)
    return path


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, tuple[str, dict[str, bytes]]]:
    """Tokenizer -> the folder of a run that nobody killed, made once."""
    return {}


KILLED = """
calls = 0
def on_progress(done, total, stage):
    global calls
    calls += 1
    if stage.startswith(sys.argv[4]) and done >= int(sys.argv[5]):
        os.kill(os.getpid(), signal.SIGKILL)
run(on_progress)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokenizer", "stage", "done"),
    [
        ("plain", "reading", 0),
        ("bpe", "training", 1 << 20),
        ("plain", "tokenizing", 1),
        ("plain", "tokenizing", 1_200_000),
    ],
)
def test_killed_at_any_stage_nothing_half_made_is_seen_and_the_next_run_is_the_same(
    tmp_path: Path,
    long_file: Path,
    tokenizer_folder: Path,
    undisturbed: dict[str, tuple[str, dict[str, bytes]]],
    tokenizer: str,
    stage: str,
    done: int,
) -> None:
    name = "bpe" if tokenizer == "bpe" else str(tokenizer_folder)
    killed = child(KILLED, long_file, name, tmp_path / "cache", stage, done)
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert list((tmp_path / "cache" / "data").glob(".*")), "it was killed before it had begun"
    assert visible(tmp_path / "cache") == []
    request = DataRequest(sources=(Source(str(long_file)),), tokenizer=name, vocabulary=700, holdout=0.05)
    folder = prepare_corpus(request, tmp_path / "cache", silent, shard_tokens=100_000)
    assert len(list(folder.glob("train-*.bin"))) > 3
    if name not in undisturbed:
        other = prepare_corpus(request, tmp_path / "other cache", silent, shard_tokens=100_000)
        undisturbed[name] = other.name, contents(other)
    assert (folder.name, contents(folder)) == undisturbed[name]
    assert not list((tmp_path / "cache" / "data").glob(".*"))


OFTEN = """
def on_progress(done, total, stage):
    print(f"{stage} {done}", flush=True)
    if stage.startswith("tokenizing") and done >= int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)
run(on_progress, keep_every_bytes=1 << 19)
"""


def killed_and_finished(folder: Path, file: Path, tokenizer: str, kill_at: int) -> tuple[Path, int]:
    """The corpus of a preparation that was killed after so many bytes and begun again, and where its tokenizing began
    the second time."""
    killed = child(OFTEN, file, tokenizer, folder / "cache", kill_at)
    killed.communicate(timeout=150)
    assert killed.returncode == -signal.SIGKILL
    assert visible(folder / "cache") == []
    begins: list[int] = []

    def note(done: int, total: int, stage: str) -> None:
        if stage == "tokenizing":
            begins.append(done)

    request = DataRequest(sources=(Source(str(file)),), tokenizer=tokenizer, vocabulary=700, holdout=0.05)
    made = prepare_corpus(request, folder / "cache", note, shard_tokens=100_000, keep_every_bytes=1 << 19)
    assert not list((folder / "cache" / "data").glob(".*"))
    return made, begins[0]


@pytest.mark.parametrize(
    ("tokenizer", "part"),
    few_fast([("plain", 0), ("plain", 5), ("plain", 9), ("bpe", 1), ("bpe", 7)], ("plain", 5)),
)
def test_killed_at_any_point_it_goes_on_from_there_with_the_same_shards(
    tmp_path: Path, text: str, tokenizer_folder: Path, tokenizer: str, part: int
) -> None:
    file = tmp_path / "a.txt"
    file.write_text(text * (60 if part == 5 else 180))  # it tells how far it is once in a MiB
    size = file.stat().st_size
    name = "bpe" if tokenizer == "bpe" else str(tokenizer_folder)
    made, began_at = killed_and_finished(tmp_path, file, name, size * part // 10)
    request = DataRequest(sources=(Source(str(file)),), tokenizer=name, vocabulary=700, holdout=0.05)
    other = prepare_corpus(request, tmp_path / "undisturbed", silent, shard_tokens=100_000)
    assert (made.name, contents(made)) == (other.name, contents(other))
    assert began_at >= size * part // 10 - (2 << 20)  # a batch and what is kept, of text with long characters
    assert began_at > 0 or part < 3


@pytest.mark.slow
def test_killed_amid_many_documents_it_holds_out_the_same_of_each_source(
    tmp_path: Path, text: str, tokenizer_folder: Path
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "long.txt").write_text(text * 30)
    for name in ("a", "b"):
        rows = [{"text": f"{name} {n} {text[n * 11 : n * 11 + 900]}"} for n in range(2000)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made, began_at = killed_and_finished(tmp_path, folder, str(tokenizer_folder), 3_000_000)
    request = DataRequest(sources=(Source(str(folder)),), tokenizer=str(tokenizer_folder), vocabulary=700, holdout=0.05)
    other = prepare_corpus(request, tmp_path / "undisturbed", silent, shard_tokens=100_000)
    assert (made.name, contents(made)) == (other.name, contents(other)) and began_at > 1_000_000
    (source,) = json.loads((made / "index.json").read_text())["sources"]
    assert source["heldout_bytes"] == pytest.approx(0.05 * source["text_bytes"], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "note"])
def test_what_a_killed_one_left_is_made_anew_where_it_is_damaged(
    tmp_path: Path, long_file: Path, tokenizer_folder: Path, damage: str
) -> None:
    name = str(tokenizer_folder)
    killed = child(OFTEN, long_file, name, tmp_path / "cache", 1_000_000)
    killed.communicate(timeout=150)
    (left,) = (tmp_path / "cache" / "data").glob(".*.part")
    shard = left / ("kept.json" if damage == "note" else "train-00000.bin")
    data = shard.read_bytes()
    shard.write_bytes(bytes([data[0] ^ 1]) + data[1:] if damage == "flipped" else data[: len(data) // 2])
    if damage == "gone":
        shard.unlink()
    request = DataRequest(sources=(Source(str(long_file)),), tokenizer=name, vocabulary=700, holdout=0.05)
    made = prepare_corpus(request, tmp_path / "cache", silent, shard_tokens=100_000)
    other = prepare_corpus(request, tmp_path / "undisturbed", silent, shard_tokens=100_000)
    assert (made.name, contents(made)) == (other.name, contents(other))


FULL = """
import resource
def on_progress(done, total, stage):
    if stage == "tokenizing" and done == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))
run(on_progress)
"""


def test_a_full_disk_is_told_with_the_bytes_needed_and_leaves_nothing(
    tmp_path: Path, long_file: Path, tokenizer_folder: Path
) -> None:
    full = child(FULL, long_file, tokenizer_folder, tmp_path / "cache")
    _, told = full.communicate(timeout=60)
    assert full.returncode == 1
    assert "the disk is full: the tokens need about " in told and "MiB in " in told
    assert told.strip().endswith("free that much, or work in a folder on another disk")
    assert len(told.strip().splitlines()) == 1
    assert visible(tmp_path / "cache") == []
    assert not list((tmp_path / "cache" / "data").glob(".*"))


FIRST = """
def on_progress(done, total, stage):
    if stage == "tokenizing" and done == 0:
        print("holding", flush=True)
        sys.stdin.readline()
run(on_progress)
"""
SECOND = """
def on_progress(done, total, stage):
    print(stage, flush=True)
run(on_progress)
"""


def test_two_at_once_do_the_work_once(tmp_path: Path, file: Path, tokenizer_folder: Path) -> None:
    arguments = (file, tokenizer_folder, tmp_path / "cache")
    first = child(FIRST, *arguments)
    assert first.stdin and first.stdout
    assert first.stdout.readline() == "holding\n"
    second = child(SECOND, *arguments)
    assert second.stdout
    assert second.stdout.readline().startswith("looking at")
    assert second.stdout.readline() == "waiting for another process that prepares it\n"
    assert visible(tmp_path / "cache") == []
    first_folder, _ = first.communicate("go on\n", timeout=60)
    second_folder, _ = second.communicate(timeout=60)
    assert first_folder == second_folder
    assert len(second_folder.splitlines()) == 1, "nothing was read or tokenized a second time"
