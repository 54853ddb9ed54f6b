"""Brings what ranks on other hosts wrote of a checkpoint to host 0, while the run goes on."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType

from plait.checkpoint.arrival import ARRIVAL_LIMIT_S, parse_list, part_files, refuse_part
from plait.checkpoint.durable import earlier_checkpoints
from plait.checkpoint.file_check import check_file
from plait.commands.hosts.file_transfer import fetch_file
from plait.commands.hosts.replies import Peer
from plait.commands.hosts.requests import STAGING_NAME
from plait.commands.planning.workers import OnMessage
from plait.errors import PlaitError, disk_advice
from plait.launch.values.job import Message

_CONCURRENT_FETCHES = 8
TRAVEL_GRACE_S = ARRIVAL_LIMIT_S
"""Time for the parts of a last checkpoint to arrive, besides that for saving it."""


class CheckpointCollector:
    """Fetches the parts of checkpoints that ranks on other hosts have written, during one job. Ranks announce them
    with a "wrote" message; threads of its own copy them into the staging folders below `checkpoints` on this host,
    where rank 0 waits for them. All other messages of ranks go to `on_message`."""

    def __init__(self, peer_of: Callable[[int], Peer], checkpoints: Path, on_message: OnMessage) -> None:
        self._peer_of, self._checkpoints, self._on_message = peer_of, checkpoints, on_message
        self._pool = ThreadPoolExecutor(_CONCURRENT_FETCHES, thread_name_prefix="gather")
        self._staging_folders: set[Path] = set()
        self._on_the_way: set[tuple[int, Path]] = set()
        """The ranks whose parts are being fetched, each with the staging folder."""
        self._cancelled = threading.Event()

    def __enter__(self) -> CheckpointCollector:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:  # nobody waits for parts on their way, and they may be large
            self._cancelled.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for staging in self._staging_folders:  # still there only where the checkpoint was not published
            shutil.rmtree(staging, ignore_errors=True)

    def handle_message(self, message: Message) -> None:
        """What the supervisor calls with every word of a rank; returns at once."""
        if message.kind != "wrote":
            self._on_message(message)
        elif STAGING_NAME.fullmatch(str(message.values.get("staging"))):
            staging = self._checkpoints / message.values["staging"]
            self._staging_folders.add(staging)
            if (message.rank, staging) not in self._on_the_way:
                self._on_the_way.add((message.rank, staging))
                self._pool.submit(self._fetch, message.rank, staging)

    def _fetch(self, rank: int, staging: Path) -> None:
        """Copy a rank's files into the staging folder, its list last; on failure leave a note there for rank 0."""
        peer = self._peer_of(rank)
        tensors, their_list = (staging / name for name in part_files(rank))
        try:
            staging.mkdir(exist_ok=True)
            if not their_list.exists():  # else it was found whole, and is not replaced
                self._fetch_file(peer, tensors, lambda path: None)
                self._fetch_file(peer, their_list, partial(_check_part, rank, tensors))
        except (OSError, PlaitError) as error:
            with contextlib.suppress(OSError):  # then rank 0 finds by itself that nothing comes
                refuse_part(staging, rank, _refusal_text(peer, error, staging.parent))
        finally:
            self._on_the_way.discard((rank, staging))

    def _fetch_file(self, peer: Peer, path: Path, check: Callable[[Path], None]) -> None:
        source = {"name": path.name, "staging": path.parent.name}
        fetch_file(peer, source, path, is_cancelled=self._cancelled.is_set, check=check)


def _check_part(rank: int, tensors: Path, their_list: Path) -> None:
    """Raise PlaitError unless the tensors that have arrived are, bit for bit, those that the list names."""
    try:
        with ThreadPoolExecutor(1) as pool:  # the cores train meanwhile
            check_file(tensors, parse_list(rank, their_list.read_bytes()), pool)
    except (ValueError, RecursionError) as error:
        raise PlaitError(f"its list of tensors is damaged: {error or 'it is nested too deeply'}") from None


def _refusal_text(peer: Peer, error: OSError | PlaitError, folder: Path) -> str:
    if isinstance(error, PlaitError):
        why, mend = str(error).partition(";")[0], "mend that"
    else:
        why, mend = f"{error.strerror}: {error.filename}", disk_advice(error)
    return (
        f"could not save the checkpoint: the part from {peer.name} did not arrive ({why}); "
        f"{earlier_checkpoints(folder)}: {mend} and give the same command again"
    )
