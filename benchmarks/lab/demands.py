"""What the lab demands of the planner and of the engine, each beside what was reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.lab.grid import rate_text
from benchmarks.lab.report import Summary, Verdict
from benchmarks.lab.wiring import Rate

FLOORS: dict[Rate, float] = {"unshaped": 0.15, 1e10: 0.15, 1e9: 0.15, 1e8: 0.40}
"""By cable: how much longer than its floor a step may take, between two hosts."""
SPREADS: tuple[tuple[str, str, float, float], ...] = (
    ("regret of the predicted fastest", "regret", 0.01, 0.05),
    ("price paid for simplicity", "simplicity_paid", 0.03, 0.07),
    ("step time forecast", "step_error", 0.10, 0.20),
)
"""(What, field of the summary, median at most, 90th percentile at most)."""
WORSTS: tuple[tuple[str, str, float], ...] = (
    ("price of simplicity beyond what was said", "simplicity_over_said", 0.03),
    ("tensors' memory forecast, models of 10 million parameters and more", "memory_error", 0.05),
    ("processes' memory forecast", "process_error", 0.15),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A bar: `reached` may be `most` at most."""

    what: str
    most: float
    reached: float

    @property
    def met(self) -> bool:
        return self.reached <= self.most


def demands(whole: Summary, verdicts: Sequence[Verdict]) -> list[Demand]:
    """All that these cases can tell about."""
    found: list[Demand] = []
    for what, name, middle, ninth in SPREADS:
        if spread := getattr(whole, name):
            found.append(Demand(what=f"{what}, median", most=middle, reached=spread[0]))
            found.append(Demand(what=f"{what}, 90th percentile", most=ninth, reached=spread[1]))
    for what, name, most in WORSTS:
        if spread := getattr(whole, name):
            found.append(Demand(what=f"{what}, worst", most=most, reached=spread[2]))
    if whole.step_bias is not None:
        found.append(Demand(what="bias of step time forecasts, median", most=0.03, reached=abs(whole.step_bias)))
    for rate, most in FLOORS.items():
        here = [one.over_floor for one in verdicts if one.hosts == 2 and one.rate == rate]
        if over := [share for share in here if share is not None]:
            found.append(Demand(what=f"over the floor at {rate_text(rate)}, worst", most=most, reached=max(over)))
    if whole.baseline_ratio_least is not None:
        found.append(Demand(what="the choice over the best baseline", most=1.0, reached=1 / whole.baseline_ratio_least))
    return found


def demands_text(found: Sequence[Demand]) -> str:
    """As a Markdown table."""
    rows = ["| demanded | at most | reached | |", "| --- | --- | --- | --- |"]
    rows += [f"| {one.what} | {one.most:.1%} | {one.reached:.1%} | {'' if one.met else 'missed'} |" for one in found]
    return "\n".join(rows)
