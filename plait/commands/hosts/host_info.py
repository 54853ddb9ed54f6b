"""What a host reports about itself when it joins a run, and the reasons for the leading host to refuse it."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from plait.checked_json import SingleLine, one_line, typed_value
from plait.errors import PlaitError
from plait.launch.values.job import RANKS_AT_MOST, THREADS_AT_MOST
from plait.machines.machine import Machine, software_versions, usable_cores
from plait.probing.survey import MachineSurvey
from plait.units import counted, format_duration
from plait.version import wheel_install_line
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

MAX_CLOCK_SKEW_S = 60.0
_LATEST_CLOCK_S = 1e11  # some three thousand years after 1970
# What travels as a name is printed on other hosts: no brackets, which rich takes for markup.
_HOST_NAME, _DEVICE_NAME = re.compile(r"[\w.-][\w .-]{0,63}"), re.compile(r"[^\[\]\n]{0,200}")
_REASON = re.compile(r"[^\[\]\x00-\x1f\x7f]{0,300}")
_HEXADECIMAL = re.compile(r"[0-9a-f]{0,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostInfo:
    """What a host says of itself: its name, software, clock (seconds since 1970), cores and working folder."""

    name: str
    mark: str
    """`hardware_id` of the host."""
    plait: SingleLine
    code: SingleLine
    """`code_hash` of its plait."""
    torch: SingleLine
    python: SingleLine
    clock_s: float
    cores: int
    folder: str
    program: str = ""
    """SHA-256 of the program file that this host runs, where it joined with one."""

    def __post_init__(self) -> None:
        is_right = (
            _HOST_NAME.fullmatch(self.name)
            and _HEXADECIMAL.fullmatch(self.mark)
            and _HEXADECIMAL.fullmatch(self.program)
            and 1 <= self.cores <= THREADS_AT_MOST
            and 0 <= self.clock_s < _LATEST_CLOCK_S
            and Path(self.folder).is_absolute()
        )
        if not is_right:
            raise ValueError("HostInfo is invalid")


@dataclass(frozen=True, slots=True, kw_only=True)
class _MachineReport:
    fingerprint: Mapping[str, Any]
    peak_flops: float | None
    peak_doubt: SingleLine = ""
    reason: str | None = None


def own_host_info(working: WorkingFolder = CURRENT_FOLDER) -> dict[str, Any]:
    """This host's name, software, clock, cores and working folder, as a HostInfo's values."""
    versions = dict(software_versions())
    return {
        "name": re.sub(r"[^\w.-]", "-", platform.node())[:64] or "a host without a name",
        "mark": hardware_id(),
        "plait": versions["plait"],
        "code": code_hash(),
        "torch": versions["torch"],
        "python": versions["python"],
        "clock_s": time.time(),
        "cores": usable_cores(),
        "folder": str(working.path.absolute()),
    }


def why_host_cannot_join(host_info: Mapping[str, Any], leader_info: Mapping[str, Any]) -> str | None:
    """Why a host may not join, as one sentence for its own terminal; None if it may.

    `leader_info` is the leading host's info at this moment. The part of a version after "+" (which build of torch it
    is) may differ.
    """
    lead = leader_info["name"]
    install = f"copy the wheel of its plait here and type: {_install_line(leader_info)}"
    try:
        typed_value(HostInfo, host_info)
    except ValueError:
        lacking = f"install plait {leader_info['plait']} here, too"
        return f"{lead} does not understand this host's greeting; {lacking}; {install}"
    for package in ("plait", "torch"):
        here, there = (str(one[package]).partition("+")[0] for one in (host_info, leader_info))
        if here != there:
            return (
                f"this host has {package} {here} and {lead} has {there}; install {package} {there} here, too; {install}"
            )
    if host_info["code"] != leader_info["code"]:
        return (
            f"this host's plait is of the same version as {lead}'s, {leader_info['plait']}, but its files differ; "
            f"install the same commit on both; {install}"
        )
    if sentence := _why_not_its_program(str(host_info.get("program", "")), str(leader_info.get("program", "")), lead):
        return sentence
    ahead_s = host_info["clock_s"] - leader_info["clock_s"]
    if abs(ahead_s) > MAX_CLOCK_SKEW_S:
        return (
            f"this host's clock is {format_duration(abs(ahead_s))} {'ahead of' if ahead_s > 0 else 'behind'} {lead}'s; "
            "set it right (for example: timedatectl set-ntp true) and join again"
        )
    return None


def _why_not_its_program(here: str, there: str, lead: str) -> str | None:
    """Code is never sent: each host runs a program file of its own user's, the same on all."""
    if there and not here:
        return f"{lead} runs a program; name your copy of it here: plait join HOST:PORT --program PROGRAM.py"
    if here and not there:
        return f"{lead} trains a recipe and runs no program; leave --program out"
    if here != there:
        return f"this host's program file is not {lead}'s; copy that file here, look at it, and join again"
    return None


def _install_line(leader_info: Mapping[str, Any]) -> str:
    return wheel_install_line(str(leader_info["plait"]), torch=str(leader_info["torch"]).partition("+")[0])


def joined_host_text(name: str, host_info: Mapping[str, Any]) -> str:
    """A host that joined, in words."""
    return f"{name}: {counted(host_info['cores'], 'core')}"


def failed_attempts_text(count: int) -> str:
    """Attempts to join that failed, in words."""
    return f"{counted(count, 'attempt')}: a wrong secret, or not plait"


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
    """A digest of plait's own files: two checkouts of one version number can still differ. The same for a checkout and
    for the wheel that was built from it; examples are no code."""
    package = Path(__file__).parents[2]
    digest = sha256()
    for path in sorted(package.rglob("*")):
        if path.suffix in (".py", ".toml") and path.parent.name != "examples":
            digest.update(os.fsencode(path.relative_to(package)) + b"\0" + path.read_bytes())
    return digest.hexdigest()


def machine_survey(values: Mapping[str, Any] | None, host: str) -> MachineSurvey:
    """The machine that a host's worker described; raises PlaitError, with the host's name, where it did not or where
    no machine is like that."""
    try:
        report = typed_value(_MachineReport, values)
        pairs = {"versions": [list(pair) for pair in dict(report.fingerprint["versions"]).items()]}
        machine = typed_value(Machine, {**report.fingerprint, **pairs})
        names = (machine.name, *machine.unlike)
        is_right = 1 <= machine.devices <= RANKS_AT_MOST and 1 <= machine.cores <= THREADS_AT_MOST
        if not is_right or machine.memory_bytes < 0 or (report.peak_flops is not None and report.peak_flops <= 0):
            raise ValueError("a size is out of range")
        if not all(_DEVICE_NAME.fullmatch(name) for name in names) or any(len(pair) != 2 for pair in machine.versions):
            raise ValueError("a name has signs that no device's has")
        if not set(machine.without) <= {"bf16"} or not _REASON.fullmatch(machine.uncompiled):
            raise ValueError("what its GPUs lack is not what GPUs can lack")
    except (ValueError, KeyError, TypeError) as error:
        raise PlaitError(
            f"{host} does not say what machine it is ({one_line(str(error))}); install the same commit on both"
        ) from None
    machine = replace(machine, versions=tuple(sorted(machine.versions)))
    return MachineSurvey(machine=machine, peak_flops=report.peak_flops, peak_doubt=report.peak_doubt)
