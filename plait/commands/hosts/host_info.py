"""What a host reports about itself when it joins a run, and the reasons for the leading host to refuse it."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from plait.cluster.topology import software_versions, usable_cores
from plait.units import format_duration

MAX_CLOCK_SKEW_S = 60.0


def own_host_info() -> dict[str, Any]:
    """This host's name, software, clock, cores and working folder."""
    versions = dict(software_versions())
    return {
        "name": platform.node() or "a host without a name",
        "mark": hardware_id(),
        "plait": versions["plait"],
        "code": code_hash(),
        "torch": versions["torch"],
        "python": versions["python"],
        "clock_s": time.time(),
        "cores": usable_cores(),
        "folder": str(Path.cwd()),
    }


def why_host_cannot_join(host_info: Mapping[str, Any], leader_info: Mapping[str, Any]) -> str | None:
    """Why a host may not join, as one sentence for its own terminal; None if it may.

    `leader_info` is the leading host's info at this moment. The part of a version after "+" (which build of torch it
    is) may differ.
    """
    lead = leader_info["name"]
    if not _is_complete(host_info, leader_info):
        return f"{lead} does not understand this host's greeting; install plait {leader_info['plait']} here, too"
    for package in ("plait", "torch"):
        here, there = (str(one[package]).partition("+")[0] for one in (host_info, leader_info))
        if here != there:
            return f"this host has {package} {here} and {lead} has {there}; install {package} {there} here, too"
    if host_info["code"] != leader_info["code"]:
        return (
            f"this host's plait is of the same version as {lead}'s, {leader_info['plait']}, but its files differ; "
            "install the same commit on both"
        )
    ahead_s = host_info["clock_s"] - leader_info["clock_s"]
    if abs(ahead_s) > MAX_CLOCK_SKEW_S:
        return (
            f"this host's clock is {format_duration(abs(ahead_s))} {'ahead of' if ahead_s > 0 else 'behind'} {lead}'s; "
            "set it right (for example: timedatectl set-ntp true) and join again"
        )
    return None


@cache
def hardware_id() -> str:
    """A digest of the machine id and of the addresses of the physical network cards: machines that were made from one
    image share their host name, and often the machine id."""
    cards = [path for path in sorted(Path("/sys/class/net").glob("*")) if (path / "device").exists()]
    digest = sha256()
    for file in (Path("/etc/machine-id"), *(path / "address" for path in cards)):
        with suppress(OSError):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


@cache
def code_hash() -> str:
    """A digest of plait's own files: two checkouts of one version number can still differ."""
    package = Path(__file__).parents[2]
    digest = sha256()
    for path in sorted(package.rglob("*")):
        if path.suffix in (".py", ".toml"):
            digest.update(os.fsencode(path.relative_to(package)) + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _is_complete(host_info: Mapping[str, Any], leader_info: Mapping[str, Any]) -> bool:
    """Whether another host's info has every key that ours has, with values of the same types."""
    return all(type(host_info.get(key)) is type(value) for key, value in leader_info.items())
