"""`plait probe --check`: the verdict in words, for machines that are ready and for some that are not."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from plait.commands.probe import parse_check
from plait.errors import RunFailed
from plait.machines.measured import MessageTiming
from plait.probing.answer import PairTiming, ProbedHost
from plait.probing.check import HostState, MachineCheck, check_faults, check_text
from plait.screen.screen import wrapped

GOLDEN = Path(__file__).parents[1] / "golden"
STATE = HostState(
    device="a laptop's processor",
    memory_bytes=16 * 2**30,
    free_memory_bytes=9 * 2**30,
    free_disk_bytes=80 * 2**30,
    python="3.12.1",
    torch="2.13.0",
    plait="0.1.0",
)


def timed(first: int, second: int, seconds: float) -> PairTiming:
    points = (
        MessageTiming(bytes=2**10, seconds=seconds / 100, spread=0.0, cpu_s=0.0),
        MessageTiming(bytes=2**24, seconds=seconds, spread=0.0, cpu_s=0.0),
    )
    return PairTiming(first=first, second=second, points=points)


READY = MachineCheck(
    hosts=(ProbedHost(name="ada", ranks=(0, 1)),),
    states=(STATE,),
    pairs=(timed(0, 1, 0.005),),
    sum_bytes=2**24,
    sum_s=0.02,
    sum_error=0.0,
)
BROKEN = replace(
    READY,
    hosts=(*READY.hosts, ProbedHost(name="bob", ranks=(2,))),
    states=(STATE, replace(STATE, torch="2.12.0", free_memory_bytes=2**28, free_disk_bytes=2**20)),
    pairs=(*READY.pairs, timed(0, 2, 0.5)),
    sum_error=1.0,
)


@pytest.mark.parametrize(("name", "found"), [("ready", READY), ("not-ready", BROKEN)])
def test_a_check_reads_like_this_in_80_columns(name: str, found: MachineCheck) -> None:
    text, golden = wrapped(check_text(found), 80) + "\n", GOLDEN / f"screen-check-{name}.txt"
    assert max(map(len, text.splitlines())) <= 80
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text(), f"{golden} says otherwise; if the new text is right, write it by UPDATE_GOLDEN=1"


def test_each_thing_that_is_wrong_has_a_sentence_with_its_mend() -> None:
    assert check_faults(READY) == ()
    faults = check_faults(BROKEN)
    assert [next(word for word in ("sum", "memory", "disk", "torch") if word in fault) for fault in faults] == [
        *("sum", "memory", "disk", "torch")
    ]
    assert all("; " in fault for fault in faults)


def test_a_slow_link_is_named_and_keeps_nobody_from_training() -> None:
    slow = replace(
        READY, pairs=(timed(0, 1, 0.005), timed(1, 2, 0.5)), hosts=(ProbedHost(name="ada", ranks=(0, 1, 2)),)
    )
    text = check_text(slow)
    assert "slow     between worker 1 on ada and worker 2 on ada" in text
    assert text.endswith("verdict  ready to train, though a slow link will cost time")


def test_a_result_comes_back_from_json_or_is_refused() -> None:
    assert parse_check(json.loads(json.dumps(asdict(READY)))) == READY
    with pytest.raises(RunFailed, match="not usable"):
        parse_check(json.loads(json.dumps(asdict(READY) | {"sum_s": "soon"})))
