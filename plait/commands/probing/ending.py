"""The end of a probe on the screen."""

from __future__ import annotations

from pathlib import Path

from plait.cluster.cluster import Cluster, cluster_json
from plait.commands.planning.output_files import write_output_file
from plait.screen.screen import Screen


def end_probe(cluster: Cluster, out: Path | None, screen: Screen, again: str) -> None:
    """Print what was measured, and write it to `out` where that is asked for; the command `again` measures anew."""
    screen.print(str(cluster))
    if warning := unsteady_text(cluster, again):
        screen.print(warning)
    if out is not None:
        write_output_file(out, cluster_json(cluster))
        screen.print(f"wrote    {out}")


def unsteady_text(cluster: Cluster, again: str) -> str:
    """Why its figures are not to be trusted, with the command that measures anew; empty where they are steady."""
    noise = cluster.measured.noise_warning if cluster.measured else ""
    return f"unsteady {noise}; close them and give {again}" if noise else ""
