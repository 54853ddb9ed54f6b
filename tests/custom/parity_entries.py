"""What ranks do to prove that a spread program's gradients are those of one plain process."""

from __future__ import annotations

import copy
import json
import os
from typing import Any

import torch
from torch.utils.data import default_collate

from plait.custom.process.launcher import RENDEZVOUS
from plait.custom.spread import spread
from plait.launch.values.job import RankContext
from tests.custom.models import CASES, Case


def compare_gradients(context: RankContext, argument: str) -> None:
    """For each case and way: a step of all ranks, and the largest error against one process, told by rank 0."""
    asked = json.loads(argument)
    os.environ[RENDEZVOUS] = context.rendezvous
    torch.set_default_dtype(torch.float64)
    for name in asked["cases"]:
        for way in asked["ways"]:
            torch.manual_seed(3)
            case = CASES[name]()
            case.model.double()
            if way["layout"] in case.refused:
                continue
            expected, loss = _alone(case)
            if context.rank:
                with torch.no_grad():  # the first rank's weights are to be taken
                    for parameter in case.model.parameters():
                        parameter.mul_(0.5)
            told = _spread(case, way, expected, loss)
            if context.rank == 0:
                context.send("found", case=name, way=way, **told)


def _spread(case: Case, way: dict[str, Any], expected: dict[str, torch.Tensor], loss: float) -> dict[str, Any]:
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.0)
    run = spread(
        case.model, optimizer, loss_sum=case.loss_sum, layout=way["layout"], accumulate=way["accumulate"],
        bucket_mib=way.get("bucket_mib", 8.0), recompute=way.get("recompute", "none"),
    )  # fmt: skip
    error = 0.0
    # The first step's sums begin after backward, later ones within it.
    for batch in run.batches(case.data, batch=len(case.data), shares=way["shares"], order="given", epochs=2):
        found = float(run.step(batch))
        gradients = run.gradients()
        assert set(gradients) == set(expected), set(gradients) ^ set(expected)
        error = max([error, abs(found - loss), *(_error(gradients[name], expected[name]) for name in expected)])
    return {"error": error}


def _alone(case: Case) -> tuple[dict[str, torch.Tensor], float]:
    """The gradients of the mean loss over all data, by plain torch in this process."""
    model = copy.deepcopy(case.model)
    total, count = case.loss_sum(model, default_collate(case.data))
    (total / count).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found, float(total.detach() / count)


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-3))
