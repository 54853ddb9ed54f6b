"""Hosts in processes of their own, for tests of jobs over several: see tests/launch/host.py and lead.py."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from plait.hosts.handshake import Secret
from plait.launch.values.entries import EntryTable
from tests.launch.processes import ENTRIES, WITH_TORCH

ROOT = Path(__file__).parents[2]


class HostProcess:
    """A host in a process of its own, in its own group as if it had its own terminal."""

    def __init__(self, module: str, *arguments: str, secret: Secret) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"tests.launch.{module}", *arguments],
            cwd=ROOT,
            env={**os.environ, "PLAIT_SECRET": secret.text},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self.process.pid

    def next_line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def said(self) -> str:
        """Its next sentence for a person."""
        while "said" not in (line := self.next_line()):
            assert line == {"kind": "connected"}
        return line["said"]

    def ended(self, exit_code: int) -> dict[str, Any]:
        """Its last words, when it has ended as it should."""
        lines = self.process.communicate(timeout=30)[0].splitlines()
        assert self.process.returncode == exit_code, lines
        return json.loads(lines[-1])

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.communicate()


def start_agent(join_address: str, secret: Secret, number: int = 2, entries: EntryTable = ENTRIES) -> HostProcess:
    """A host at 127.0.0.`number` that joins."""
    return HostProcess(
        "host", join_address, f"127.0.0.{number}", "with torch" if entries is WITH_TORCH else "", secret=secret
    )
