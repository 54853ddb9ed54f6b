"""An attacker with the secret who plays host 0: nothing of a joined host's own is read, overwritten or removed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from plait.errors import PlaitError
from plait.hosts.shared_folder import SharedReply
from plait.launch.values.job import HostRanks, Job
from plait.workers import CHECK_ENTRY, MEASURE_ENTRY, PROBE_ENTRY, TIMING_ENTRY, TRAINING_ENTRY
from tests.commands.neighbour import Neighbour, put

RECIPE = 'run.name = "x"\n[data]\nfiles = "a.txt"\n[train]\nbudget = "10 steps"\n'
OWN = {
    "runs/own/checkpoints/step-5/weights": "five",
    "runs/own/checkpoints/.step-6.staging/part": "six",
    "runs/own/checkpoints/step-5/manifest.json": "{}",
    "runs/own/recipe.toml": "of its own",
    "runs/half/recipe.toml": "only begun",
    "runs/half/checkpoints/step-1/weights": "one",
    ".plait/data/private/index.json": "{}",
    ".plait/data/private/tokens.bin": "its own text",
    "notes.txt": "secret",
}


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Neighbour]:
    """A joined host whose working folder holds files of its own, which are all there in the end."""
    host = Neighbour(tmp_path / "victim")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("outside")
    for name, text in OWN.items():
        path = host.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    yield host
    host.depot.close()
    assert {name: (host.folder / name).read_text() for name in OWN} == OWN
    assert [path.name for path in outside.iterdir()] == ["file"] and (outside / "file").read_text() == "outside"


def open_run(victim: Neighbour, name: str = "x") -> None:
    victim.attack("open", {"kind": "run", "name": name, "recipe": RECIPE})


def refused(victim: Neighbour, kind: str, values: Mapping[str, Any], blob: bytes = b"") -> None:
    """Whatever was wrong, a sentence says it."""
    with pytest.raises(PlaitError) as caught:
        victim.attack(kind, values, blob)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["own/checkpoints", "../victim", "..", ".", "", "/etc", "x/../own", ".hidden", "a\nb"])
def test_the_name_of_a_run_is_one_component(victim: Neighbour, name: str) -> None:
    refused(victim, "open", {"kind": "run", "name": name, "recipe": RECIPE})


@pytest.mark.parametrize("name", ["own", "half"])
def test_a_folder_with_files_of_this_hosts_own_is_not_opened(victim: Neighbour, name: str) -> None:
    refused(victim, "open", {"kind": "run", "name": name, "recipe": RECIPE})
    refused(victim, "take", {"root": "folder", "path": "checkpoints/step-1", "files": []})
    victim.attack("release", {})


def test_a_second_run_is_not_opened_and_so_not_released(victim: Neighbour) -> None:
    open_run(victim)
    refused(victim, "open", {"kind": "run", "name": "own", "recipe": RECIPE})
    victim.attack("release", {})
    victim.attack("open", {"kind": "job", "name": "own", "recipe": RECIPE})
    victim.attack("release", {})


@pytest.mark.parametrize(
    ("root", "path"),
    [
        ("folder", "checkpoints"), ("folder", "logs"), ("folder", "../own/checkpoints"), ("folder", "checkpoints/own"),
        ("folder", "checkpoints/../../own"), ("cache", "data"), ("cache", "../runs/own"), ("cache", "data/../data/x"),
        ("cache", "other/x"), ("elsewhere", "data/x"), ("folder", "."),
    ],
)  # fmt: skip
def test_files_are_offered_for_their_two_places_alone(victim: Neighbour, root: str, path: str) -> None:
    open_run(victim)
    refused(victim, "take", {"root": root, "path": path, "files": []})


def test_of_checkpoints_only_those_go_that_were_sent(victim: Neighbour) -> None:
    open_run(victim)
    kept = victim.folder / "runs" / "x" / "checkpoints" / "step-3"
    kept.mkdir(parents=True)  # by somebody else, meanwhile
    for step in (10, 20):
        files = [{"name": "a", "nbytes": 1, "sha256": sha256(b"a").hexdigest()}]
        victim.attack("take", {"root": "folder", "path": f"checkpoints/step-{step}", "files": files})
        victim.attack("block", {"name": "a", "offset": 0}, b"a")
    assert sorted(path.name for path in kept.parent.iterdir()) == ["step-20", "step-3"]


@pytest.mark.parametrize("name", ["joined.json", ".lock", "metrics.jsonl", "evil.py", "../own/recipe.toml"])
def test_only_recipe_and_plan_are_put_into_the_folder_itself(victim: Neighbour, name: str) -> None:
    open_run(victim)
    refused(victim, "take", {"root": "folder", "path": "", "files": [{"name": name, "nbytes": 4, "sha256": "0" * 64}]})


@pytest.mark.parametrize(
    "values",
    [
        {"name": "../own/recipe.toml"}, {"name": "../../notes.txt"}, {"name": "link"}, {"name": "checkpoints/x"},
        {"name": "weights", "staging": "../../own/checkpoints/step-5"}, {"name": "x", "staging": ".step-1.staging/.."},
        {"name": "file", "staging": ".step-7.staging"}, {"name": "recipe.toml", "offset": -1}, {"name": "pipe/"},
    ],
)  # fmt: skip
def test_nothing_is_read_outside_and_no_link_followed(victim: Neighbour, values: dict[str, Any]) -> None:
    open_run(victim)
    run = victim.folder / "runs" / "x"
    (run / "link").symlink_to(victim.folder / "notes.txt")
    (run / "checkpoints").mkdir(exist_ok=True)
    (run / "checkpoints" / ".step-7.staging").symlink_to(victim.folder.parent / "outside")
    refused(victim, "read", {"offset": 0, "bytes": 100, **values})
    (run / "checkpoints" / ".step-7.staging").unlink()


def test_data_do_not_arrive_behind_a_link(victim: Neighbour) -> None:
    (victim.folder / ".plait" / "received" / "data").mkdir(parents=True)
    (victim.folder / ".plait" / "received" / "data" / "linked").symlink_to(victim.folder.parent / "outside")
    open_run(victim)
    files = [{"name": "file", "nbytes": 4, "sha256": sha256(b"evil").hexdigest()}]
    refused(victim, "take", {"root": "cache", "path": "data/linked", "files": files})


@pytest.mark.parametrize("name", ["logs", "checkpoints", "logs/rank-0.log"])
def test_a_folder_that_ranks_write_into_does_not_lead_outside(victim: Neighbour, name: str) -> None:
    link = victim.folder / "runs" / "x" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(victim.folder.parent / "outside")
    refused(victim, "open", {"kind": "run", "name": "x", "recipe": RECIPE})
    assert link.is_symlink()


@pytest.mark.parametrize(
    ("folder", "name", "content"),
    [
        (".", "notes.txt", "secret"), ("/etc", "nonce-0123456789abcdef", "0" * 32), ("runs/x", "recipe.toml", "mine"),
        ("../outside", "nonce-0123456789abcdef", "0" * 32), ("runs/own/..", "nonce-0123456789abcdef", "0" * 32),
    ],
)  # fmt: skip
def test_a_folder_is_not_taken_for_shared_by_a_file_that_was_sent(
    victim: Neighbour, folder: str, name: str, content: str
) -> None:
    open_run(victim)
    put(victim, "recipe.toml", b"mine")
    refused(victim, "see", {"nonces": [{"folder": folder, "name": name, "content": content}]})
    assert victim.attack("see", {"nonces": []}).values == SharedReply(shared=False)


def order(entry: str, argument: str, log_dir: str | None = None) -> Job:
    part = HostRanks(first_rank=1, ranks=1)
    return Job(entry=entry, argument=argument, world_size=2, threads=1, log_dir=log_dir, part=part)


def test_ranks_work_in_the_folder_of_the_run_alone(victim: Neighbour) -> None:
    open_run(victim)
    own, sent = str(victim.folder / "runs" / "own"), str(victim.folder / "runs" / "x")
    orders = [order(TIMING_ENTRY, own), order(CHECK_ENTRY, json.dumps({"folder": own})), order(TIMING_ENTRY, "")]
    orders += [order(TRAINING_ENTRY, json.dumps({"folder": own, "resume": None}))]
    orders += [order(TRAINING_ENTRY, json.dumps({"folder": sent, "resume": "../../own/checkpoints/step-5"}))]
    orders += [order(TRAINING_ENTRY, json.dumps({"folder": sent, "resume": 5})), order(TRAINING_ENTRY, "{" * 10**5)]
    orders += [order(PROBE_ENTRY, "{}", own), order(MEASURE_ENTRY, "", own), order(TIMING_ENTRY, sent, own)]
    orders += [order(TRAINING_ENTRY, json.dumps({"folder": f"{sent}/../own", "resume": None}))]
    for one in orders:
        with pytest.raises(PlaitError), victim.depot.running(one):
            pass


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("open", {}), ("open", {"kind": "run", "name": 5, "recipe": RECIPE}), ("open", {"kind": "x", "name": "a"}),
        ("take", {"root": "cache", "path": "data/x", "files": [{"name": "a", "nbytes": -1, "sha256": ""}]}),
        ("take", {"root": "cache", "path": "data/x", "files": {"a": 1}}), ("take", {"root": [], "path": {}}),
        ("block", {"name": [], "offset": "x"}), ("read", {"name": None}), ("see", {"nonces": [1]}),
        ("read", {"name": "a", "offset": 10**400, "bytes": 1}), ("see", {}),
    ],
)  # fmt: skip
def test_what_is_no_request_is_refused_with_a_sentence(victim: Neighbour, kind: str, values: dict[str, Any]) -> None:
    open_run(victim)
    victim.attack("take", {"root": "cache", "path": "data/y", "files": [{"name": "a", "nbytes": 1, "sha256": ""}]})
    refused(victim, kind, values)
