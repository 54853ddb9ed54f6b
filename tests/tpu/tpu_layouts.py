"""Several ranks on the device "tpu", each by Google's backend on a processor, compute the oracle's gradients.

Their collectives go through the host's memory by gloo (without_chip/staged_collectives.py); `tpu_dist` needs chips.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from plait.commands.verifying.gradient_check import FLOAT32_TOLERANCES, check_gradients
from plait.commands.verifying.small_model import plan_for_device, shrunk_plan
from plait.launch.local.run import ForkServer
from plait.launch.values.job import Job
from plait.layout import Layout
from plait.model.shape import ModelShape
from plait.recipe.load import parse_config
from plait.workers import CHECK_ENTRY, COMPILER, ENTRIES, ForkedWorkers

CONFIG = parse_config({"data": {"files": "none"}, "run": {"name": "tpu", "devices": "tpu"}})
DENSE = ModelShape(layers=2, width=32, heads=4, kv_heads=2, head_width=8, ffn=64, vocabulary=64, sequence=32)
LAYOUTS: dict[str, tuple[ModelShape, Layout]] = {
    "copies": (DENSE, Layout(replicate=2)),
    "shards": (DENSE, Layout(shard=2)),
    "shards of parameters": (DENSE, Layout(shard=2, shard_what="parameters")),
    "tensor": (DENSE, Layout(tensor=2)),
    "pipeline": (DENSE, Layout(pipeline=2, stage_layers=(1, 1))),
    "context": (DENSE, Layout(context=2)),
}


@pytest.fixture(scope="module")
def workers() -> Iterator[ForkedWorkers]:
    own = {CHECK_ENTRY: "tests.tpu.alone_entries:check_rank", "begin": "tests.tpu.alone_entries:begin"}
    with ForkServer(replace(ENTRIES, functions={**ENTRIES.functions, **own})) as server:
        # torch and torch_tpu take longer to import, where other programs run, than the ranks of a job may to start.
        job = Job(entry="begin", argument="", world_size=1, threads=1, needs=(COMPILER,))
        server.run(job, on_message=lambda message: None, start_s=900)
        yield ForkedWorkers(server)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_computes_what_one_process_computes(name: str, workers: ForkedWorkers) -> None:
    shape, layout = LAYOUTS[name]
    plan = plan_for_device(shrunk_plan(CONFIG, shape, layout), "tpu", "float32")
    verdict = check_gradients(CONFIG, plan, workers, scope="gradients", tolerances=FLOAT32_TOLERANCES)
    assert verdict.ok, "\n".join(f"{one}: {one.error:.1e}" for one in verdict.worst)
    assert verdict.findings
