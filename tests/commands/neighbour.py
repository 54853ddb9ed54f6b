"""Another host of a run, in this process: it answers by real files in a folder of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from plait.hosts.job_files import JoinedHostFiles
from plait.hosts.joining import own_host_info
from plait.hosts.protocol import Reply, RequestKind, answer_request, parse_reply

KINDS = {request.name: request for request in JoinedHostFiles(Path(), print).handlers}
"""All that a joined host answers about files, by name."""


class Neighbour:
    """A host that joined, as host 0 sees it; JSON goes there and back as it does on a wire."""

    def __init__(self, folder: Path, host: int = 1) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.host, self.name = folder, host, f"host-{host}"
        self.host_info = replace(own_host_info(), name=self.name, folder=str(folder))
        self.said: list[str] = []
        self.asked: list[str] = []
        self.depot = JoinedHostFiles(folder, self.said.append)

    def ask(self, request: RequestKind[Any, Any], question: Any, blob: bytes = b"") -> Reply[Any]:
        self.asked.append(request.name)
        reply = answer_request(self.depot.handlers, request.name, json.loads(json.dumps(asdict(question))), blob)
        return parse_reply(request, json.loads(json.dumps(asdict(reply.values))), reply.blob, self.name)

    def attack(self, kind: str, values: Mapping[str, Any], blob: bytes = b"") -> Reply[Any]:
        """What it answers to a request with any values."""
        return answer_request(self.depot.handlers, kind, json.loads(json.dumps(values)), blob)


def put(host: Any, name: str, content: bytes) -> None:
    """Send a file of the run's or the job's folder, as host 0 does: not if it is there already."""
    entry = {"name": name, "nbytes": len(content), "sha256": sha256(content).hexdigest()}
    if host.attack("take", {"root": "folder", "path": "", "files": [entry]}).values.lacking:
        host.attack("block", {"name": name, "offset": 0}, content)
