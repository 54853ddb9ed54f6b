"""Prices cases with the planner's model: rows of the same work on the same machines together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.published.cells import Row
from benchmarks.published.memory_fit import cannot_fit
from benchmarks.published.reading import Case, case_of
from plait.errors import PlaitError
from plait.planner.memory.estimate import estimate_memory
from plait.planner.problem.candidates import Candidates
from plait.planner.step_time.cost_inputs import CostInputs
from plait.planner.step_time.step_time import estimate_step_time


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A case with what the model says of it."""

    case: Case
    step_s: float
    """Predicted by the stack as it stands, nothing fitted to the source."""
    allocated_bytes: float
    reserved_bytes: float
    fits: bool

    @property
    def memory_bytes(self) -> float:
        """The prediction of the kind of reading that the source gives."""
        return self.allocated_bytes if self.case.reading == "allocated" else self.reserved_bytes


def cases_of(rows: Iterable[Row]) -> tuple[list[Case], dict[str, str]]:
    """The rows as cases, and the reasons of those that could not be read, by id."""
    cases: list[Case] = []
    unread: dict[str, str] = {}
    for row in rows:
        try:
            cases.append(case_of(row))
        except (PlaitError, ArithmeticError, KeyError, ValueError) as error:
            unread[row["id"]] = f"{type(error).__name__}: {error}"
    return cases, unread


def price(cases: Sequence[Case]) -> list[Priced]:
    """Every case priced, in the order given."""
    together: dict[Any, list[Case]] = defaultdict(list)
    for case in cases:
        islands = tuple((i.device.name, i.per_node, i.nodes) for i in case.cluster.islands)
        together[case.workload, case.profile, islands, case.cluster.between].append(case)
    priced: dict[str, Priced] = {}
    for group in together.values():
        candidates = Candidates.from_rows([case.knobs for case in group])
        first = group[0]
        inputs = CostInputs(
            workload=first.workload, cluster=first.cluster, candidates=candidates, profile=first.profile
        )
        times = estimate_step_time(inputs).step_s
        needs = estimate_memory(first.workload, candidates, first.profile)
        refused = cannot_fit(needs, first.cluster)
        for index, case in enumerate(group):
            priced[case.id] = Priced(
                case=case,
                step_s=float(times[index]),
                allocated_bytes=float(needs.allocated[index]),
                reserved_bytes=float(needs.reserved[index]),
                fits=not refused[index],
            )
    return [priced[case.id] for case in cases]
