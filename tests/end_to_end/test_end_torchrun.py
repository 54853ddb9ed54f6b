"""`torchrun -m plait train …` does what plait's own workers do, and so does any launcher with the same variables."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Mapping

import pytest

from tests.end_to_end.command import STEPS, Place, ended, wait_while_running
from tests.launch.processes import wait_until

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
    assert "the launcher started 2 workers and the layout needs 3; start 3 (torchrun: --nproc-per-node)" in run.err
    place.assert_nobody_left()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_by_hand(place: Place, name: str, ranks: Mapping[int, Mapping[str, str]]) -> list[subprocess.Popen[str]]:
    """A process for each rank, with torch.distributed's variables and nothing else of a launcher."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    arguments = ("train", "tiny.toml", f"run.name={name}")
    return [place.start(*arguments, environment={**meeting, "RANK": str(rank), **more}) for rank, more in ranks.items()]


@pytest.mark.slow
@pytest.mark.parametrize("says", ["no LOCAL_WORLD_SIZE", "no LOCAL_RANK"])
def test_two_processes_with_the_variables_give_the_same_bits(
    place: Place, reference: Callable[[int], str], says: str
) -> None:
    """As mpirun's, Ray's and an operator's workers have them, the second one before the first."""
    name = f"by-hand-{says.replace(' ', '-').lower()}"
    local: dict[str, dict[int, dict[str, str]]] = {
        "no LOCAL_WORLD_SIZE": {rank: {"LOCAL_RANK": str(rank)} for rank in (1, 0)},
        "no LOCAL_RANK": {1: {}, 0: {}},
    }
    runs = [ended(process) for process in start_by_hand(place, name, local[says])]
    assert [run.code for run in runs] == [0, 0], runs
    assert [run.err for run in runs] == ["", ""]
    assert place.numbers(name) == place.numbers(reference(2))
    assert place.manifest(name) == place.manifest(reference(2))
    place.assert_nobody_left()
    if says == "no LOCAL_RANK":
        return
    again = [ended(process) for process in start_by_hand(place, name, local[says])]
    assert [run.code for run in again] == [0, 0] and "is finished" in again[1].out


@pytest.mark.slow
def test_torchrun_that_keeps_its_store_to_itself_gives_the_same_bits(
    place: Place, reference: Callable[[int], str]
) -> None:
    name = "torchrun-own-store"
    process = place.start(
        "-m", "plait", "train", "tiny.toml", f"run.name={name}", module=TORCHRUN,
        environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )  # fmt: skip
    run = ended(process)
    assert run.code == 0, run
    assert place.numbers(name) == place.numbers(reference(2))
    assert place.manifest(name) == place.manifest(reference(2))
    place.assert_nobody_left()


@pytest.mark.slow
def test_variables_that_contradict_each_other_are_one_sentence(place: Place) -> None:
    alone = ended(place.start("train", "tiny.toml", environment={"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}))
    assert alone.code == 2 and "MASTER_ADDR and MASTER_PORT are not: set RANK, WORLD_SIZE, " in alone.sentence()
    first, second = start_by_hand(place, "twins", {0: {}, 1: {"RANK": "0"}})
    wait_until(lambda: first.poll() is not None or second.poll() is not None, within_s=60)
    for twin in (first, second):  # whichever listened first waits for RANK = 1, and can be stopped
        twin.terminate()
    told = [ended(twin) for twin in (first, second)]
    assert [run.code for run in told] == [2, 2], told
    assert sorted(run.sentence().partition(" within")[0] for run in told)[0] == "RANK = 1 has not come"
    assert any("another program has that port; set another MASTER_PORT" in run.sentence() for run in told)
    sizes = [ended(each) for each in start_by_hand(place, "sizes", {0: {}, 1: {"WORLD_SIZE": "3"}})]
    assert [run.code for run in sizes] == [2, 2]
    assert sizes[0].sentence() == "WORLD_SIZE is 3 for RANK = 1 and 2 for RANK = 0; give all the same"
    place.assert_nobody_left()


@pytest.mark.slow
def test_where_rank_0_fails_the_others_end_with_it(place: Place) -> None:
    (place.folder / "tiny.toml").write_text("[data]\nfiles = 5\n")
    runs = [ended(each) for each in start_by_hand(place, "fails", {1: {}, 0: {}})]
    assert [run.code for run in runs] == [2, 2]
    assert runs[0].sentence() == "rank 0 is gone; see what it said"
