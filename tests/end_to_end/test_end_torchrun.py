"""`torchrun -m plait train …` does what plait's own workers do."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from tests.end_to_end.command import STEPS, Place, ended, wait_while_running

TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


def start(place: Place, name: str, *overrides: str) -> subprocess.Popen[str]:
    return place.start("-m", "plait", "train", "tiny.toml", f"run.name={name}", *overrides, module=TORCHRUN)


def test_two_workers_of_torchrun_give_the_same_bits(place: Place, reference: Callable[[int], str]) -> None:
    name = "by-torchrun"
    run = ended(start(place, name))
    assert run.code == 0, run
    assert place.numbers(name) == place.numbers(reference(2))
    assert place.manifest(name) == place.manifest(reference(2))
    assert f"{STEPS} steps" in run.out
    place.assert_nobody_left()
    again = ended(start(place, name), within_s=60)
    assert again.code == 0 and "is finished" in again.out
    place.assert_nobody_left()


@pytest.mark.slow
def test_torchrun_stopped_by_a_signal_saves_and_goes_on(place: Place, reference: Callable[[int], str]) -> None:
    name = "torchrun-stopped"
    process = start(place, name)
    wait_while_running(lambda: bool(place.checkpoints(name)), process)
    process.terminate()
    assert ended(process).code != 0
    place.assert_nobody_left()
    assert place.checkpoints(name)[-1] < STEPS and place.lines(name)[-1]["step"] == place.checkpoints(name)[-1]
    assert ended(start(place, name)).code == 0
    assert place.numbers(name) == place.numbers(reference(2))
    assert place.manifest(name) == place.manifest(reference(2))


@pytest.mark.slow
def test_a_layout_that_torchrun_did_not_start_is_refused(place: Place) -> None:
    run = ended(start(place, "torchrun-three", "layout.replicate=3"))
    assert run.code != 0
    assert "torchrun started 2 workers and the layout needs 3; start torchrun with --nproc-per-node 3" in run.err
    place.assert_nobody_left()
