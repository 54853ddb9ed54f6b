"""A real Slurm on this machine: munged, slurmctld, and a slurmd for each of four nodes, all in one folder."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

NODES = ("n1", "n2", "n3", "n4")
_CONFIGURATION = """
ClusterName=plait
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=30
MinJobAge=3600
SlurmdTimeout=10
InactiveLimit=0
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/accounting.txt
AccountingStorageType=accounting_storage/none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[0]} CPUs=1 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 RealMemory=1000
NodeName=n3 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 RealMemory=1000
NodeName=n4 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[3]} CPUs=1 RealMemory=1000
PartitionName=main Nodes=n[1-4] Default=YES MaxTime=INFINITE State=UP
PartitionName=old Nodes=n[1-2] MaxTime=10 State=UP
PartitionName=new Nodes=n[3-4] MaxTime=INFINITE State=UP
"""


class SlurmCluster:
    """The daemons, started by `start` and ended by `close`; commands are given the configuration by SLURM_CONF."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "state").mkdir(parents=True)
        ports = free_ports(1 + len(NODES))
        host = socket.gethostname().partition(".")[0]
        text = _CONFIGURATION.format(folder=folder, host=host, port=ports[0], ports=ports[1:])
        (folder / "slurm.conf").write_text(text)
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o400)

    @property
    def environment(self) -> dict[str, str]:
        """What Slurm's commands need to find this cluster."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        """Start all daemons; blocks until all nodes are idle."""
        munge = [f"--{what}={self.folder}/munge.{end}" for what, end in MUNGE_FILES]
        self._run("munged", "munged", "--foreground", "--force", *munge)
        wait_for((self.folder / "munge.socket").exists, "munged")
        self._run("slurmctld", "slurmctld", "-D", "-i", "-f", str(self.folder / "slurm.conf"))
        for node in NODES:
            self.start_node(node)
        wait_for(lambda: self.states() == dict.fromkeys(NODES, "idle"), "four idle nodes")

    def start_node(self, node: str) -> None:
        """Start one node's daemon."""
        (self.folder / f"spool-{node}").mkdir(exist_ok=True)
        self._run(node, "slurmd", "-D", "-N", node, "-f", str(self.folder / "slurm.conf"))

    def kill_node(self, node: str) -> None:
        """End a node's daemon at once, with all that it started, as a power cut does."""
        process = self._processes.pop(node)
        process.kill()
        process.wait()
        for pid in started_with(f"SLURMD_NODENAME={node}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill_daemon(self, node: str) -> None:
        """End a node's daemon alone: what it started lives on, as behind a broken network."""
        process = self._processes.pop(node)
        process.kill()
        process.wait()

    def ask(self, *command: str) -> str:
        """What one of Slurm's commands answers."""
        done = subprocess.run(
            command, env={**os.environ, **self.environment}, capture_output=True, text=True, check=False, timeout=60
        )
        return done.stdout + done.stderr

    def states(self) -> dict[str, str]:
        """Each node's state, as sinfo tells it."""
        lines = self.ask("sinfo", "--noheader", "-N", "-p", "main", "-o", "%N %T").splitlines()
        return {line.split()[0]: line.split()[1] for line in lines if line.startswith("n")}

    def job(self, number: str) -> dict[str, str]:
        """A job as the controller tells of it: JobState, Restarts, ExitCode and so on."""
        words = self.ask("scontrol", "show", "job", number).split("\n\n")[0].split()  # the first of several parts
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_job(self, number: str, state: str, within_s: float = 120) -> dict[str, str]:
        """Block until a job is in a state."""
        wait_for(lambda: self.job(number).get("JobState") == state, f"job {number} {state}", within_s, self.explain)
        return self.job(number)

    def explain(self) -> str:
        """For a test's failure: the queue and the controller's last words."""
        log = (self.folder / "slurmctld.log").read_text(errors="replace")[-2000:]
        return f"{self.ask('squeue', '--states', 'all')}\n{self.ask('sinfo')}\n{log}"

    def accounting(self) -> list[dict[str, str]]:
        """Slurm's own accounting: a line each time that a job ended."""
        file = self.folder / "accounting.txt"
        lines = file.read_text().splitlines() if file.exists() else []
        return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]

    def close(self) -> None:
        """End all daemons and what they started: all that was told of this cluster."""
        for pid in started_with(f"SLURM_CONF={self.folder}/slurm.conf"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._processes.values():
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, name: str, *command: str) -> None:
        log = (self.folder / f"{name}.out").open("ab")
        environment = {**os.environ, **self.environment}
        self._processes[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)


MUNGE_FILES: Sequence[tuple[str, str]] = (
    ("key-file", "key"), ("socket", "socket"), ("pid-file", "pid"), ("log-file", "log"), ("seed-file", "seed"),
)  # fmt: skip


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def started_with(variable: str) -> list[int]:
    """All processes but this one that have a variable."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def wait_for(
    fact: Callable[[], bool], what: str, within_s: float = 60, explain: Callable[[], str] = lambda: ""
) -> None:
    """Block until a fact holds; fails with what was awaited."""
    deadline = time.monotonic() + within_s
    while not fact():
        assert time.monotonic() < deadline, f"no {what} within {within_s} s\n{explain()}"
        time.sleep(0.2)
