"""The ranks of a run on this machine, as another process of the same user finds them: by the logs that they write, and
how far they are by the pages of memory on which they publish it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from plait.launch.watching.board import BOARD_NAME, Published, published


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksOnHost:
    """The ranks of one host, and the folder of the logs that they write."""

    ranks: range
    logs: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    pid: int
    board: Path
    """The page on which it publishes, among its open files."""


class RunningRanks:
    """Ranks of `hosts`, all on this machine, that the process `root` and those that it started have started, also after
    they were replaced.

    A rank that was found stays known while it lives; looking for one takes milliseconds.
    """

    def __init__(self, root: int, hosts: Sequence[RanksOnHost]) -> None:
        self.hosts = hosts
        self._root = root
        self._found: dict[int, _Process | None] = {}

    def pid(self, rank: int) -> int | None:
        """The process of a rank; None while it has none."""
        found = self._running(rank)
        return found and found.pid

    def published(self, rank: int) -> Published | None:
        """How far a rank is; None while it has no process, or has published nothing yet."""
        with suppress(OSError):  # it has just ended
            if found := self._running(rank):
                board = os.open(found.board, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    return published(board, rank - self._host(rank).ranks.start)
                finally:
                    os.close(board)
        return None

    def _host(self, rank: int) -> RanksOnHost:
        return next(host for host in self.hosts if rank in host.ranks)

    def _running(self, rank: int) -> _Process | None:
        found = self._found.get(rank)
        if found is None or not _is_board(_target(found.board)):
            found = self._found[rank] = self._look_for(rank)
        return found

    def _look_for(self, rank: int) -> _Process | None:
        log = str((self._host(rank).logs / f"rank-{rank}.log").resolve())
        for pid in descendants(self._root):
            files = dict(open_files(pid))
            board = next((link for link, target in files.items() if _is_board(target)), None)
            if log in files.values() and board is not None:
                return _Process(pid=pid, board=board)
        return None


def descendants(pid: int) -> list[int]:
    """The processes that a process started, and those that these did."""
    own: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # of a thread that has just ended
                own += [int(child) for child in (task / "children").read_text().split()]
    return [*own, *(below for child in own for below in descendants(child))]


def open_files(pid: int) -> Iterator[tuple[Path, str]]:
    """The open files of a process: a link by which each can be opened once more, and its name; none of one that has
    ended."""
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if target := _target(link):
                yield link, target


def _target(link: Path) -> str:
    with suppress(OSError):
        return str(link.readlink())
    return ""


def _is_board(target: str) -> bool:
    return target.startswith(f"/memfd:{BOARD_NAME}")
