"""The hosts of a case as plait's own probe sees them: what the forecast of the case is made from."""

from __future__ import annotations

from pathlib import Path

from benchmarks.lab.checks import until
from benchmarks.lab.forecast import recipe_text
from benchmarks.lab.grid import Case
from benchmarks.lab.hosts import Lab
from benchmarks.lab.orders import Runner
from benchmarks.lab.turns import last_words, start_party
from plait.errors import PlaitError
from plait.machines.cluster import Cluster, read_cluster

PROBE_WITHIN_S = 240.0


def probed_cluster(
    lab: Lab, runner: Runner, case: Case, work: Path, *, within_s: float = PROBE_WITHIN_S
) -> Cluster | None:
    """What `plait probe RECIPE --hosts N --out FILE` finds on the case's hosts; None where the runner has no way to.

    Raises PlaitError where the probe fails.
    """
    recipe, out, logs = work / "recipes" / "probe.toml", work / "cluster.json", work / "logs" / "probe"
    recipe.write_text(recipe_text(case, {}, name="probe", steps=1))
    party = runner.probe(recipe, out, lab.hosts)
    if party is None:
        return None
    logs.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    try:
        started = start_party(lab, party, logs)
        until(lambda: started[0].poll() is not None, "plait probe ends", within_s)
    finally:
        lab.end_commands()
    if not out.exists():
        raise PlaitError(f"the probe wrote nothing: {last_words(logs)}")
    return read_cluster(out)
