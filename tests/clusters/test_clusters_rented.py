"""What is asked of SkyPilot and dstack, whose programs are played by small ones, and how a node waits for a restart.

`make test-renters` has the tools' own parsers read the texts.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from plait.clusters.job import ClusterJob, NodeGroup, find_record
from plait.clusters.rented import RentedInputs, dstack_task, skypilot_task
from plait.clusters.request import SubmitRequest
from plait.clusters.submitted import end_job, fetch_job, job_log_lines, job_state_line
from plait.errors import PlaitError
from plait.screen.screen import SilentScreen
from tests.clusters.test_clusters_submit import Tools, send
from tests.clusters.test_clusters_submit import tools as tools

SKY = """#!/bin/sh
printf "%s\\n" "$*" >>"$0.calls"
case "$*" in
  "jobs launch"*) echo "$PLAIT_SECRET" >>"$0.secrets"; cp "$0.after" "$0.jobs";;
  "jobs queue"*)
    [ -e "$0.jobs" ] || { echo "sky.exceptions.ClusterNotUpError: No in-progress managed jobs." >&2; exit 1; }
    cat "$0.jobs";;
  "jobs logs"*) echo "step 1";;
esac
"""
DSTACK = """#!/bin/sh
printf "%s\\n" "$*" >>"$0.calls"
case "$*" in
  apply*) echo "$PLAIT_SECRET" >>"$0.secrets"; cat >"$0.input"; cp "$0.after" "$0.jobs";;
  ps*) cat "$0.jobs";;
  logs*) echo "step 1";;
esac
"""
REQUEST = SubmitRequest(
    target=("play.py",),
    scheduler="skypilot",
    cluster="4x(8xH100)",
    nodes=2,
    options=("image=registry.example/plait:1",),
)


def sky_jobs(*statuses: str) -> str:
    jobs = [{"job_id": at, "job_name": "play", "status": status} for at, status in enumerate(statuses, 7)]
    return json.dumps([*jobs, {"job_id": 90, "job_name": "other", "status": "RUNNING"}])


def dstack_runs(*statuses: str) -> str:
    return json.dumps({"runs": [{"run_spec": {"run_name": "play"}, "status": status} for status in statuses]})


def play(tools: Tools, name: str, program: str, *, jobs: str | None, after: str) -> None:
    tools.add(name, "")
    (tools.folder / name).write_text(program)
    if jobs is not None:
        (tools.folder / f"{name}.jobs").write_text(jobs)
    (tools.folder / f"{name}.after").write_text(after)


def test_a_job_goes_to_skypilot_once_and_is_found_by_its_number(tools: Tools, tmp_path: Path) -> None:
    """At first the machine is not up that looks after SkyPilot's jobs."""
    play(tools, "sky", SKY, jobs=None, after=sky_jobs("SUCCEEDED", "STARTING"))
    assert "sent     play: 2 machines of skypilot, STARTING" in send(REQUEST)
    file = tmp_path / ".plait" / "submitted" / "play.skypilot.yaml"
    launch = f"jobs launch --yes --detach-run --name play --secret PLAIT_SECRET {file.relative_to(tmp_path)}"
    assert launch in tools.text("sky.calls").splitlines()
    secret = tools.text("sky.secrets").strip()
    assert len(secret) == 34 and secret not in tools.text("sky.calls") + file.read_text()
    with pytest.raises(PlaitError, match=r"play is in skypilot already \(STARTING\); end it first: plait stop play"):
        send(REQUEST)
    assert find_record("play").job == "8" and job_state_line("play") == "job      play on skypilot: STARTING"
    assert list(job_log_lines("play")) == ["step 1"]
    with pytest.raises(PlaitError, match=r"runs/play of play is on the disk of its first machine"):
        fetch_job("play", SilentScreen())
    assert not (tmp_path / "runs" / "play").exists()
    assert end_job("play").startswith("stopped  play")
    assert tools.text("sky.calls").splitlines()[-2:] == ["jobs logs --no-follow 8", "jobs cancel --yes 8"]


def test_a_job_goes_to_dstack_once_and_is_found_by_its_name(tools: Tools) -> None:
    play(tools, "dstack", DSTACK, jobs=dstack_runs("done"), after=dstack_runs("provisioning", "done"))
    request = replace(REQUEST, scheduler="dstack")
    assert "sent     play: 2 machines of dstack, provisioning" in send(request)
    secret, text = tools.text("dstack.secrets").strip(), tools.text("dstack.input")
    assert len(secret) == 34 and secret not in tools.text("dstack.calls") + text and "- PLAIT_SECRET\n" in text
    with pytest.raises(PlaitError, match=r"play is in dstack already \(provisioning\)"):
        send(request)
    assert list(job_log_lines("play")) == ["step 1"]
    end_job("play")
    assert tools.text("dstack.calls").splitlines()[-1] == "stop --yes play"


@pytest.mark.parametrize(
    ("options", "more", "says"),
    [
        (("spot=yes",), {}, "the disk of a spot machine is lost with it"),
        ((), {"time": "1 hour"}, "set train.budget instead of --time"),
        ((), {"cluster": None}, "rents machines, so plait cannot ask which there are"),
        ((), {"cluster": "8x(4xGH200)"}, "does not know the name that skypilot has for GH200; write it by --with gpu="),
        ((), {"cluster": "1x(8xA100)+1x(8xH100)"}, "all machines of a job must be of one kind"),
        (("wheel=a.whl",), {}, "an image has plait already"),
        (("infra=",), {}, "--with infra has no value"),
    ],
)
def test_what_cannot_be_rented_is_one_sentence(
    options: Sequence[str], more: dict[str, object], says: str, tools: Tools
) -> None:
    with pytest.raises(PlaitError) as caught:
        send(replace(REQUEST, options=(*REQUEST.options, *options), **more))  # type: ignore[arg-type]
    assert says in str(caught.value)


def test_a_tool_that_is_missing_or_says_something_else_is_one_sentence(tools: Tools) -> None:
    with pytest.raises(PlaitError, match=r"sky is not on this machine.*pip install skypilot"):
        send(REQUEST)
    play(tools, "sky", SKY, jobs="no jobs", after="")
    with pytest.raises(PlaitError, match="SkyPilot's list of jobs is not understood"):
        send(REQUEST)


def job(nodes: int, device: str = "A100 SXM 40GB") -> ClusterJob:
    group = NodeGroup(nodes=nodes, gpus=8, device=device)
    return ClusterJob(name="play", run="play", target=("own.py", "--name", "a b"), groups=(group,))


def test_gpus_are_asked_for_by_the_tools_own_names() -> None:
    assert skypilot_task(job(1), {}, RentedInputs())["resources"]["accelerators"] == "A100:8"
    assert dstack_task(job(1), {}, RentedInputs())["resources"]["gpu"] == "A100:40GB:8"
    named = {"gpu": "GH200"}
    assert skypilot_task(job(1, "GH200"), named, RentedInputs())["resources"]["accelerators"] == "GH200:8"


AGENT = f"""#!{sys.executable}
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print(os.environ["PLAIT_NODE_RANK"], os.environ["PLAIT_LEADER"], *sys.argv[1:], flush=True)
if os.environ["END"]:
    sys.exit(int(os.environ["END"]))
signal.sigwait([signal.SIGTERM])
print("saved")
sys.exit(143)
"""
"""Stands for plait node: ends with the code END, or waits for a signal."""


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize("end", ["0", "1", "75", ""])
def test_a_node_of_dstack_waits_to_be_started_again_and_passes_signals_on(end: str, shell: str, tmp_path: Path) -> None:
    for name, text in (("python3", AGENT), ("sleep", '#!/bin/sh\necho "waits $1"\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    *_, command = dstack_task(job(2), {"volume": "w"}, RentedInputs())["commands"]
    place = {"DSTACK_NODE_RANK": "1", "DSTACK_MASTER_NODE_IP": "10.0.0.1", "END": end}
    with subprocess.Popen(
        [shell, "-c", f"true && {command.strip()}"],
        env={**place, "PATH": f"{tmp_path}:/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1 10.0.0.1 -P -m plait node --nodes 2 -- own.py --name a b\n"
        if not end:
            process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    waits = "waits 600\n"
    assert (process.returncode, rest) == {"0": (0, ""), "1": (1, waits), "75": (75, waits), "": (143, "saved\n")}[end]
