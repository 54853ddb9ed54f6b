"""A page of memory that a host's ranks and their supervisor share: each rank writes how far it is, without a wait."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

from plait.launch.values.progress import ProcessState, RankProgress

_SLOT = struct.Struct("<QQQQd40s")
_SLOT_BYTES = 128
STACK_SIGNAL = signal.SIGUSR2
"""A rank that gets it writes the stacks of its threads after the slots, also while it is stuck in a C library."""
_STACK_S = 1.0
_FADING = 0.99
_STACK_BYTES_AT_MOST = 1 << 16
BOARD_NAME = "plait-progress"
"""The kernel's name for a board among the open files of a rank."""


class ProgressBoard:
    """The supervisor's end; `descriptor` is for the ranks, which write by `SlotWriter`."""

    def __init__(self, ranks: int) -> None:
        self._size = max(1, ranks) * _SLOT_BYTES
        self.descriptor = os.memfd_create(BOARD_NAME)
        os.ftruncate(self.descriptor, self._size)
        self._memory = mmap.mmap(self.descriptor, self._size)
        self._changes: dict[int, int] = {}

    def close(self) -> None:
        """Give the memory back; ranks that still have it keep theirs."""
        self._memory.close()
        os.close(self.descriptor)

    def read(self, slot: int, *, rank: int, pid: int) -> RankProgress:
        """How far the rank of this slot is; `pid` is its process, a child of this host's fork server.

        Of one that has published anything since the last call the process is not looked at: it works.
        """
        changes, step, collective, moved, longest_s, phase = _SLOT.unpack_from(self._memory, slot * _SLOT_BYTES)
        silent = self._changes.get(slot) == changes
        self._changes[slot] = changes
        state, cpu_s = process_state(pid) if silent else ("working", None)
        return RankProgress(
            rank=rank,
            changes=changes,
            step=step,
            collective=collective,
            phase=phase.rstrip(b"\0").decode(errors="replace"),
            state=state,
            cpu_s=cpu_s,
            longest_s=None if longest_s < 0 else longest_s,
            file_bytes=moved,
        )

    def stack_of(self, pid: int) -> str:
        """The stacks of a rank's Python threads; empty where it does not answer within a second.

        A stopped process is continued for it: call this only for one that is killed next.
        """
        before = os.fstat(self.descriptor).st_size
        with suppress(ProcessLookupError):
            os.kill(pid, STACK_SIGNAL)
            os.kill(pid, signal.SIGCONT)
        deadline, size = monotonic() + _STACK_S, before
        while monotonic() < deadline:
            sleep(0.02)
            now = os.fstat(self.descriptor).st_size
            if now == size > before:
                break
            size = now
        return os.pread(self.descriptor, min(size - before, _STACK_BYTES_AT_MOST), before).decode(errors="replace")


class SlotWriter:
    """A rank's end: a ProgressReport that writes into the rank's own slot."""

    def __init__(self, descriptor: int, slot: int) -> None:
        size = os.fstat(descriptor).st_size
        self._memory, self._at = mmap.mmap(descriptor, size), slot * _SLOT_BYTES
        self._changes = self._step = self._collective = self._moved = 0
        self._phase, self._entered_s = b"", monotonic()
        self._longest_s: dict[bytes, float] = {}

    def phase(self, name: str) -> None:
        """As in ProgressReport."""
        now_s = monotonic()
        # An old one counts less and less: a terminal may once have stopped everything for hours.
        faded_s = _FADING * self._longest_s.get(self._phase, 0.0)
        self._longest_s[self._phase] = max(now_s - self._entered_s, faded_s)
        self._phase, self._entered_s = name.encode()[:40], now_s
        self._write()

    def step(self, number: int) -> None:
        """As in ProgressReport."""
        self._step = number
        self._write()

    def collective(self) -> None:
        """As in ProgressReport."""
        self._collective += 1
        self._write()

    def moved(self, nbytes: int) -> None:
        """As in ProgressReport; it is no sign of life by itself, as the watch asks how much has moved."""
        self._moved = nbytes
        self._put()

    def _write(self) -> None:
        self._changes += 1
        self._put()

    def _put(self) -> None:
        counts = self._changes, self._step, self._collective, self._moved
        _SLOT.pack_into(self._memory, self._at, *counts, self._longest_s.get(self._phase, -1.0), self._phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What a rank has written on its board last; `longest_s` is how long this phase took it at most before, 0 where it
    is in it for the first time."""

    step: int
    phase: str
    longest_s: float


def published(board: int, slot: int) -> Published | None:
    """What the rank of a slot has written, read through a descriptor of its board by whoever looks on from outside;
    None before it has written anything."""
    data = os.pread(board, _SLOT.size, slot * _SLOT_BYTES)
    if len(data) < _SLOT.size:
        return None
    changes, step, _, _, longest_s, phase = _SLOT.unpack(data)
    name = phase.rstrip(b"\0").decode(errors="replace")
    return Published(step=step, phase=name, longest_s=max(0.0, longest_s)) if changes else None


def stack_writer(descriptor: int) -> int:
    """A descriptor whose writes go to the end of the board, after the slots, whoever else writes there."""
    writer = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_CLOEXEC)
    fcntl.fcntl(writer, fcntl.F_SETFL, os.O_APPEND)
    return writer


def process_state(pid: int) -> tuple[ProcessState, float]:
    """A process's state, and the CPU seconds that it has used; it is working if any of its threads is."""
    try:
        fields = _stat_fields(Path(f"/proc/{pid}/stat"))
        states = {_stat_fields(task / "stat")[0] for task in Path(f"/proc/{pid}/task").iterdir()}
    except (OSError, IndexError):
        return "gone", 0.0
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    if fields[0] in "ZXT":
        return "stopped" if fields[0] == "T" else "gone", cpu_s
    return "working" if states & {"R", "D"} else "waiting", cpu_s


def _stat_fields(path: Path) -> Sequence[str]:
    """The fields of /proc/PID/stat from the state on: what stands before may hold anything."""
    return path.read_text().rpartition(") ")[2].split()


@dataclass(frozen=True, slots=True, kw_only=True)
class StackPlace:
    """The place in a stack that a sentence names."""

    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def innermost_place(stack: str, package: str = "plait") -> StackPlace | None:
    """The innermost frame of `package` in what faulthandler wrote of the main thread, else the innermost of all; None
    where there is none.

    The main thread is the last that faulthandler writes of. Which one got the signal says nothing: in a process that
    was stopped it is the first to go on.
    """
    own = next((part for part in reversed(stack.split("\n\n")) if part.strip()), "")
    frames = [place for line in own.splitlines() if (place := _frame(line, package))]
    inside = [place for place in frames if place.file.startswith(f"{package}/")]
    return (inside or frames or [None])[0]


def _frame(line: str, package: str) -> StackPlace | None:
    """One line as faulthandler writes it: `File "/x/y.py", line 3 in f`."""
    before, found, rest = line.strip().partition('", line ')
    if not found or not before.startswith('File "'):
        return None
    number, _, function = rest.partition(" in ")
    path = before.removeprefix('File "')
    inside = path.rfind(f"/{package}/")
    return StackPlace(file=path[inside + 1 :] if inside >= 0 else path, line=number, function=function)
