"""What is sent to some clusters, word for word; UPDATE_GOLDEN=1 writes the texts again for review."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

from plait.clusters.job import Outgoing
from plait.clusters.submit import outgoing_job
from plait.screen.terminal import TerminalScreen
from tests.clusters.cases import CASES, write_inputs
from tests.clusters.strict import VERSIONS, complaints, documents, pod_specs, restricted_faults

GOLDEN = Path(__file__).parents[1] / "golden"
KUBERNETES = [name for name, case in CASES.items() if case.scheduler == "kubernetes"]


MakeText = Callable[[str], tuple[Outgoing, str]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeText]:
    """A case's job, and what a person is told of it; each is planned once."""
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)

    @cache
    def make(name: str) -> tuple[Outgoing, str]:
        told = io.StringIO()
        return outgoing_job(CASES[name], TerminalScreen(Console(file=told, width=100))), told.getvalue()

    with contextlib.chdir(folder):
        yield make


@pytest.mark.parametrize("name", CASES)
def test_what_is_sent_and_why_so_many_nodes(name: str, made: MakeText) -> None:
    outgoing, told = made(name)
    text, golden = f"{told}\n==> {outgoing.file}\n{outgoing.text}", GOLDEN / f"submit-{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text(), f"{golden} says otherwise; if the new text is right, write it by UPDATE_GOLDEN=1"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", KUBERNETES)
def test_manifests_meet_the_schemas_strictly(name: str, version: str, made: MakeText) -> None:
    for value in documents(made(name)[0].text):
        assert complaints(value, version) == []
        assert [fault for spec in pod_specs(value) for fault in restricted_faults(spec)] == []


@pytest.mark.parametrize("name", KUBERNETES)
def test_an_unknown_field_anywhere_is_found(name: str, made: MakeText) -> None:
    """The check above is no empty one: each table of each object is given a field that nobody knows."""
    for value in documents(made(name)[0].text):
        if value["kind"] == "ConfigMap":
            continue  # its keys are names of files
        tables = _tables(value)
        for table in tables:
            table["plantedField"] = 1
        found = [text for text in complaints(value, VERSIONS[-1]) if "plantedField" in text]
        assert len(found) == len(tables) > 0, (value["kind"], len(tables), found)


FREE_KEYS = (
    "metadata",
    "labels",
    "matchLabels",
    "data",
    "requests",
    "limits",
    "selector",
    "annotations",
    "nodeSelector",
)


def _tables(value: object, key: str = "") -> list[dict[str, object]]:
    """All tables whose keys are the schema's, not a person's."""
    if isinstance(value, list):
        return [found for inner in value for found in _tables(inner, key)]
    if not isinstance(value, dict):
        return []
    own = [value] if key and key not in FREE_KEYS else []
    return own + [found for name, inner in value.items() for found in _tables(inner, name)]


@pytest.mark.parametrize("name", KUBERNETES)
def test_a_manifest_asks_for_the_devices_of_its_plan_and_holds_no_secret(name: str, made: MakeText) -> None:
    case, (outgoing, _) = CASES[name], made(name)
    assert "kind: Secret" not in outgoing.text and "PLAIT_SECRET_FILE\n" in outgoing.text
    [start] = [value for value in documents(outgoing.text) if value["kind"] in ("JobSet", "TrainJob", "Job")]
    spec = start["spec"]
    inner = spec["replicatedJobs"][0]["template"]["spec"] if "replicatedJobs" in spec else spec
    pods = inner.get("completions") or spec["trainer"]["numNodes"]
    command = (spec.get("trainer") or next(pod_specs(inner))["containers"][0])["command"]
    assert command[command.index("--nodes") + 1] == str(pods)
    assert case.nodes in (None, pods)
    assert ("suspend" in spec) == ("queue=" in " ".join(case.options))


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.scheduler in ("slurm", "ssh")])
def test_a_script_is_one_that_bash_reads(name: str, made: MakeText, tmp_path: Path) -> None:
    file = tmp_path / "script.sh"
    file.write_text(made(name)[0].text)
    done = subprocess.run(["bash", "-n", str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
