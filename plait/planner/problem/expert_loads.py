"""How unequal the loads of experts are: what is assumed where no run has measured it, and what a rank gets of it.

Note [a rank's load] A run measures the busiest expert's tokens over the mean (expert_load_max in metrics.jsonl). A rank
that holds n of E experts gets their sum, in which what exceeds the mean partly cancels: as for a sample of n out of E,
its excess is sqrt((E - n) / (n (E - 1))) of one expert's. With all experts on a rank it is 0: each rank then computes
its own tokens alone, wherever these go.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from plait.model.parts.mixture import MixtureShape
from plait.planner.calibration.constants import constant, constant_fields
from plait.planner.problem.candidates import Candidates, Reals
from plait.planner.problem.workload import Workload

BalancedBy = Literal["bias", "loss", "nothing"]
ASSUMED_LOADS = constant_fields("assumed_expert_loads")
EARLY_LOAD = constant("early_expert_load")
"""Tokens of the busiest expert over the mean in the first steps of a run, when routers have learned nothing."""


def balanced_by(mixture: MixtureShape) -> BalancedBy:
    """The method that balances a mixture's experts."""
    return "bias" if mixture.has_bias else "loss" if mixture.balance else "nothing"


def assumed_load(mixture: MixtureShape) -> float:
    """Tokens of a layer's busiest expert over the mean, where no run has measured them."""
    return ASSUMED_LOADS[balanced_by(mixture)]


def busiest_rank_load(w: Workload, c: Candidates, load: float | None = None) -> Reals:
    """Tokens that come to the experts of a group's busiest rank, over the mean of the group: 1 where each rank has all
    experts; see Note [a rank's load]. `load` is the busiest expert's, by default the workload's."""
    load = w.expert_load if load is None else load
    if not w.experts or load <= 1:
        return np.ones(len(c))
    held = w.experts / c.expert
    excess = (load - 1) * np.sqrt(np.maximum(w.experts - held, 0.0) / (held * max(w.experts - 1, 1)))
    # At most all tokens of the group: those for which all experts of a token lie on one rank.
    most = c.expert * np.minimum(held / w.experts_per_token, 1.0)
    return np.minimum(1 + excess, np.maximum(most, 1.0))
