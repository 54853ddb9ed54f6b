"""Collects a checkpoint from several hosts: host 0 fetches what their ranks wrote, while the run goes on."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal

from plait.checkpoint.arrival import parse_list, part_files, refuse_part
from plait.checkpoint.durable import earlier_checkpoints, is_full_disk
from plait.checkpoint.file_check import check_file
from plait.errors import PlaitError, RunFailed, disk_advice
from plait.hosts.copies import READ_KEPT, KeptQuestion
from plait.hosts.files import READ_FILE, STAGING_NAME, ReadRequest, fetch_file
from plait.hosts.protocol import Peer, parse_message
from plait.launch.values.copies import CopyPart
from plait.launch.values.failure import FailureFacts, WorkersFailed
from plait.launch.values.job import NOTE, Message
from plait.workers import OnMessage

_CONCURRENT_FETCHES = 8
FULL_CHECKPOINTS = 2
"""This many checkpoints in a row that a host has no room for, on its disk or in memory, and it is left out."""


UNFINISHED_CHECKPOINTS = 64
"""The most checkpoints that may be half copied at one time; plait writes them one after another."""


class CheckpointCollector:
    """Fetches the parts of checkpoints that ranks on other hosts have written, during one job. Ranks announce them
    with a "wrote" message, from memory where their disk is full; threads of its own copy them into the staging folders
    below `checkpoints` on this host, where rank 0 waits for them. All other messages of ranks go to `on_message`.

    With `on_full_host` "leave out" the job ends once a host has had no room for several checkpoints in a row, so that
    it can restart without that host.
    """

    def __init__(
        self,
        peer_of: Callable[[int], Peer],
        checkpoints: Path,
        on_message: OnMessage,
        on_full_host: Literal["wait", "leave out"] = "wait",
    ) -> None:
        self._peer_of, self._checkpoints, self._on_message = peer_of, checkpoints, on_message
        self._on_full_host = on_full_host
        self._from_memory = dict[str, int]()
        """How many checkpoints of each host came from memory, by the host's name."""
        self._full = dict[str, set[str]]()
        """The staging folders of the checkpoints in a row that each host has had no room for."""
        self._pool = ThreadPoolExecutor(_CONCURRENT_FETCHES, thread_name_prefix="gather")
        self._staging_folders: set[Path] = set()
        """Where parts were copied, and rank 0 has not yet published the checkpoint."""
        self._on_the_way: set[tuple[int, Path]] = set()
        """The ranks whose parts are being fetched, each with the staging folder."""
        self._cancelled = threading.Event()

    def __enter__(self) -> CheckpointCollector:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:  # parts on their way are not needed any more, and may be large
            self._cancelled.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for staging in self._staging_folders:  # still there only where the checkpoint was not published
            shutil.rmtree(staging, ignore_errors=True)

    def handle_message(self, message: Message) -> None:
        """What the supervisor calls with every word of a rank; returns at once. Raises WorkersFailed where a host is to
        be left out, and RunFailed for one that announces checkpoints without end."""
        if message.kind == "saved":
            self._full.clear()
        if message.kind not in ("wrote", "no room"):
            self._on_message(message)
        elif STAGING_NAME.fullmatch(str(message.values.get("staging"))):
            staging = self._checkpoints / message.values["staging"]
            if message.kind == "no room":
                self._note_full(message)
            elif (message.rank, staging) not in self._on_the_way:
                self._note_staging(message.rank, staging)
                memory = message.values.get("memory")
                if memory is not None:
                    self._note_from_memory(message.rank)
                self._pool.submit(self._fetch, message.rank, staging, memory)

    def _note_staging(self, rank: int, staging: Path) -> None:
        awaited = {folder for _, folder in tuple(self._on_the_way)}
        self._staging_folders = {one for one in self._staging_folders if one in awaited or one.exists()} | {staging}
        if len(self._staging_folders) > UNFINISHED_CHECKPOINTS:
            raise RunFailed(
                f"{self._peer_of(rank)} announced more than {UNFINISHED_CHECKPOINTS} checkpoints that were never "
                "completed; install the same commit of plait on all hosts"
            )
        self._on_the_way.add((rank, staging))

    def _note_from_memory(self, rank: int) -> None:
        host = str(self._peer_of(rank))
        self._from_memory[host] = count = self._from_memory.get(host, 0) + 1
        if count.bit_count() == 1:  # the first, second, fourth, … time
            text = (
                f"warning  the disk of {host} is full, so its part of the checkpoint is sent here from its memory; "
                "free some space there"
            )
            self._on_message(Message(rank=0, kind=NOTE, values={"text": text}))

    def _note_full(self, message: Message) -> None:
        """Count a checkpoint for which a host had no room, on disk or in memory."""
        peer = self._peer_of(message.rank)
        full = self._full.setdefault(str(peer), set())
        if len(full) < FULL_CHECKPOINTS:
            full.add(str(message.values["staging"]))
        if self._on_full_host == "leave out" and len(full) >= FULL_CHECKPOINTS:
            why = f"no room for its part of {len(full)} checkpoints in a row ({message.values.get('why')})"
            facts = FailureFacts(cause="no room", host=str(peer), what=why)
            raise WorkersFailed(f"{peer} has {why}", facts)

    def _fetch(self, rank: int, staging: Path, memory: object) -> None:
        """Copy a rank's files into the staging folder, its list last; on failure leave a note there for rank 0.

        `memory` is what the rank says of its part where its host keeps it in memory, None where it is on the disk.
        """
        peer = self._peer_of(rank)
        tensors, their_list = (staging / name for name in part_files(rank))
        try:
            staging.mkdir(exist_ok=True)
            if not their_list.exists():  # else it was found whole, and is not replaced
                self._fetch_file(peer, tensors, memory, "tensors", lambda path: None)
                self._fetch_file(peer, their_list, memory, "list", partial(_check_part, rank, tensors))
        except (OSError, PlaitError) as error:
            with contextlib.suppress(OSError):  # then rank 0 finds by itself that nothing comes
                why = "no room" if is_full_disk(error) else "another reason"
                refuse_part(staging, rank, _refusal_text(peer, error, staging.parent), why)
        finally:
            self._on_the_way.discard((rank, staging))

    def _fetch_file(
        self, peer: Peer, path: Path, memory: object, what: CopyPart, check: Callable[[Path], None]
    ) -> None:
        is_cancelled = self._cancelled.is_set
        if memory is None:
            question = ReadRequest(name=path.name, staging=path.parent.name)
            fetch_file(peer, READ_FILE, question, path, is_cancelled=is_cancelled, check=check)
        else:
            values = {**memory, "what": what} if isinstance(memory, Mapping) else memory
            question = parse_message(KeptQuestion, values)
            fetch_file(peer, READ_KEPT, question, path, is_cancelled=is_cancelled, check=check)


def _check_part(rank: int, tensors: Path, their_list: Path) -> None:
    """Raise PlaitError unless the tensors that have arrived are, bit for bit, those that the list names."""
    try:
        with ThreadPoolExecutor(1) as pool:  # the cores train meanwhile
            check_file(tensors, parse_list(rank, their_list.read_bytes()), pool)
    except (ValueError, RecursionError) as error:
        raise PlaitError(f"its list of tensors is damaged: {error or 'it is nested too deeply'}") from None


def _refusal_text(peer: Peer, error: OSError | PlaitError, folder: Path) -> str:
    if isinstance(error, PlaitError):
        why, advice = error.cause, "free some space" if is_full_disk(error) else "fix that"
    else:
        why, advice = f"{error.strerror}: {error.filename or folder} on this host", disk_advice(error)
    return (
        f"could not save the checkpoint: the part from {peer.name} did not arrive ({why}); "
        f"{earlier_checkpoints(folder)}: {advice} and give the same command again"
    )
