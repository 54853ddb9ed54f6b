"""A plan's remarks on Muon: the cost of its update on the chosen layout, and the memory that it saves."""

from __future__ import annotations

from dataclasses import replace

from plait.planner.search.found import Search
from plait.planner.step_time.orthogonalization import orthogonalization_time
from plait.units import format_bytes, format_duration

MEASURED_GAIN = (
    "Muon ends with 1 to 3% less held-out loss than AdamW after as many tokens; measured with models below 1M "
    "parameters (docs/speed.md)"
)
WHO_COMPUTES = {
    "one for all": "one device orthogonalizes each matrix for all that hold a part or a copy of it",
    "each for itself": "each copy of a matrix is orthogonalized where it is, which costs less than sending the result",
}


def muon_lines(found: Search) -> list[str]:
    """Muon's gain, and its time and memory compared with AdamW's; nothing if Muon is not used."""
    if found.workload.orthogonalization is None:
        return []
    times = orthogonalization_time(found.cost_inputs)
    spent_s, step_s = float(times.step_s[found.chosen]), found.chosen_step_s
    where = f"; {WHO_COMPUTES[times.copies_compute(found.chosen)]}" if found.cluster.n_devices > 1 else ""
    adamw = replace(found, workload=replace(found.workload, orthogonalization=None))
    own, usual = (float(one.memory(found.chosen).optimizer[0]) for one in (found, adamw))
    return [
        MEASURED_GAIN,
        f"Muon's products and messages take {format_duration(spent_s)}, {spent_s / step_s:.1%} of a step{where}",
        f"optimizer state takes {format_bytes(own)} a device, where AdamW's would take {format_bytes(usual)}: Muon "
        "keeps one number beside each weight of a matrix, AdamW two",
    ]
