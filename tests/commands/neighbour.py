"""Another host of a run, in this process: it answers by a real depot in a folder of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.hosts.connection import Reply
from plait.hosts.job_files import JoinedHostFiles
from plait.hosts.wire import Frame


class Neighbour:
    """A host that joined, as host 0 sees it; JSON goes there and back as it does on a wire."""

    def __init__(self, folder: Path, host: int = 1) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.host, self.name = folder, host, f"host-{host}"
        self.host_info = {"folder": str(folder), "name": self.name}
        self.said: list[str] = []
        self.asked: list[str] = []
        self.depot = JoinedHostFiles(folder, self.said.append)

    def ask(self, kind: str, values: Mapping[str, Any], blob: bytes = b"") -> Reply:
        self.asked.append(kind)
        frame = Frame(kind=kind, values=json.loads(json.dumps(values)), blob=blob)
        reply = self.depot.handlers[kind](frame)
        return Reply(values=json.loads(json.dumps(reply.values)), blob=reply.blob)
