"""SkyPilot's and dstack's own parsers read what plait submits to them; `make test-renters` installs both."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from plait.clusters.submit import outgoing_job
from plait.screen.terminal import TerminalScreen
from tests.clusters.cases import CASES, write_inputs

pytestmark = pytest.mark.renters
SITES = Path(os.environ.get("PLAIT_RENTERS", ".renters")).absolute()
EXAMPLES = Path(__file__).parents[2] / "examples"
SKY = """
import json, sys, sky
task = sky.Task.from_yaml_config(json.load(sys.stdin), secrets_overrides=[("PLAIT_SECRET", "as --secret gives it")])
[one] = task.resources
print(json.dumps([task.num_nodes, one.accelerators, one.use_spot, sorted(task.file_mounts or {}), task.run,
                  one.job_recovery, sorted(task.secrets)]))
"""
DSTACK = """
import json, sys
from dstack._internal.core.models.configurations import parse_apply_configuration
task = parse_apply_configuration(json.load(sys.stdin))
gpu = task.resources.gpu
print(json.dumps([task.nodes, gpu.name, gpu.count.min, str(task.spot_policy.value), [one.path for one in task.files],
                  task.commands, [one.value for one in task.retry.on_events]]))
"""


def parsed(tool: str, task: dict[str, Any], home: Path) -> list[Any]:
    return read_by(tool, SKY if tool == "skypilot" else DSTACK, task, home)


def read_by(tool: str, program: str, value: dict[str, Any], home: Path) -> list[Any]:
    """What a program that uses the tool's parser prints of a value; raises ValueError where the parser refuses it."""
    site = SITES / tool
    assert site.is_dir(), "make test-renters installs SkyPilot and dstack"
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(value),
        env={**os.environ, "PYTHONPATH": str(site), "HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        raise ValueError(done.stderr)
    return list(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    with contextlib.chdir(folder):
        screen = TerminalScreen(Console(file=io.StringIO()))
        rented = {name: case for name, case in CASES.items() if case.scheduler in ("skypilot", "dstack")}
        yield {name: yaml.safe_load(outgoing_job(case, screen).text) for name, case in rented.items()}


def test_skypilot_reads_its_task(tasks: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    task = tasks["skypilot-spot"]
    nodes, gpus, spot, files, run, recovery, secrets = parsed("skypilot", task, tmp_path)
    assert (nodes, gpus, spot, secrets) == (2, {"A100-80GB": 8}, True, ["PLAIT_SECRET"])
    assert files == sorted(task["file_mounts"]) and run == task["run"]
    assert recovery["recover_on_exit_codes"] == [75]
    with pytest.raises(ValueError, match="plantedField"):
        parsed("skypilot", {**task, "plantedField": 1}, tmp_path)


@pytest.mark.parametrize("name", ["dstack-spot", "dstack-processors"])
def test_dstack_reads_its_task(name: str, tasks: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    task = tasks[name]
    nodes, gpu, count, spot, files, commands, events = parsed("dstack", task, tmp_path)
    spots = name == "dstack-spot"
    assert (nodes, gpu, count) == ((2, ["A100"], 8) if spots else (None, None, 0))
    assert spot == ("spot" if spots else "on-demand") and events == ["no-capacity", "interruption"]
    assert files == [one["path"] for one in task["files"]] and commands == task["commands"]
    with pytest.raises(ValueError, match="plantedField"):
        parsed("dstack", {**task, "plantedField": 1}, tmp_path)


VOLUMES = {
    "skypilot": "from sky.utils import common_utils, schemas; common_utils.validate_schema(value, "
    "schemas.get_volume_schema(), 'invalid: ')",
    "dstack": "from dstack._internal.core.models.configurations import parse_apply_configuration; "
    "parse_apply_configuration(value)",
}


@pytest.mark.parametrize("tool", VOLUMES)
def test_the_example_s_volume_is_read(tool: str, tmp_path: Path) -> None:
    value = yaml.safe_load((EXAMPLES / tool / "volume.yaml").read_text())
    program = f"import json, sys\nvalue = json.load(sys.stdin)\n{VOLUMES[tool]}\nprint('[]')"
    assert read_by(tool, program, value, tmp_path) == []
    with pytest.raises(ValueError, match="plantedField"):
        read_by(tool, program, {**value, "plantedField": 1}, tmp_path)
