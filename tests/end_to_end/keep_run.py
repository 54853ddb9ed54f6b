"""`python -m tests.end_to_end.keep_run`: keeps a run of this version, for later versions to go on from.

It makes tests/fixtures/kept-runs/VERSION: a folder as a user has it, with a text, a recipe, and a run that was killed
at step 12, behind its checkpoint of step 10. Beside it lies what the same run came to when nothing was killed. Made
once when a version is released, and never again: an old run is worth keeping because nothing new wrote it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from pathlib import Path

from plait.version import __version__
from tests.end_to_end.command import Place, ended, wait_while_running

KEPT = Path(__file__).parents[1] / "fixtures" / "kept-runs"
EXPECTED = "expected.json"
NAME = "tiny"
RECIPE = """\
[run]
name = "tiny"

[data]
files = "play.txt"

[model]
layers = 2
width = 32
heads = 2
vocabulary = 300

[train]
sequence = 16
batch_tokens = 112
budget = "20 steps"

[optimizer]
kind = "muon"

[layout]
shard = 2
micro_sequences = 2

[checkpoint]
every = "10 steps"
"""


def main() -> None:
    """Make the folder; refuses to write over one."""
    folder = KEPT / __version__
    if folder.exists():
        raise SystemExit(f"{folder} is there already: a kept run is never made again")
    with tempfile.TemporaryDirectory() as temporary:
        place = Place(Path(temporary), RECIPE)
        whole = place.run("train", "tiny.toml")
        assert whole.code == 0, whole
        losses = {line["step"]: line["loss"] for line in place.lines(NAME) if "loss" in line}
        shutil.rmtree(place.path(NAME))
        process = place.start("train", "tiny.toml")
        wait_while_running(lambda: len(place.lines(NAME)) >= 12 if place.checkpoints(NAME) else False, process)
        os.killpg(process.pid, signal.SIGKILL)
        ended(process)
        shutil.copytree(place.folder, folder)
    (folder / EXPECTED).write_text(json.dumps(losses, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
