"""The ranks of a run on this machine, as another process of the same user finds them: by the logs that they write, and
how far they are by the pages on which they publish it."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from plait.launch.watching.board import BOARD_NAME, Published, published


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a rank is found: the log that it writes, and its number among the ranks of its host."""

    log: Path
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    pid: int
    process: int
    board: int
    """Descriptors of our own: one of the process, which a later one of the same number does not have, and one of the
    page on which it publishes."""

    @property
    def lives(self) -> bool:
        poll = select.poll()
        poll.register(self.process, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        os.close(self.process)
        os.close(self.board)


class RunningRanks:
    """Ranks that `root` and the processes that it started have started, also after they were replaced by new ones.

    Ranks that were found stay known while they live; looking for one takes milliseconds.
    """

    def __init__(self, root: int, places: Mapping[int, RankPlace]) -> None:
        self._root, self._places = root, places
        self._found: dict[int, _Found] = {}

    @property
    def ranks(self) -> tuple[int, ...]:
        """The numbers of all ranks, of living ones or not."""
        return tuple(self._places)

    def pid(self, rank: int) -> int | None:
        """The process of a rank; None while it has none."""
        found = self._live(rank)
        return found and found.pid

    def published(self, rank: int) -> Published | None:
        """How far a rank is; None while it has no process, or has said nothing yet."""
        found = self._live(rank)
        return published(found.board, self._places[rank].slot) if found else None

    def of_host(self, rank: int) -> Mapping[int, int]:
        """The living processes on the host of a rank, by their ranks."""
        folder = self._places[rank].log.parent
        pids = {one: self.pid(one) for one, place in self._places.items() if place.log.parent == folder}
        return {one: pid for one, pid in pids.items() if pid is not None}

    def close(self) -> None:
        """Give back all that is held open."""
        while self._found:
            self._found.popitem()[1].close()

    def _live(self, rank: int) -> _Found | None:
        found = self._found.get(rank)
        if found is not None and not found.lives:
            self._found.pop(rank).close()
            found = None
        if found is None and (found := self._look_for(rank)):
            self._found[rank] = found
        return found

    def _look_for(self, rank: int) -> _Found | None:
        log = str(self._places[rank].log.resolve())
        for pid in descendants(self._root):
            files = dict(_open_files(pid))
            board = next((at for at, name in files.items() if name.startswith(f"/memfd:{BOARD_NAME}")), None)
            if log in files.values() and board is not None:
                return _opened(pid, board)
        return None


def _opened(pid: int, board: str) -> _Found | None:
    with suppress(OSError):  # it has just ended
        process = os.pidfd_open(pid)
        try:
            return _Found(pid=pid, process=process, board=os.open(board, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            os.close(process)
    return None


def descendants(pid: int) -> list[int]:
    """The processes that a process started, and those that these did."""
    own: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # of a thread that has just ended
                own += [int(child) for child in (task / "children").read_text().split()]
    return [*own, *(below for child in own for below in descendants(child))]


def _open_files(pid: int) -> Iterator[tuple[str, str]]:
    """The open files of a process: where each can be opened once more, and its name."""
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                yield str(link), str(link.readlink())
