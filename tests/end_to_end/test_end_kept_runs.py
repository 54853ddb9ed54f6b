"""Runs that released versions left behind: this version shows them, goes on from them and samples from them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.end_to_end.command import Place
from tests.end_to_end.keep_run import EXPECTED, KEPT, NAME

VERSIONS = sorted(folder.name for folder in KEPT.iterdir())


@pytest.mark.parametrize("version", VERSIONS)
def test_a_run_of_an_older_version_goes_on_where_it_was_killed(version: str, tmp_path: Path) -> None:
    shutil.copytree(KEPT / version, tmp_path / "kept")
    place = Place(tmp_path / "kept", recipe=None)
    expected = {int(step): loss for step, loss in json.loads((KEPT / version / EXPECTED).read_text()).items()}

    shown = json.loads(place.run("runs", "--json").out)
    assert [(run["name"], run["step_saved"], run["steps"]) for run in shown] == [(NAME, 10, len(expected))]

    continued = place.run("train", "tiny.toml")  # the run's own recipe names the text where it lay
    assert continued.code == 0 and not continued.err, continued
    losses = {line["step"]: line["loss"] for line in place.lines(NAME) if "loss" in line}
    assert losses == pytest.approx(expected, rel=1e-4)  # another processor rounds otherwise
    assert json.loads((place.path(NAME) / "receipt.json").read_text())["steps"] == len(expected)

    sampled = place.run("sample", NAME, "--prompt", "Ka", "--tokens", "4")
    assert sampled.code == 0 and sampled.out.startswith("Ka"), sampled
    exported = place.run("export", NAME, "--to", "exported")
    assert exported.code == 0 and (place.folder / "exported" / "config.json").exists(), exported
