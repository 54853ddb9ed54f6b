"""The ranks that measure a model's matrix products on the processors of a run; rank 0 sends the rates of all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from plait.checked_json import parse_object
from plait.cluster.core_limits import core_share
from plait.cluster.probe.products import arithmetic_units, measure_product_rates
from plait.cluster.probe.request import ProbedModel
from plait.cluster.probe.timing import ProcessorClock, SingleRank, TimingSetup, WallClock
from plait.cluster.product_rates import ProductRates
from plait.cluster.topology import detect_cpu_machine, usable_cores
from plait.launch.values.job import RankContext
from plait.model.matmul import default_library_name
from plait.model.shape import ModelShape
from plait.parallel.mesh import open_store

MEASURED_S = 0.5
RANK_TIMEOUT = timedelta(minutes=5)
"""Time limit for another rank's rates."""


def run_products_rank(context: RankContext, argument: str) -> None:
    """Entry of each rank; `argument` is a ProbedModel's JSON. Rank 0 sends one "products" message: for each rank the
    values of its ProductRates."""
    torch.set_num_threads(context.threads)
    torch.set_flush_denormal(True)  # as training does
    torch.manual_seed(0)
    model = _model_of(parse_object(argument))
    rates = measure_product_rates(model, arithmetic_units(), _bench(context), seconds=MEASURED_S)
    own = ProductRates(
        machine=detect_cpu_machine().digest(),
        workers=max(context.local_world_size, usable_cores() // context.threads),
        library=default_library_name(),
        rates=rates,
    )
    values = own.to_values()
    if context.world_size == 1:
        context.send("products", ranks=[values])
        return
    store = open_store(context.rendezvous, context.rank, context.world_size)
    store.set_timeout(RANK_TIMEOUT)
    store.set(f"products/{context.rank}", json.dumps(values))
    if context.rank == 0:
        context.send("products", ranks=[_reported(store.get(f"products/{one}")) for one in range(context.world_size)])


def _reported(sent: bytes) -> dict[str, Any]:
    """What another rank reported, an object or nothing: the leader looks at its values."""
    try:
        return parse_object(sent)
    except ValueError:
        return {}


def _bench(context: RankContext) -> TimingSetup:
    """Processor time where a worker has one thread: what other programs take does not count."""
    alone = context.threads == 1
    clock = ProcessorClock(share=core_share(context.local_world_size)) if alone else WallClock(synchronize=lambda: None)
    return TimingSetup(device=torch.device("cpu"), clock=clock, lockstep=SingleRank())


def _model_of(values: Mapping[str, Any]) -> ProbedModel:
    return ProbedModel(**{**values, "shape": ModelShape.from_dict(values["shape"])})
