"""A lab at work: hosts in network namespaces of this machine, each with its cable and its share of the processor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from benchmarks.lab.awake import Awake
from benchmarks.lab.leftovers import (
    GROUPS,
    NAMESPACES,
    end_processes,
    groups_of,
    in_group,
    name_of_lab,
    scratch_of,
    sweep,
)
from benchmarks.lab.pace import Pace
from benchmarks.lab.wiring import Command, Host, Rate, building, hosts_of, limiting, parting
from plait.errors import PlaitError

ROOT = Path(__file__).parents[2]
PERIOD_US = 10_000
"""Short, so that a throttled host slows down evenly."""
NO_QUOTA = -1

Files = Literal["shared", "own"]
Quota = Literal["kept", "lifted"]


def require_root() -> None:
    """Raise PlaitError where namespaces and quotas cannot be made."""
    if os.geteuid() != 0:
        raise PlaitError("the lab makes network namespaces and needs root; run it as root, on a machine of your own")
    for group in GROUPS:
        if not (group / "cgroup.procs").exists():
            raise PlaitError(
                f"{group} is no control group of version 1, which the lab's quotas need; boot with "
                "systemd.unified_cgroup_hierarchy=0, or mount it"
            )


class Lab:
    """Use as a context manager; at the end, however it comes, nothing of it is left.

    `work` is the folder that commands run in. With `files` = "own" every host but the first has a folder of its own in
    its place.
    """

    def __init__(self, cores: Sequence[float], rate: Rate, *, work: Path, files: Files) -> None:
        self.name = name_of_lab(os.getpid())
        self.hosts = hosts_of(self.name, cores)
        self._rate: Rate = rate
        self._work, self._files = work, files
        self._running: list[subprocess.Popen[bytes]] = []
        self._pace: Pace | None = None
        self._awake: Awake | None = None

    def __enter__(self) -> Self:
        require_root()
        sweep()
        self._watcher = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.lab.leftovers", self.name],
            cwd=ROOT, stdin=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        try:
            scratch_of(self.name).mkdir(mode=0o700)
            for host in self.hosts:
                _grant(host)
                self.folder_of(host).mkdir(parents=True, exist_ok=True)
            _carry_out([*building(self.name, self.hosts), *limiting(self.name, self.hosts, self._rate)])
            cores = [core_of(host) for host in self.hosts]
            self._pace = Pace(cores, scratch_of(self.name))
            self._awake = Awake(cores, f"{self.name}-awake")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def part(self, hosts: Sequence[Host], rate: float) -> None:
        """Put these hosts into a room of their own, with a road of so many bits a second to the others."""
        _carry_out(parting(self.name, hosts, rate))

    def limit(self, rate: float) -> None:
        """Change the bandwidth of the cables, in bits a second, while hosts are running."""
        _carry_out(limiting(self.name, self.hosts, rate))

    def folder_of(self, host: Host) -> Path:
        """Where the files of a host really are, as seen from outside."""
        return self._work if self._files == "shared" or host.index == 0 else scratch_of(self.name) / f"{host.index}"

    def start(
        self,
        host: Host,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        quota: Quota = "kept",
    ) -> subprocess.Popen[bytes]:
        """Run a command on a host; what it prints goes to `log`. It dies with this process."""
        own = None if self.folder_of(host) == self._work else str(self.folder_of(host))
        order = {
            "groups": [str(group) for group in groups_of(host.namespace)] if quota == "kept" else [],
            "namespace": str(NAMESPACES / host.namespace),
            "over": str(self._work),
            "own": own,
            "core": core_of(host) if host.cores <= 1 and quota == "kept" else None,
            "folder": str(self._work),
            "command": list(command),
            "parent": os.getpid(),
        }
        arguments = [sys.executable, "-I", "-S", str(Path(__file__).with_name("enter.py")), json.dumps(order)]
        with log.open("wb") as out:
            process = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                env=_environment(environment or {}), start_new_session=True,
            )  # fmt: skip
        self._running.append(process)
        return process

    def end_commands(self) -> None:
        """Kill all that runs on the hosts."""
        end_processes(lambda: [pid for host in self.hosts for pid in in_group(groups_of(host.namespace)[0])])
        for process in self._running:
            process.kill()
            process.wait()
        self._running.clear()

    def grant(self, host: Host, cores: float) -> None:
        """From now on this share of the processor to a host, whatever it was begun with."""
        _set_quota(host, cores)

    def granted(self, host: Host) -> float:
        """The share of the processor that a host has now."""
        quota_us = int((GROUPS[0] / host.namespace / "cpu.cfs_quota_us").read_text())
        return 1.0 if quota_us == NO_QUOTA else quota_us / PERIOD_US

    def processor_s(self) -> float:
        """Processor seconds that all hosts together took so far."""
        usage = [GROUPS[1] / host.namespace / "cpuacct.usage" for host in self.hosts]
        return sum(int(path.read_text()) for path in usage) / 1e9

    def other_programs_s(self) -> float:
        """The same that programs on no host took, the system's own time left out: most of it carries what hosts send.

        All by one account. It looks at the kernel's ticks who is running, so that hosts that are held back at the same
        beat count too much or too little; taken from the whole by the same ticks, that goes out.
        """
        everybody, *hosts = (
            int((GROUPS[1] / name / "cpuacct.usage_user").read_text())
            for name in ("", *(host.namespace for host in self.hosts))
        )
        kept_awake_s = self._awake.user_s() if self._awake else 0.0
        return (everybody - sum(hosts)) / 1e9 - kept_awake_s

    def product_s(self, begin_s: float, end_s: float) -> tuple[float, ...]:
        """Of each host's processor the pace between two moments: see pace.py."""
        assert self._pace is not None
        return tuple(self._pace.product_s(core_of(host), begin_s, end_s) for host in self.hosts)

    def sent_bytes(self) -> int:
        """Bytes that the busiest host sent so far."""
        asked = [("ip", "-n", host.namespace, "-j", "-s", "link", "show", "eth0") for host in self.hosts]
        told = [json.loads(subprocess.run(command, capture_output=True, check=True).stdout) for command in asked]
        return max(one[0]["stats64"]["tx"]["bytes"] for one in told)

    def listens(self, host: Host, port: int) -> bool:
        """Whether somebody on a host waits for connections on this port."""
        told = subprocess.run(
            ["ip", "netns", "exec", host.namespace, "cat", "/proc/net/tcp"], capture_output=True, text=True, check=True
        )
        rows = [line.split() for line in told.stdout.splitlines()[1:]]
        return any(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows)

    def _end(self) -> None:
        self.end_commands()
        for watcher in (self._pace, self._awake):
            if watcher is not None:
                watcher.end()
        assert self._watcher.stdin
        self._watcher.stdin.close()
        self._watcher.wait()


def core_of(host: Host) -> int:
    """The processor that a host of no more than one has its share of."""
    return host.index % (os.cpu_count() or 1)


def _grant(host: Host) -> None:
    """A control group of its own, with its share of processor time."""
    for group in groups_of(host.namespace):
        group.mkdir()
    _set_quota(host, host.cores)


def _set_quota(host: Host, cores: float) -> None:
    quota = GROUPS[0] / host.namespace
    (quota / "cpu.cfs_period_us").write_text(str(PERIOD_US))
    # Who stays on a core gets no more than it. A quota of all its time would cost a busy host 6 to 20 % of it, for
    # periods begin late and what was not used by then is gone.
    whole = cores == 1 and host.cores <= 1
    (quota / "cpu.cfs_quota_us").write_text(str(NO_QUOTA if whole else round(cores * PERIOD_US)))


def _carry_out(commands: Sequence[Command]) -> None:
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PlaitError(f"`{' '.join(command)}` failed ({done.stderr.strip()}); see what this kernel lacks")


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}
