"""What a machine has of NVIDIA's, found without torch: a torch that cannot use a GPU does not see it either."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

NVIDIA_SMI_S = 20
"""Seconds for nvidia-smi to answer; it wakes sleeping GPUs first."""


class Host(Protocol):
    """A machine that can be asked for files, programs and environment variables."""

    def text(self, path: str) -> str | None:
        """What a file holds; None where there is none."""
        ...

    def names_in(self, folder: str) -> Sequence[str]:
        """Names of what is in a folder; empty where there is none."""
        ...

    def answer(self, command: Sequence[str]) -> str | None:
        """What a program prints; None where it is missing or fails."""
        ...

    def variable(self, name: str) -> str | None:
        """An environment variable; None where it is not set."""
        ...


class ThisHost:
    """The machine on which this process runs."""

    def text(self, path: str) -> str | None:
        try:
            return Path(path).read_text()
        except OSError:
            return None

    def names_in(self, folder: str) -> Sequence[str]:
        try:
            return [path.name for path in Path(folder).iterdir()]
        except OSError:
            return ()

    def answer(self, command: Sequence[str]) -> str | None:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class NvidiaCards:
    """The NVIDIA GPUs that this machine, or this container, has."""

    count: int
    driver: str | None
    """Version of the driver, such as "580.65.06"; None where it is unknown."""


def find_nvidia_cards(host: Host) -> NvidiaCards:
    """The GPUs whose device files are here, else those that nvidia-smi lists (WSL has no device files).

    A driver alone is no GPU: a container sees its host's driver also where no GPU was handed to it.
    """
    count = sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in host.names_in("/dev"))
    if not count:
        count = sum(line.startswith("GPU ") for line in (host.answer(["nvidia-smi", "-L"]) or "").splitlines())
    return NvidiaCards(count=count, driver=_driver_version(host) if count else None)


def _driver_version(host: Host) -> str | None:
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", host.text("/proc/driver/nvidia/version") or "")
    if found:
        return found[1]
    answer = host.answer(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return answer.splitlines()[0].strip() if answer and answer.strip() else None
