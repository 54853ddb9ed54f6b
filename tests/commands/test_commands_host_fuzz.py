"""Requests to a joined host, and its replies, damaged in hundreds of ways: a sentence, or a value as it should be."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from plait.errors import PlaitError
from plait.hosts.files import READ_FILE, FileEntry, Offer, ReadRequest, fetch_file, send_folder
from plait.hosts.joining import admitted_info, own_host_info
from plait.hosts.protocol import Reply, RequestKind, answer_request, parse_reply
from plait.hosts.workers import machine_survey
from tests.commands.neighbour import Neighbour
from tests.launch.mutants import mutants
from tests.planner.machines import LAPTOP

SEED = 27
RECIPE = 'run.name = "x"\n[data]\nfiles = "a.txt"\n[train]\nbudget = "10 steps"\n'
NONCE = {"folder": "runs/x", "name": "nonce-0123456789abcdef", "content": "0" * 32}
REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("see", {"nonces": [NONCE, {**NONCE, "folder": ".plait"}]}),
    ("open", {"kind": "run", "name": "x", "recipe": RECIPE}),
    ("open", {"kind": "job", "name": "plait-verify-x", "recipe": RECIPE}),
    ("take", {"root": "cache", "path": "data/x", "files": [{"name": "a", "nbytes": 1, "sha256": "0" * 64}]}),
    ("take", {"root": "folder", "path": "checkpoints/step-1", "files": [{"name": "a", "nbytes": 1, "sha256": ""}]}),
    ("block", {"name": "a", "offset": 0}),
    ("take", {"root": "folder", "path": "", "files": [{"name": "plan.json", "nbytes": 1, "sha256": ""}]}),
    ("read", {"name": "recipe.toml", "offset": 0, "bytes": 10}),
    ("list", {}),
    ("release", {}),
)


class Lying:
    """A joined host that replies what it likes."""

    name = "evil"

    def __init__(self, values: Any, blob: bytes = b"") -> None:
        self.values, self.blob = values, blob

    def ask(self, request: RequestKind[Any, Any], question: Any, blob: bytes = b"") -> Reply[Any]:
        return parse_reply(request, self.values, self.blob, self.name)


def test_a_damaged_request_is_answered_or_refused_with_a_sentence(tmp_path: Path) -> None:
    victim = Neighbour(tmp_path / "victim")
    (tmp_path / "victim" / "notes.txt").write_text("own")
    victim.attack("open", {"kind": "run", "name": "x", "recipe": RECIPE})
    refused = 0
    for number, (kind, values) in enumerate(REQUESTS):
        for damaged in mutants(json.loads(json.dumps(values)), 40, SEED + number):
            try:
                answer_request(victim.depot.handlers, kind, damaged, b"x")
            except PlaitError as error:
                refused += 1
                assert "\n" not in str(error)
    victim.depot.close()
    assert refused > 100
    assert sorted(path.name for path in tmp_path.iterdir()) == ["victim"]
    assert {path.name for path in victim.folder.iterdir()} <= {".plait", "notes.txt", "runs"}
    assert not (victim.folder / "runs").exists()  # none begun, none left
    assert (victim.folder / "notes.txt").read_text() == "own"


@pytest.mark.parametrize("honest", [{"folder": "/a", "lacking": ["a"]}, {"size": 1}])
def test_a_damaged_reply_ends_with_a_sentence(honest: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "private").write_bytes(b"private")
    offer = Offer(root="cache", path="data/x", files=(FileEntry(name="a", nbytes=1, sha256=""),))
    for damaged in mutants(honest, 60, SEED):
        for act in (
            lambda peer: send_folder(peer, tmp_path, offer),
            lambda peer: fetch_file(peer, READ_FILE, ReadRequest(name="a"), tmp_path / "fetched"),
        ):
            try:
                act(Lying(damaged, b"a"))
            except PlaitError as error:
                assert "\n" not in str(error)


def test_damaged_words_of_a_host_on_itself_are_refused_or_right() -> None:
    own = own_host_info()
    for damaged in mutants(json.loads(json.dumps(asdict(own))), 150, SEED):
        try:
            assert admitted_info(damaged, own).code == own.code
        except PlaitError as error:
            assert "\n" not in str(error)
    machine = {"fingerprint": LAPTOP.fingerprint(), "peak_flops": 1e11, "reason": None}
    for damaged in mutants(json.loads(json.dumps(machine)), 150, SEED):
        try:
            survey = machine_survey(damaged, "evil")
            assert survey.machine.cores > 0 and survey.machine.devices > 0
        except PlaitError as error:
            assert str(error).startswith("evil does not say what machine it is") and "\n" not in str(error)
