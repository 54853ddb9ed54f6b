"""A run in Kubernetes from the outside: what its pods are up to in sentences, and its files, also of finished pods."""

from __future__ import annotations

import io
import json
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from plait.clusters.job import Submitted, find_record, keep_record
from plait.clusters.kubernetes import pod_lines, running_pod
from plait.clusters.node import require_promised_gpus
from plait.clusters.request import SubmitRequest
from plait.clusters.submit import submit_or_show
from plait.clusters.submitted import fetch_job, job_state_line
from plait.errors import PlaitError
from plait.screen.screen import SilentScreen
from plait.screen.terminal import TerminalScreen
from tests.clusters.strict import VERSIONS, documents, pod_complaints, pod_specs, restricted_faults

INDEX = "batch.kubernetes.io/job-completion-index"
KUBECTL = r"""#!/bin/sh
# A cluster in a folder: pods.json, what was applied, and a volume that stands for /work.
here=$(dirname "$0")/..
printf '%s\n' "$*" >>"$here/calls"
case "$*" in
  "get pods"*) cat "$here/pods.json";;
  "get workloads"*|"get events"*) cat "$here/$2.json" 2>/dev/null || { echo "no such kind: $2" >&2; exit 1; };;
  "get "*" json "*) cat "$here/job.json" 2>/dev/null;;
  "get "*) [ ! -e "$here/is-there" ] || echo "$2/$3"
    [ ! -e "$here/no-crd" ] || { echo "error: the server doesn't have a resource type \"$2\"" >&2; exit 1; };;
  apply*) cat >>"$here/applied";;
  create*) cat >"$here/secret";;
  wait*) [ ! -e "$here/full" ] || { echo "error: timed out waiting for the condition on $3" >&2; exit 1; };;
  exec*) for last; do :; done; exec tar -c -C "$here/volume" "$last";;
esac
"""


class KubernetesInAFolder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        program = folder / "bin" / "kubectl"
        program.write_text(KUBECTL)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        self.pods()

    def pods(self, *pods: dict[str, Any]) -> None:
        (self.folder / "pods.json").write_text(json.dumps({"items": list(pods)}))

    def calls(self) -> str:
        return (self.folder / "calls").read_text()


@pytest.fixture
def kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KubernetesInAFolder:
    made = KubernetesInAFolder(tmp_path / "cluster")
    monkeypatch.setenv("PATH", f"{made.folder}/bin:/usr/bin:/bin")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("play.py").write_text("import plait\n")
    return made


def pod(index: int, phase: str, **status: Any) -> dict[str, Any]:
    about = {"name": f"play-{index}-abcde", "annotations": {INDEX: str(index)}}
    return {"metadata": about, "status": {"phase": phase, **status}}


def ended(code: int, reason: str = "Error") -> dict[str, Any]:
    return {"containerStatuses": [{"state": {"terminated": {"exitCode": code, "reason": reason}}}]}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"containerStatuses": [{"state": {"waiting": {"reason": reason, "message": message}}}]}


def unscheduled(reason: str, message: str) -> dict[str, Any]:
    return {"conditions": [{"type": "PodScheduled", "status": "False", "reason": reason, "message": message}]}


DISRUPTED = {
    "type": "DisruptionTarget",
    "status": "True",
    "reason": "PreemptionByScheduler",
    "message": "Preempted by x",
}


@pytest.mark.parametrize(
    ("one", "says"),
    [
        (pod(0, "Running"), "node 0 runs"),
        (pod(0, "Succeeded"), "node 0 is finished"),
        (pod(0, "Pending"), "node 0 is about to start"),
        (
            pod(
                0, "Pending", **unscheduled("Unschedulable", "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")
            ),
            "node 0 waits for a machine (0/3 nodes are available: 3 Insufficient nvidia.com/gpu)",
        ),
        (pod(0, "Pending", **unscheduled("SchedulingGated", "")), "waits in the queue (Kueue has not let it in)"),
        (pod(0, "Pending", **waiting("ImagePullBackOff", 'Back-off pulling image "a:1"')), "image cannot be pulled"),
        (pod(0, "Pending", **waiting("CreateContainerConfigError", 'secret "x" not found')), "submit again (secret"),
        (
            pod(0, "Failed", **ended(137, "OOMKilled")),
            "exit code 137: it had too little memory: submit again with more",
        ),
        (pod(0, "Failed", **ended(128, "StartError")), "its image has no python3 with plait"),
        (pod(0, "Failed", **ended(2)), "exit code 2: its input is wrong"),
        (pod(0, "Failed", **ended(93)), "it made no progress"),
        (
            pod(0, "Failed", reason="Evicted", message="The node was low on resource: ephemeral-storage."),
            "was evicted (The node was low on resource: ephemeral-storage); it restarts by itself and continues",
        ),
        (pod(0, "Failed", conditions=[DISRUPTED], **ended(143)), "was taken away (Preempted by x); it restarts"),
        (pod(0, "Unknown"), "is Unknown: see kubectl get pods"),
    ],
)
def test_each_state_of_a_pod_is_a_sentence_with_what_helps(one: dict[str, Any], says: str) -> None:
    [line] = pod_lines([one])
    assert says in line and "\n" not in line


def test_alike_pods_are_one_line_and_only_a_running_first_one_is_read() -> None:
    pods = [pod(number, "Running") for number in (3, 1, 2)] + [pod(0, "Pending")]
    assert pod_lines(pods) == ["node 0 is about to start", "node 1-3 runs"]
    assert running_pod(pods) is None
    assert running_pod([pod(1, "Running"), pod(0, "Running")]) == "play-0-abcde"


def workload(name: str, **conditions: str) -> dict[str, Any]:
    said = [{"type": kind, "status": "False", "message": text} for kind, text in conditions.items()]
    return {"metadata": {"ownerReferences": [{"kind": "JobSet", "name": name}]}, "status": {"conditions": said}}


def warning(name: str, at: str, message: str) -> dict[str, Any]:
    return {"involvedObject": {"name": name}, "lastTimestamp": f"2026-11-25T{at}:00Z", "message": message}


QUOTA = 'Error creating: pods "play-node-0-0-x" is forbidden: exceeded quota: gpus, requested: 8, limited: 8'


@pytest.mark.parametrize(
    ("workloads", "events", "says"),
    [
        ([workload("play", QuotaReserved="LocalQueue research doesn't exist")], [],
         "it waits in Kueue's queue (LocalQueue research doesn't exist): kubectl describe localqueue shows it"),
        ([workload("other", QuotaReserved="no room")], [warning("other-node-0", "10:00", "not ours")],
         "it waits in the queue, or is about to start"),
        (None, [warning("play", "09:00", "an older one"), warning("play-node-0", "10:00", QUOTA)],
         f"it waits ({QUOTA}): ask for less, or end other jobs of the namespace"),
        (None, None, "it waits in the queue, or is about to start"),
    ],
)  # fmt: skip
def test_a_job_without_pods_says_why(
    workloads: list[Any] | None, events: list[Any] | None, says: str, kubernetes: KubernetesInAFolder
) -> None:
    """By Kueue, by a quota, or by nobody: a cluster need not know workloads, nor let people read events."""
    send()
    (kubernetes.folder / "is-there").touch()
    for kind, items in (("workloads", workloads), ("events", events)):
        if items is not None:
            (kubernetes.folder / f"{kind}.json").write_text(json.dumps({"items": items}))
    assert job_state_line("play") == f"job      play on kubernetes: no pods: {says}"


def send(*, kind: str = "jobset") -> str:
    told = io.StringIO()
    request = SubmitRequest(
        target=("play.py",),
        scheduler="kubernetes",
        cluster="4x(8xH100)",
        nodes=2,
        kind=kind,  # type: ignore[arg-type]
        options=("image=registry.example/plait:1", "namespace=train"),
    )
    submit_or_show(
        request, deed="send", out=None, screen=TerminalScreen(Console(file=told, width=100)), show=lambda text: None
    )
    return told.getvalue()


def run_on_volume(kubernetes: KubernetesInAFolder) -> None:
    run = kubernetes.folder / "volume" / "runs" / "play"
    run.mkdir(parents=True)
    (run / "recipe.toml").write_text("[run]\n")


@pytest.mark.parametrize("runs", ["still", "no more"])
def test_files_come_from_the_first_pod_or_once_it_ended_from_the_volume(
    runs: str, kubernetes: KubernetesInAFolder
) -> None:
    send()
    run_on_volume(kubernetes)
    kubernetes.pods(pod(0, "Running" if runs == "still" else "Succeeded"), pod(1, "Succeeded"))
    with pytest.raises(PlaitError, match="play has not begun to train: node 0"):
        fetch_job("play", SilentScreen())  # the folder has no plan yet; what is there was copied
    assert Path("runs/play/recipe.toml").read_text() == "[run]\n"
    calls, applied = kubernetes.calls(), (kubernetes.folder / "applied").read_text()
    if runs == "still":
        assert (
            "exec --namespace train play-0-abcde --container node -- sh -c tar" in calls
            and "kind: Pod\n" not in applied
        )
        return
    assert "exec --namespace train play-fetch --container reader -- sh -c tar" in calls
    assert calls.rstrip().split("\n")[-2].startswith("delete pod play-fetch --ignore-not-found --wait=false")
    reader = yaml.safe_load(applied[applied.rindex("apiVersion:") :])
    assert reader["kind"] == "Pod" and not restricted_faults(reader["spec"])
    assert [said for version in VERSIONS for said in pod_complaints(reader["spec"], version)] == []
    [volume] = reader["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == "play-work"
    assert (
        reader["spec"]["securityContext"]["runAsNonRoot"]
        and reader["metadata"]["labels"]["app.kubernetes.io/name"] != "plait"
    ), "it is none of the run's pods"


def test_the_secret_is_deleted_with_the_job_where_that_is_allowed(kubernetes: KubernetesInAFolder) -> None:
    about = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "play", "uid": "1-2"}}
    (kubernetes.folder / "job.json").write_text(json.dumps(about))
    send()
    [patch] = [line for line in kubernetes.calls().splitlines() if line.startswith("patch secret play-join ")]
    owner = {"apiVersion": about["apiVersion"], "kind": "JobSet", "name": "play", "uid": "1-2"}
    assert json.dumps({"metadata": {"ownerReferences": [owner]}}) in patch


def test_a_pod_that_cannot_read_the_volume_is_taken_away_and_said(kubernetes: KubernetesInAFolder) -> None:
    send()
    (kubernetes.folder / "full").touch()
    with pytest.raises(
        PlaitError, match=r"the pod play-fetch, which is to read the volume play-work: .* no room for it"
    ):
        fetch_job("play", SilentScreen())
    assert kubernetes.calls().rstrip().split("\n")[-1].startswith("delete pod play-fetch")


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_a_cluster_without_that_kind_of_object_keeps_no_trace(kind: str, kubernetes: KubernetesInAFolder) -> None:
    (kubernetes.folder / "no-crd").touch()
    with pytest.raises(PlaitError, match=r"doesn't have a resource type .*have the operator installed .*--kind job"):
        send(kind=kind)
    assert not (kubernetes.folder / "applied").exists() and not (kubernetes.folder / "secret").exists()
    with pytest.raises(PlaitError, match='no job "play" was submitted'):
        find_record("play")


def test_where_a_job_stands_is_its_pods_sentences(kubernetes: KubernetesInAFolder) -> None:
    send()
    assert job_state_line("play") == (
        "job      play on kubernetes: it is not in the cluster any more; plait fetch has its run"
    )
    kubernetes.pods(pod(0, "Failed", reason="Evicted", message="low on memory"))
    assert "node 0 was evicted (low on memory)" in (job_state_line("play") or "")
    for empty in ("{}", '{"items": null}', '{"items": [null]}'):
        (kubernetes.folder / "pods.json").write_text(empty)
        assert "it is not in the cluster any more" in (job_state_line("play") or ""), empty
    (kubernetes.folder / "pods.json").write_text("Flag --output is deprecated")
    with pytest.raises(PlaitError, match="answer is not JSON"):
        job_state_line("play")


def test_a_record_of_an_earlier_version_says_where_its_files_are(kubernetes: KubernetesInAFolder) -> None:
    keep_record(Submitted(name="old", label="old", scheduler="kubernetes", job="job"))
    with pytest.raises(PlaitError, match="its volume is not known; any pod can mount it"):
        fetch_job("old", SilentScreen())


def test_gpus_that_a_node_was_given_and_cannot_use_end_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"PLAIT_GPUS": "8"}
    require_promised_gpus({}, tmp_path)
    require_promised_gpus({"SLURM_GPUS_ON_NODE": "0"}, tmp_path)
    monkeypatch.setattr("plait.clusters.node.version", lambda name: "2.13.0+cpu")
    with pytest.raises(PlaitError, match=r"was given 8 GPUs, and torch 2\.13\.0\+cpu is built without CUDA; build the"):
        require_promised_gpus(given, tmp_path)
    monkeypatch.setattr("plait.clusters.node.version", lambda name: "2.13.0")
    with pytest.raises(PlaitError, match=r"none is seen inside the container; a pod needs NVIDIA's device plugin"):
        require_promised_gpus({"SLURM_GPUS_ON_NODE": "8"}, tmp_path)
    (tmp_path / "nvidia0").touch()
    require_promised_gpus(given, tmp_path)


def shown(*options: str) -> str:
    texts: list[str] = []
    request = SubmitRequest(
        target=("play.py",), scheduler="kubernetes", cluster="4x(8xH100)", nodes=2, options=("image=a:1", *options)
    )
    submit_or_show(request, deed="show", out=None, screen=SilentScreen(), show=texts.append)
    return texts[0]


def test_rdma_is_a_device_of_each_pod_and_the_machines_network_only_where_asked(
    kubernetes: KubernetesInAFolder,
) -> None:
    usual, device, host = shown(), shown("rdma=rdma/hca_shared_devices_a"), shown("network=host")
    for text in (usual, device, host):
        [pod_spec] = [spec for value in documents(text) for spec in pod_specs(value)]
        assert [said for version in VERSIONS for said in pod_complaints(pod_spec, version)] == []
        assert bool(pod_spec.get("hostNetwork")) == (text is host)
    assert "hca_shared" not in usual and device.count("rdma/hca_shared_devices_a: 1") == 2
    assert "IPC_LOCK" in device and "IPC_LOCK" not in usual + host
    assert "a NetworkPolicy does not hold there" in host and "dnsPolicy: ClusterFirstWithHostNet" in host
    assert "name: PLAIT_GPUS" in usual
    for options, says in (
        (("network=bridge",), "is not in the form that kubernetes uses; write for example host"),
        (("network=host", "rdma=a/b"), "needs no host network"),
    ):
        with pytest.raises(PlaitError, match=says):
            shown(*options)
