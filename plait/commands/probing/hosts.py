"""`plait probe RECIPE --hosts N`: measures all hosts and the roads between them, as a run over them would."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from plait.cluster.catalog import network
from plait.cluster.cluster import cluster_json, cluster_of_hosts
from plait.commands.hosts.invitation import HostsAsked
from plait.commands.hosts.leader_workers import hosts_crew
from plait.commands.plan import asked_of
from plait.commands.planning.output_files import check_output, write_output
from plait.commands.probing.survey import described
from plait.commands.probing.table import table
from plait.errors import RunFailed
from plait.planner.derive.resources import Need
from plait.recipe.load import load_recipe


def probe_hosts(
    recipe: Path, overrides: Sequence[str], *, hosts: HostsAsked, out: Path | None, screen: Console
) -> None:
    """Wait for the other hosts, measure what the recipe's model needs on all at once, tell it, write cluster.json.

    Blocks until all have joined (`plait join`). Raises PlaitError or RunFailed in one sentence.
    """
    check_output(out)
    config = load_recipe(recipe, overrides)
    with hosts_crew(hosts, config=config, folder=Path("runs") / config.run.name, screen=screen) as workers:
        found = workers.hosts()
        asked = asked_of(config, cluster_of_hosts(found, network(1, "machine")))
        precision = "bf16" if asked.workload.precision == "bf16" else "float32"
        need = Need(shape=asked.shape, batch_sequences=asked.workload.batch_sequences, precision=precision)
        cluster = described(workers, found, need, fresh="again")
    if cluster.measured is None:
        raise RunFailed("the probe came to no end; give the same command again")
    screen.print(table(cluster.measured), markup=False, soft_wrap=True)
    if cluster.measured.noise:
        screen.print(f"unsteady {cluster.measured.noise}; close them and give the same command again")
    if out is not None:
        write_output(out, cluster_json(cluster))
        screen.print(f"wrote    {out}", soft_wrap=True)
