"""Kubernetes: applied by kubectl, found by the run's labels, ended by deleting what starts pods."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from plait.commands.submitting.records import Submitted, keep_record, record_if_any
from plait.commands.submitting.tools import require_tool, tool_answer
from plait.deploy.cluster_job import ClusterJob
from plait.deploy.manifests import JobKind
from plait.deploy.pod import SECRET_KEY, KubernetesRequest
from plait.errors import PlaitError
from plait.launch.remote.secret import new_secret
from plait.screen.screen import Screen
from plait.working_folder import WorkingFolder


def send_to_kubernetes(
    job: ClusterJob,
    request: KubernetesRequest,
    kind: JobKind,
    text: str,
    screen: Screen,
    working: WorkingFolder,
) -> None:
    """Make the secret, then all objects; raises PlaitError where the run is there already, or the cluster refuses."""
    require_tool("kubectl", "install it, or add --dry-run to see what would be sent")
    record = Submitted(name=job.run, label=job.name, scheduler="kubernetes", job=kind, namespace=request.namespace)
    before = record_if_any(job.run, working)
    if before is not None and before.scheduler == "kubernetes" and _is_there(before):
        raise PlaitError(f"{job.run} is in the cluster already; end it first: plait stop {job.run}")
    if job.nodes > 1:
        _make_secret(record)
    tool_answer(["kubectl", "apply", "--filename", "-"], stdin=text, about=f"the job {job.name}")
    keep_record(record, working)
    screen.print(f"sent     {job.name}: a {kind} in Kubernetes")
    screen.print(f"         plait status {job.run}, plait logs {job.run}, plait stop {job.run}, plait fetch {job.run}")


def _make_secret(record: Submitted) -> None:
    """A fresh secret, told to kubectl by standard input; one that an earlier start left is replaced."""
    name = f"{record.label}-join"
    delete = ["kubectl", "delete", "secret", name, "--ignore-not-found", *namespace_words(record)]
    tool_answer(delete, about="the secret")
    create = ["kubectl", "create", "secret", "generic", name, f"--from-file={SECRET_KEY}=/dev/stdin"]
    tool_answer([*create, *namespace_words(record)], stdin=new_secret().text, about="the secret")


def namespace_words(record: Submitted) -> list[str]:
    """The namespace as kubectl takes it."""
    return ["--namespace", record.namespace] if record.namespace else []


def _is_there(record: Submitted) -> bool:
    get = ["kubectl", "get", record.job, record.label, "--ignore-not-found", "--output", "name"]
    return bool(tool_answer([*get, *namespace_words(record)], about=f"the job {record.name}").strip())


def kubernetes_state(record: Submitted) -> str:
    """The phases of the run's pods, and the scheduler's reason for one that waits."""
    columns = "NAME:.metadata.name,PHASE:.status.phase,WHY:.status.conditions[?(@.status=='False')].message"
    get = ["kubectl", "get", "pods", "--selector", _selector(record), "--no-headers", "--output"]
    said = tool_answer(
        [*get, f"custom-columns={columns}", *namespace_words(record)], about=f"the pods of {record.name}"
    )
    return "; ".join(" ".join(line.split()) for line in said.splitlines()) or "no pods yet: it waits in the queue"


def kubernetes_log_lines(record: Submitted) -> Iterator[str]:
    """What node 0 has printed so far."""
    index = f"{_selector(record)},batch.kubernetes.io/job-completion-index=0"
    get = ["kubectl", "logs", "--selector", index, "--tail", "-1", *namespace_words(record)]
    yield from tool_answer(get, about=f"the output of {record.name}").splitlines()


def end_in_kubernetes(record: Submitted) -> None:
    """Delete what starts pods; they save first. Volume and recipe stay."""
    delete = ["kubectl", "delete", record.job, record.label, "--wait=false", *namespace_words(record)]
    tool_answer(delete, about=f"the job {record.name}")


def copy_from_kubernetes(record: Submitted, folder: Path) -> None:
    """Copy the run's folder from node 0's pod."""
    index = f"{_selector(record)},batch.kubernetes.io/job-completion-index=0"
    get = ["kubectl", "get", "pods", "--selector", index, "--output", "name", *namespace_words(record)]
    pods = tool_answer(get, about=f"the pods of {record.name}").split()
    if not pods:
        raise PlaitError(f"no pod of {record.name} is there; its files are on the volume, which any pod can mount")
    source = f"{pods[0].removeprefix('pod/')}:/work/{folder}"
    copy = ["kubectl", "cp", source, str(folder), "--container", "node", *namespace_words(record)]
    tool_answer(copy, about=f"the files of {record.name}", within_s=3600)


def _selector(record: Submitted) -> str:
    return f"app.kubernetes.io/instance={record.label},app.kubernetes.io/name=plait"
