"""`plait probe --hosts`: measures several hosts and the links between them, for one recipe's model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from plait.cluster.catalog import link_at_rate
from plait.cluster.machine_cluster import cluster_of_hosts
from plait.commands.hosts.invitation import HostsRequest
from plait.commands.hosts.members.invited import leader_workers
from plait.commands.planning.arithmetic import TIMING_PRODUCTS, new_with_arithmetic
from plait.commands.planning.output_files import check_output_file
from plait.commands.preparing.usual_corpus import corpus_facts_or_usual
from plait.commands.probing.ending import end_probe
from plait.commands.probing.survey import probe_cluster
from plait.errors import RunFailed
from plait.planner.derive.compile_mode import compile_of
from plait.planner.derive.resources import ProbeNeed, on_paper
from plait.planner.resolve.request import request_of
from plait.recipe.load import load_recipe
from plait.screen.screen import Screen


def probe_hosts(
    recipe: Path, overrides: Sequence[str], *, hosts: HostsRequest, out: Path | None, screen: Screen
) -> None:
    """Wait for the other hosts, measure on all of them at once what the recipe's model needs, print it, write
    cluster.json.

    Blocks until all have joined (`plait join`). Raises PlaitError or RunFailed in one sentence.
    """
    check_output_file(out)
    config = load_recipe(recipe, overrides)
    with leader_workers(hosts, config=config, folder=Path("runs") / config.run.name, log=screen.print) as workers:
        found = workers.host_machines()
        corpus, _ = corpus_facts_or_usual(config)
        seen = on_paper(cluster_of_hosts(found, link_at_rate(1, "machine")))
        request = request_of(config, corpus, seen)
        with screen.progress() as show:
            show(0, 0, TIMING_PRODUCTS)
            resources = replace(seen, fixed_workers=workers.fixed_workers)
            arithmetic = new_with_arithmetic(config, corpus, resources, workers, rates="again").arithmetic
        need = ProbeNeed(
            shape=request.job.shape,
            batch_sequences=request.job.batch_sequences,
            precision=request.arithmetic.precision,
            compile=compile_of(config, [machine for machine, _, _ in found], []),
        )
        if arithmetic:
            need = replace(need, matmul_backend=arithmetic.backend, host_backends=arithmetic.host_backends)
        with screen.progress() as show:
            cluster = probe_cluster(workers, found, need, fresh="again", show=show)
    if cluster.measured is None:
        raise RunFailed("the probe ended without measurements; give the same command again")
    end_probe(cluster, out, screen, "the same command again")
