"""Weights to begin with travel to hosts that lack them; no host reads a model by a path that another one names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from plait.errors import PlaitError
from plait.hosts.files import named_entries
from plait.hosts.job_files import FileStager
from plait.interop.base_model import needed_files, read_base_model
from plait.launch.values.job import HostRanks, Job
from plait.planner.plan_file import plan_text, read_plan, write_plan
from plait.recipe.load import recipe_text
from plait.workers import TRAINING_ENTRY
from tests.commands.neighbour import Neighbour, put
from tests.interop.folders import write_model
from tests.matrix import few_fast
from tests.plans import changed
from tests.trainer.tiny import make_tiny

HOME = Path("runs") / "x"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a run that begins with the weights in `base`, three files of them beside others."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    config, plan = make_tiny(folder)
    (folder / "cache").rename(".plait")
    corpus = next(path for path in (folder / ".plait" / "data").iterdir() if path.is_dir())
    write_model(folder / "base", shard_size="20KB")
    HOME.mkdir(parents=True)
    plan = replace(plan, job=replace(plan.job, corpus=str(corpus.relative_to(folder)), base=str(folder / "base")))
    write_plan(plan, HOME / "plan.json")
    (HOME / "recipe.toml").write_text(recipe_text(config))
    return folder


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Neighbour]:
    neighbour = Neighbour(tmp_path / "there")
    yield neighbour
    neighbour.depot.close()


def stage(*others: Neighbour, resume: str | None = None) -> list[str]:
    told: list[str] = []
    FileStager(others, HOME, told.append).stage_job_files(HOME, "run", resume)
    return [line for line in told if not line.startswith("folder ")]  # who shares the run's folder


def trains(host: Neighbour, folder: Path) -> None:
    """Raises PlaitError where the host would not let its ranks train by the plan in a folder."""
    argument = json.dumps({"folder": str(folder), "resume": None})
    part = HostRanks(first_rank=1, ranks=1)
    with host.depot.running(Job(entry=TRAINING_ENTRY, argument=argument, world_size=2, threads=1, part=part)):
        pass


def test_a_host_gets_the_files_of_the_weights_once(here: Path, other: Neighbour) -> None:
    told = stage(other)
    assert [line.split(" of ")[1] for line in told] == ["prepared data to host-1", "weights to begin with to host-1"]
    theirs = other.folder / HOME
    sent = Path(read_plan(theirs / "plan.json").job.base)
    assert sent.parent == other.folder / ".plait" / "received" / "models"
    wanted = needed_files(read_base_model(here / "base"))
    assert len(wanted) > 4 and {path.name for path in sent.iterdir()} == set(wanted)
    assert named_entries(sent, wanted, {}) == named_entries(here / "base", wanted, {})
    trains(other, theirs)
    other.asked.clear()
    (here / "base").rename(here / "renamed")  # found again by its content
    plan = read_plan(HOME / "plan.json")
    write_plan(replace(plan, job=replace(plan.job, base=str(here / "renamed"))), HOME / "plan.json")
    assert not stage(other) and "block" not in other.asked
    trains(other, theirs)


def test_a_run_that_resumes_needs_no_weights_to_begin_with(here: Path, other: Neighbour) -> None:
    checkpoint = HOME / "checkpoints" / "step-10"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    shutil.rmtree(here / "base")
    stage(other, resume="step-10")
    assert read_plan(other.folder / HOME / "plan.json").job.base == ""
    assert not (other.folder / ".plait" / "received" / "models").exists()
    trains(other, other.folder / HOME)


def test_hosts_that_share_the_folder_find_the_model_in_it(here: Path, tmp_path: Path) -> None:
    same = Neighbour(here)
    assert not stage(same) and read_plan(HOME / "plan.json").job.base == "base"
    trains(same, here / HOME)
    (here / "base").rename(tmp_path / "elsewhere")
    write_plan(
        replace(
            read_plan(HOME / "plan.json"),
            job=replace(read_plan(HOME / "plan.json").job, base=str(tmp_path / "elsewhere")),
        ),
        HOME / "plan.json",
    )
    with pytest.raises(PlaitError, match=r"^the hosts share .*/here, and the model in .*/elsewhere lies outside of it"):
        stage(same)
    with pytest.raises(PlaitError, match="is not a folder of this run on this host"):
        trains(same, here / HOME)
    same.depot.close()


def test_a_model_of_the_hosts_own_is_never_begun_with(here: Path, other: Neighbour) -> None:
    """Whatever host 0 writes into the plan: its own path, one inside of what was received, or a link."""
    stage(other)
    theirs = other.folder / HOME
    sent = read_plan(theirs / "plan.json")
    shutil.copytree(here / "base", other.folder / "private")
    for base in (
        other.folder / "private",
        Path("private"),
        Path(sent.job.base).parent,
        Path(sent.job.base) / ".." / "x",
    ):
        put(other, "plan.json", plan_text(changed(sent, base=str(base))).encode())
        with pytest.raises(PlaitError, match="is not a folder of this run on this host"):
            trains(other, theirs)
    put(other, "plan.json", plan_text(sent).encode())
    trains(other, theirs)


def offer(host: Neighbour, files: list[Mapping[str, Any]], name: str = "m") -> None:
    host.attack("take", {"root": "cache", "path": f"models/{name}", "files": files})


def test_what_another_leader_sent_is_used_only_by_whoever_has_all_of_it(here: Path, other: Neighbour) -> None:
    """A second leader that offers a part of the files, or none, begins with nothing of the rest."""
    stage(other)
    sent = Path(read_plan(other.folder / HOME / "plan.json").job.base)
    entries = [
        {"name": entry.name, "nbytes": entry.nbytes, "sha256": entry.sha256}
        for entry in named_entries(sent, needed_files(read_base_model(sent)), {})
    ]
    for part in ([], entries[:1]):
        offer(other, part, sent.name)
        with pytest.raises(PlaitError, match="is not a folder of this run on this host"):
            trains(other, other.folder / HOME)
    with pytest.raises(PlaitError, match="the model offered lacks files of its own"):
        offer(other, entries[1:], sent.name)
    offer(other, entries, sent.name)
    trains(other, other.folder / HOME)


LLAMA = {
    "model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1,
    "vocab_size": 8, "max_position_embeddings": 8, "rms_norm_eps": 1e-5,
}  # fmt: skip
QWEN2 = {**LLAMA, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4}
NO_MODELS = (
    {"model_type": ["llama"]},
    {**LLAMA, "num_hidden_layers": 2**39},
    {**QWEN2, "layer_types": [["full_attention"]]},
    {**QWEN2, "max_window_layers": "one"},
    {**LLAMA, "rope_scaling": {"rope_type": ["yarn"]}},
    LLAMA,
)


@pytest.mark.parametrize("text", few_fast(["", "{", "[]", *map(json.dumps, NO_MODELS)], "{", json.dumps(LLAMA)))
def test_a_model_that_is_none_is_one_sentence(here: Path, other: Neighbour, text: str) -> None:
    other.attack("open", {"kind": "run", "name": "x", "recipe": (HOME / "recipe.toml").read_text()})
    digest = sha256(text.encode()).hexdigest()
    offer(other, [{"name": "config.json", "nbytes": len(text), "sha256": digest}])
    with pytest.raises(PlaitError) as caught:
        other.attack("block", {"name": "config.json", "offset": 0}, text.encode())
    assert "\n" not in str(caught.value)
