"""Any layout on two hosts: the bits of one host, with copies in memory, and after a worker's death on either host."""

from __future__ import annotations

import json
import os
import random
import signal

import pytest

from tests.end_to_end.command import ended, wait_while_running
from tests.end_to_end.pair import EVEN, Pair
from tests.end_to_end.test_end_recovery import assert_same_end, done_steps, incidents, is_back

ALONE = ("layout.replicate=1",)
PIPELINE = (*ALONE, "layout.pipeline=2", "balance.every=never")
STAGES = (*PIPELINE, "model.layers=4", "layout.stage_layers=[2, 2]")
"""Named: hosts are measured, and one machine's workers are not, so that each would choose its own."""
LAYOUTS = {
    "parameters": (*ALONE, "layout.shard=2", "layout.shard_what=parameters", *EVEN),
    "tensor": (*ALONE, "layout.tensor=2"),
    "split experts": (*EVEN, "layout.expert=2", "model.experts=4", "model.expert_balance=bias", "model.size=auto"),
    "interleaved": (*PIPELINE, "layout.schedule=interleaved", "layout.virtual_stages=2", "model.layers=4"),
    "heads": (
        *STAGES,
        "model.auxiliary_heads=[1,2]",
        "model.predict_ahead=2",
        "model.tied=false",
        "train.precision=bf16",
    ),
}
"""One of each kind of what a rank holds; tests/trainer/test_memory_copies.py has the copies of other layouts."""


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_hosts_have_the_bits_of_one_and_lose_few_steps_to_a_death(pair: Pair, layout: str) -> None:
    alone, name = f"one-{layout}".replace(" ", "-"), f"two-{layout}".replace(" ", "-")
    whole = pair.lead.train(alone, *LAYOUTS[layout])
    assert whole.code == 0, whole
    lead, guest = pair.start(name, *LAYOUTS[layout], "recover.state_every=3")
    after_step = random.Random(os.getpid()).randrange(5, 30)
    wait_while_running(lambda: done_steps(pair.lead, name) > after_step, lead)
    rank = after_step % 2
    os.kill((pair.other if rank else pair.lead).rank_process(name, rank), signal.SIGKILL)
    first, second = ended(lead), ended(guest)
    assert (first.code, second.code) == (0, 0) and not first.err + second.err, (first, second)
    assert_same_end(pair.lead, name, alone)
    [incident] = [line for line in incidents(pair.lead, name) if "cause" in line]
    assert (incident["rank"], incident["cause"]) == (rank, "killed"), json.dumps(incident)
    assert (incident["host"] is None) == (rank == 0), json.dumps(incident)
    assert incident["from_copies"] and incident["steps_lost"] <= 3 and "kept in memory" in first.out
    pair.assert_nothing_left()


@pytest.mark.slow
def test_copies_of_stages_that_were_cut_anew_are_gone_on_from(pair: Pair) -> None:
    """Each host has copies of the layers that were its own when they were made."""
    lines = [
        {"step": step, "shares": [7], "reason": "as a test wrote", "speeds": [1.0, 2.0], "stage_layers": layers}
        for step, layers in ((10, [3, 1]), (30, [1, 3]))
    ]
    for name in ("moved-alone", "moved"):
        pair.lead.path(name).mkdir(parents=True)
        (pair.lead.path(name) / "shares.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert pair.lead.train("moved-alone", *STAGES).code == 0
    lead, guest = pair.start("moved", *STAGES, "recover.state_every=3")
    for start, after_step, rank in ((2, 15, 1), (3, 40, 0)):
        wait_while_running(lambda step=after_step: done_steps(pair.lead, "moved") > step, lead)
        os.kill((pair.lead, pair.other)[rank].rank_process("moved", rank), signal.SIGKILL)
        wait_while_running(lambda start=start: is_back(pair.lead, "moved", start), lead)
    first, second = ended(lead), ended(guest)
    assert (first.code, second.code) == (0, 0) and not first.err + second.err, (first, second)
    assert_same_end(pair.lead, "moved", "moved-alone")
    found = [line for line in incidents(pair.lead, "moved") if "cause" in line]
    assert [line["from_copies"] for line in found] == [True, True] and "cannot be used" not in first.out
    assert "lack a part" not in first.out, first.out
    pair.assert_nothing_left()
