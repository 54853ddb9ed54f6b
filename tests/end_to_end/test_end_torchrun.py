"""`torchrun -m plait train …` does what plait's own workers do."""

from __future__ import annotations

from collections.abc import Callable

from tests.end_to_end.command import STEPS, Place, ended

TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node")


def test_two_workers_of_torchrun_give_the_same_losses(place: Place, reference: Callable[[int], str]) -> None:
    name = "by-torchrun"
    process = place.start("2", "-m", "plait", "train", "tiny.toml", f"run.name={name}", module=TORCHRUN)
    run = ended(process)
    assert run.code == 0, run
    assert place.numbers(name) == place.numbers(reference(2))
    assert place.manifest(name) == place.manifest(reference(2))
    assert f"{STEPS} steps" in run.out
    place.assert_nobody_left()
