"""What a host is told to run, as values: plait as a user starts it, plait under torchrun, or a baseline."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from benchmarks.lab.hosts import Files
from benchmarks.lab.wiring import Host

PORT = 29400


@dataclass(frozen=True, slots=True, kw_only=True)
class Party:
    """One command for each host, and where the outcome will stand."""

    commands: tuple[tuple[str, ...], ...]
    environments: tuple[Mapping[str, str], ...] = field(repr=False)
    leads: bool
    """Whether the others are started only when the first host listens on PORT."""
    steps_file: Path
    """A JSON object a line; those of a step have `step` and `step_s`."""
    begun_file: Path | None
    """Is there from the moment when workers start, where the party writes such a file."""
    peaks_file: Path | None
    """A JSON object with `peak_tensor_bytes` and `peak_rss_bytes`, one entry a rank, where the party writes one."""


class Runner(Protocol):
    """Turns a recipe into what the hosts run."""

    files: Files

    def party(self, recipe: Path, run: Path, hosts: Sequence[Host]) -> Party:
        """`run` is the run's folder, runs/NAME, which does not exist yet; one host works alone."""
        ...

    def probe(self, recipe: Path, out: Path, hosts: Sequence[Host]) -> Party | None:
        """What measures all hosts for a recipe's model and writes a cluster.json; None where there is no such thing."""
        ...


class JoinedRunner:
    """As a user does on several machines: `plait train … --hosts N` on the first, `plait join` on the others."""

    files: Files = "own"

    def __init__(self, secret: str) -> None:
        self._secret = secret

    def party(self, recipe: Path, run: Path, hosts: Sequence[Host]) -> Party:
        return self._party(("train", str(recipe), "--no-check"), run, hosts)

    def probe(self, recipe: Path, out: Path, hosts: Sequence[Host]) -> Party | None:
        return self._party(("probe", str(recipe), "--out", str(out)), out.parent, hosts)

    def _party(self, asked: Sequence[str], folder: Path, hosts: Sequence[Host]) -> Party:
        first = hosts[0].address
        together = ("--hosts", str(len(hosts)), "--address", first, "--port", str(PORT)) if len(hosts) > 1 else ()
        lead = (sys.executable, "-m", "plait", *asked, *together)
        join = (sys.executable, "-m", "plait", "join", f"{first}:{PORT}")
        return Party(
            commands=(lead, *(join for _ in hosts[1:])),
            environments=tuple({"PLAIT_SECRET": self._secret} for _ in hosts),
            leads=len(hosts) > 1,
            steps_file=folder / "metrics.jsonl",
            begun_file=folder / "plan.json",
            peaks_file=folder / "so-far.json",
        )


class TorchrunRunner:
    """By torchrun, which plait knows too; the hosts must share their files."""

    files: Files = "shared"

    def probe(self, recipe: Path, out: Path, hosts: Sequence[Host]) -> Party | None:
        return None

    def party(self, recipe: Path, run: Path, hosts: Sequence[Host]) -> Party:
        meeting = ("--master-addr", hosts[0].address, "--master-port", str(PORT))
        return Party(
            commands=tuple(
                (
                    sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(hosts)),
                    "--node-rank", str(host.index), "--nproc-per-node", "1", *meeting,
                    "-m", "plait", "train", str(recipe), "--no-check",
                )
                for host in hosts
            ),
            environments=tuple({"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"} for _ in hosts),
            leads=False,
            steps_file=run / "metrics.jsonl",
            begun_file=run / "plan.json",
            peaks_file=run / "so-far.json",
        )  # fmt: skip


def baseline_party(kind: str, work: Mapping[str, object], run: Path, hosts: Sequence[Host]) -> Party:
    """A baseline's ranks, one a host; the first writes `steps.jsonl` into the run's folder."""
    steps_file = run / "steps.jsonl"
    order = json.dumps({**work, "steps_file": str(steps_file)})
    command = (sys.executable, "-m", f"benchmarks.lab.baselines.{kind.replace('-', '_')}", order)
    shared = {
        "WORLD_SIZE": str(len(hosts)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return Party(
        commands=tuple(command for _ in hosts),
        environments=tuple({**shared, "RANK": str(host.index)} for host in hosts),
        leads=False,
        steps_file=steps_file,
        begun_file=None,
        peaks_file=None,
    )
