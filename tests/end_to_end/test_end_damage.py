"""Prepared data that are damaged while a run uses them, and before the next command."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.command import Place, ended
from tests.end_to_end.conftest import RunWarm


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    with file.open("r+b") as same:
        same.write(content)


@pytest.mark.slow
def test_damage_ends_a_run_and_is_refused_by_the_next_commands(tmp_path: Path, run_warm: RunWarm) -> None:
    place = Place(tmp_path / "work")
    training = place.start_training("hurt", "train.budget=1000000 steps")
    assert training.stdout
    while not training.stdout.readline().startswith("data"):  # compared with its hashes just before
        assert training.poll() is None
    (shard,) = place.folder.glob(".plait/data/*/train-00000.bin")
    flip_a_bit(shard)
    run = ended(training)
    assert run.code == 1
    assert "are damaged (train-00000.bin is not what was written); delete that folder and run" in run.sentence()
    place.assert_nobody_left()

    for command in (("train", "tiny.toml", "run.name=hurt", "train.budget=1000000 steps"), ("data", "tiny.toml")):
        refused = run_warm(place, *command)
        assert refused.code == 2
        assert "(train-00000.bin is not what was written)" in refused.sentence()
