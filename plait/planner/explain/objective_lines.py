"""What heads in the middle and prediction ahead cost, and in which order a pipeline needs its passes for them: in
sentences."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from plait.planner.problem.candidates import SCHEDULES
from plait.planner.problem.stage_partition import stages_of
from plait.planner.search.found import Search
from plait.planner.search.layout_cost import bytes_of, step_seconds
from plait.units import counted, format_bytes, format_duration, slower_text

NEEDED_FOR = (
    "all-forward-all-backward is needed only for a loss whose first gradient has to know the whole step (a contrastive "
    "one over the batch), and none of these does"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderPrice:
    """One order of passes in an otherwise equal layout."""

    step_s: float
    bytes_per_device: float


def objective_lines(found: Search) -> list[str]:
    """What auxiliary objectives add to a step, and whether their losses need all forward passes before the first
    backward pass; empty where there are none."""
    w = found.workload
    if w.heads_in_all == 1:
        return []
    plain = replace(w, heads_after=(), predict_ahead=0)
    more = w.flops_per_token("causal") / plain.flops_per_token("causal") - 1
    parts = [f"heads after {' and '.join(map(str, w.heads_after))} layers"] if w.heads_after else []
    parts += [f"{counted(w.predict_ahead, 'token')} predicted further"] if w.predict_ahead else []
    lines = [f"{' and '.join(parts)} add {more:.0%} to the arithmetic of a step, and nothing to sampling"]
    if int(found.candidates.pipeline[found.chosen]) == 1:
        together = "without a pipeline each micro-batch goes backward right after its forward pass, heads and all"
        return [*lines, f"{together}; {NEEDED_FOR}"]
    return [*lines, _order_line(found)]


def order_prices(found: Search) -> dict[str, OrderPrice]:
    """The chosen pipeline with one stage a rank, by "1f1b" and by "gpipe" (all forward, then all backward)."""
    one = found.candidates.select(np.array([found.chosen]))
    stages = int(one.pipeline[0])
    split = one.layer_split if isinstance(one.layer_split, str) or len(one.layer_split) == stages else "balanced"
    prices = {}
    for name in ("1f1b", "gpipe"):
        other = replace(
            one, schedule=np.array([SCHEDULES.index(name)]), virtual=np.ones(1, dtype=np.int64), layer_split=split
        )
        inputs = found.cost_inputs.with_candidates(other)
        prices[name] = OrderPrice(
            step_s=float(step_seconds(inputs)[0]),
            bytes_per_device=float(bytes_of(inputs.workload, other, inputs.profile)[0]),
        )
    return prices


def _order_line(found: Search) -> str:
    prices, stages = order_prices(found), int(found.candidates.pipeline[found.chosen])
    one, all_forward = prices["1f1b"], prices["gpipe"]
    split = " + ".join(map(str, stages_of(found.workload, stages, "balanced")))
    texts = [
        f"{format_duration(price.step_s)} a step and {format_bytes(price.bytes_per_device)} on the fullest device"
        for price in (one, all_forward)
    ]
    room = found.capacity_bytes(found.chosen)
    verdict = _verdict(one, all_forward, room)
    return (
        f"each head's loss is computed in its own stage's backward pass and waits for no other stage, so 1F1B carries "
        f"all of them (balanced with them, {stages} stages have {split} layers): {texts[0]}; all forward, then all "
        f"backward (gpipe) {texts[1]}, {verdict}; {NEEDED_FOR}"
    )


def _verdict(one: OrderPrice, all_forward: OrderPrice, room: float) -> str:
    """Which of the two orders to take on this machine, and why."""
    if all_forward.bytes_per_device > room:
        return "more than there is, for it keeps every micro-batch of the step"
    if all_forward.step_s < one.step_s * (1 - 0.005):
        return f"{1 - all_forward.step_s / one.step_s:.1%} faster here, where links are slow and memory is there"
    slower = slower_text(all_forward.step_s / one.step_s) if all_forward.step_s > one.step_s * 1.005 else "no faster"
    return f"{slower}, and it keeps every micro-batch of the step in memory"
