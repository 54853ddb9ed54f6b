"""Brings what ranks on other hosts wrote of a checkpoint to host 0, while the run goes on."""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from plait.checkpoint.arrival import part_files, refuse_part
from plait.commands.hosts.file_transfer import Peer, fetch_file
from plait.commands.planning.workers import OnMessage
from plait.errors import PlaitError
from plait.launch.values.job import Message

_AT_ONCE = 8
_STAGING = re.compile(r"\.step-\d+\.staging")


class CheckpointCollector:
    """For the time of one job: hears "wrote" from ranks of other hosts, and fetches their parts in threads of its own.

    `checkpoints` is the folder on this host in whose staging folders rank 0 waits for them. All else that ranks tell
    goes to `on_message`.
    """

    def __init__(self, peer_of: Callable[[int], Peer], checkpoints: Path, on_message: OnMessage) -> None:
        self._peer_of, self._checkpoints, self._on_message = peer_of, checkpoints, on_message
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="gather")
        self._touched: set[Path] = set()
        self._given_up = threading.Event()

    def __enter__(self) -> CheckpointCollector:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:  # nobody waits for parts on their way, and they may be large
            self._given_up.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for staging in self._touched:  # still there only where the checkpoint was not published
            shutil.rmtree(staging, ignore_errors=True)

    def hear(self, message: Message) -> None:
        """What the supervisor calls with every word of a rank; returns at once."""
        if message.kind != "wrote":
            self._on_message(message)
        elif _STAGING.fullmatch(str(message.values["staging"])):
            staging = self._checkpoints / message.values["staging"]
            self._touched.add(staging)
            self._pool.submit(self._fetch, message.rank, staging)

    def _fetch(self, rank: int, staging: Path) -> None:
        """Bring a rank's files into the staging folder, its list last; where that fails, rank 0 is told there."""
        peer = self._peer_of(rank)
        try:
            staging.mkdir(parents=True, exist_ok=True)
            for name in part_files(rank):
                place = {"name": name, "staging": staging.name}
                fetch_file(peer, place, staging / name, unwanted=self._given_up.is_set)
        except (OSError, PlaitError) as error:
            with contextlib.suppress(OSError):  # then rank 0 finds by itself that nothing comes
                refuse_part(staging, rank, _sentence(peer, error))


def _sentence(peer: Peer, error: OSError | PlaitError) -> str:
    if isinstance(error, PlaitError):
        why, mend = str(error).partition(";")[0], "mend that"
    else:
        why, mend = f"{error.strerror}: {error.filename}", "free some space or mend its rights"
    return (
        f"could not save the checkpoint: the part from {peer.name} did not arrive ({why}); "
        f"earlier checkpoints are whole: {mend} and give the same command again"
    )
