"""A run that is not finished, as somebody else could hand it on: its plan and its checkpoint tell of what is not there,
and its names hold signs that a terminal obeys. Nothing is allocated, begun or obeyed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plait.checkpoint.manifest import MANIFEST, manifest_text, parse_manifest
from plait.commands.runs import Run, runs
from tests.end_to_end.command import Place
from tests.fuzz.conftest import Outcome
from tests.fuzz.test_fuzz_files import SAMPLE, TRAIN, assert_sound
from tests.fuzz.test_fuzz_resealed import resealed

SIGN = "\x1b]0;owned\x07"
HUGE = 9_000_000
STARTS_S = 60.0
"""A run that goes on looks at the machine, in a process of its own."""


@pytest.fixture
def run_folder(finished: Place) -> Iterator[Path]:
    """The folder of the run `fuzzed`, all of which is as it was afterwards."""
    folder = finished.folder / "runs" / "fuzzed"
    kept = finished.folder / "kept"
    shutil.copytree(folder, kept)
    yield folder
    shutil.rmtree(folder)
    kept.rename(folder)


@pytest.fixture
def unfinished(run_folder: Path) -> Path:
    """The same without its receipt: training would go on."""
    (run_folder / "receipt.json").unlink()
    return run_folder


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a file's values, and make its hash again."""
    values = json.loads(path.read_bytes())
    change(values)
    path.write_bytes(resealed(json.dumps(values).encode(), path.name))


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: plan["job"]["shape"].update(layers=10**12),
        lambda plan: plan["job"].update(batch_sequences=-7),
        lambda plan: plan["placement"]["layout"].update(replicate=2**40),
        lambda plan: plan["job"]["optimizer"].update(betas=[0.9, 7.0]),
    ],
    ids=["layers", "batch", "ranks", "betas"],
)
def test_no_worker_starts_by_a_plan_that_cannot_be(
    change: Callable[[dict[str, Any]], object], unfinished: Path, plait: Callable[..., Outcome]
) -> None:
    edit(unfinished / "plan.json", change)
    for command in (TRAIN, SAMPLE, ("eval", "fuzzed"), ("export", "fuzzed", "--to", "out")):
        told = plait(*command)
        assert_sound(told, " ".join(command))
        assert told.code == 2, told


def test_a_model_whose_numbers_are_not_there_takes_no_memory(unfinished: Path, plait: Callable[..., Outcome]) -> None:
    """Plan and manifest agree on a table of gigabytes, of which the checkpoint has some rows."""
    edit(unfinished / "plan.json", lambda plan: plan["job"]["shape"].update(vocabulary=HUGE))
    [path] = unfinished.glob(f"checkpoints/step-*/{MANIFEST}")
    manifest = parse_manifest(path.read_bytes())
    told_of = {**manifest.model, "vocabulary": HUGE}
    path.write_text(manifest_text(type(manifest)(step=4, cursor=manifest.cursor, model=told_of, parts=manifest.parts)))
    for command in (TRAIN, SAMPLE, ("export", "fuzzed", "--to", "out")):
        told = plait(*command)
        assert_sound(told, " ".join(command), STARTS_S)
        assert told.code == 2 and "embed.tokens.weight has 300 × 32 numbers" in told.err, told


def test_signs_that_a_terminal_obeys_are_not_printed(run_folder: Path, plait: Callable[..., Outcome]) -> None:
    edit(run_folder / "plan.json", lambda plan: plan.update(reasons=[f"warning: look {SIGN}here"]))
    told = plait(*TRAIN, "--why")
    assert_sound(told, "train")
    assert told.code == 0 and "look ]0;ownedhere" in told.out and "\x1b" not in told.out + told.err


def test_a_folder_with_such_a_name_is_no_run(unfinished: Path, finished: Place, plait: Callable[..., Outcome]) -> None:
    planted = unfinished.with_name(f"a{SIGN}")
    shutil.copytree(unfinished, planted)
    try:
        assert [run.name for run in runs(folder=finished.folder)] == ["fuzzed"]
        told = plait("eval", planted.name)
        assert told.code == 2 and "there is no run" in told.err and "\x1b" not in told.err
        assert "\x1b" not in str(Run("fuzzed", folder=finished.folder))
    finally:
        shutil.rmtree(planted)
