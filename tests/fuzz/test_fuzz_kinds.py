"""Something else than a file in the place of each file that plait reads: a pipe, a socket, a device, a folder, a link
to nothing or to itself, or more bytes than memory has. Each is one sentence at once, or as if the file were missing."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.command import Place
from tests.fuzz.conftest import Outcome
from tests.fuzz.test_fuzz_files import GOES_ON_S, ON_PAPER, SAMPLE, TRAIN, assert_sound
from tests.interop.folders import write_model

HUGE_BYTES = 5 << 30
MEMORY_BYTES = 2 << 30
"""What a command may allocate beyond what this process has."""
AT_ONCE_S = 5.0


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        here = Path.cwd()
        os.chdir(path.parent)  # a socket's path is short
        try:
            one.bind(path.name)
        finally:
            os.chdir(here)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(HUGE_BYTES)


KINDS: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "socket": _socket,
    "folder": Path.mkdir,
    "sparse": _sparse,
    "link to zeros": lambda path: path.symlink_to("/dev/zero"),
    "link to nothing": lambda path: path.symlink_to("/dev/null"),
    "link to a terminal": lambda path: path.symlink_to("/dev/tty"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "dangling link": lambda path: path.symlink_to("is-not-there"),
    "link to a pipe": lambda path: (os.mkfifo(path.with_name("a-pipe")), path.symlink_to("a-pipe")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A file, and the command that reads it."""

    pattern: str
    command: tuple[str, ...]
    is_needed: bool = True
    """Whether the command cannot do without it."""


DATA = ("data", "tiny.toml")
CHATS = ("data", "chats.toml")
OF_MODEL = ("sample", "base", "--tokens", "2", "--temperature", "0")
READ = {
    "recipe": Read(pattern="tiny.toml", command=(*ON_PAPER, "1x4090")),
    "cluster": Read(pattern="cluster.json", command=(*ON_PAPER, "cluster.json", "layout.replicate=auto")),
    "text": Read(pattern="play.txt", command=DATA),
    "hashes": Read(pattern=".plait/data/hashes.json", command=DATA, is_needed=False),
    "choices": Read(pattern="choices.jsonl", command=(*DATA, "report.choices=choices.jsonl")),
    "chats": Read(pattern="chats.jsonl", command=CHATS),
    "plan": Read(pattern="runs/fuzzed/plan.json", command=TRAIN),
    "receipt": Read(pattern="runs/fuzzed/receipt.json", command=TRAIN),
    "begun recipe": Read(pattern="runs/fuzzed/recipe.toml", command=TRAIN),
    "manifest": Read(pattern="runs/fuzzed/checkpoints/*/manifest.json", command=SAMPLE),
    "weights": Read(pattern="runs/fuzzed/checkpoints/*/*.safetensors", command=SAMPLE),
    "index": Read(pattern=".plait/data/*/index.json", command=("eval", "fuzzed")),
    "shards": Read(pattern=".plait/data/*/train-00000.bin", command=("eval", "fuzzed")),
    "starts": Read(pattern=".plait/data/*/train-00000.starts.npy", command=("eval", "fuzzed")),
    "tokenizer": Read(pattern=".plait/data/*/tokenizer.json", command=SAMPLE),
    "model's config": Read(pattern="base/config.json", command=OF_MODEL),
    "model's weights": Read(pattern="base/model.safetensors", command=OF_MODEL),
    "model's index": Read(pattern="base/model.safetensors.index.json", command=OF_MODEL, is_needed=False),
    "model's tokenizer": Read(pattern="base/tokenizer.json", command=OF_MODEL),
    "tokenizer's settings": Read(pattern="base/tokenizer_config.json", command=CHATS, is_needed=False),
    "special tokens": Read(pattern="base/special_tokens_map.json", command=CHATS, is_needed=False),
    "chat template": Read(pattern="base/chat_template.jinja", command=CHATS, is_needed=False),
    "adapter's config": Read(pattern="adapter/adapter_config.json", command=(*OF_MODEL, "--adapter", "adapter")),
    "program": Read(pattern="program.py", command=("run", "program.py")),
}


@pytest.fixture(scope="module")
def place(finished: Place) -> Iterator[Place]:
    """The finished run's folder, with a model, chats and choices beside it until these tests are over."""
    prepared_before = set((finished.folder / ".plait" / "data").iterdir())
    write_model(finished.folder / "base")
    (finished.folder / "adapter").mkdir(exist_ok=True)
    chats = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}] for n in range(40)]
    (finished.folder / "chats.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in chats))
    (finished.folder / "chats.toml").write_text(
        '[model]\nfrom = "base"\n[data]\nfiles = "chats.jsonl"\n[train]\nbudget = "1 steps"\n'
    )
    question = {"question": "Which?", "choices": ["this", "that"], "answer": 0}
    (finished.folder / "choices.jsonl").write_text(json.dumps(question) + "\n")
    yield finished
    for path in set((finished.folder / ".plait" / "data").iterdir()) - prepared_before:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("read", READ)
def test_no_kind_of_file_blocks_a_command_or_fills_the_memory(
    read: str, place: Place, plait: Callable[..., Outcome]
) -> None:
    subject = READ[read]
    for kind in KINDS:
        with planted(place.folder, subject.pattern, kind), limits():
            told = plait(*subject.command)
        assert_sound(told, f"{kind} for {subject.pattern}", AT_ONCE_S if told.code else GOES_ON_S)
        if subject.is_needed:
            assert told.code == 2, f"{kind} for {subject.pattern}: {told}"


@contextmanager
def planted(folder: Path, pattern: str, kind: str) -> Iterator[None]:
    """Something of this kind in the place of a file, which is there again afterwards."""
    path = next(iter(sorted(folder.glob(pattern))), folder / pattern)
    kept = path.with_name(f"{path.name}.kept")
    if is_there := path.exists():
        path.rename(kept)
    try:
        KINDS[kind](path)
        yield
    finally:
        for left in (path, path.with_name("a-pipe")):
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            else:
                left.unlink(missing_ok=True)
        if is_there:
            kept.rename(path)


@contextmanager
def limits() -> Iterator[None]:
    """A wait that lasts raises TimeoutError in this process, and memory beyond a bound MemoryError."""

    def waited(*_: object) -> None:
        raise TimeoutError("the command waits for ever")

    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    handler = signal.signal(signal.SIGALRM, waited)
    signal.alarm(int(GOES_ON_S))
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
