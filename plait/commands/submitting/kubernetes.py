"""Kubernetes: applied by kubectl, found by the run's labels, ended by deleting what starts pods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from plait.checked_json import parse_object
from plait.commands.submitting.over_ssh.transfer import archive_command, unpack_answer
from plait.commands.submitting.pod_states import pod_lines, queue_sentence, running_pod, warning_sentence
from plait.commands.submitting.records import Submitted, keep_record
from plait.commands.submitting.tools import require_tool, tool_answer
from plait.deploy.cluster_job import ClusterJob
from plait.deploy.manifests import JobKind
from plait.deploy.pod import (
    CONTAINER,
    READER_CONTAINER,
    SECRET_KEY,
    WORK_FOLDER,
    KubernetesRequest,
    claim_name,
    reader_pod,
)
from plait.deploy.yaml_text import yaml_document
from plait.errors import PlaitError
from plait.launch.remote.secret import new_secret
from plait.screen.screen import Screen
from plait.working_folder import WorkingFolder

READER_AT_LATEST_S = 180.0


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
    record = Submitted(
        name=job.run,
        label=job.name,
        scheduler="kubernetes",
        job=kind,
        namespace=request.namespace,
        image=request.image,
        volume=claim_name(job, request),
    )
    # Asked before anything is sent: a cluster without that kind of object has no trace of the run then.
    if _is_there(record):
        delete = " ".join(["kubectl delete", kind, job.name, *namespace_words(record)])
        raise PlaitError(
            f"{job.run} is in the cluster already; end it first: plait stop {job.run}, or where it was submitted from "
            f"another folder {delete}"
        )
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
    """What the run's pods are up to, why one waits or ended, and what helps."""
    if lines := pod_lines(_asked(record, "pods", "--selector", _selector(record))):
        return "; ".join(lines)
    if not _is_there(record):
        return "it is not in the cluster any more; plait fetch has its run"
    return f"no pods: {queue_sentence(_asked(record, 'workloads'), record.label) or _newest_warning(record)}"


def _newest_warning(record: Submitted) -> str:
    warnings = _asked(record, "events", "--field-selector", "type=Warning")
    return warning_sentence(warnings, record.label) or "it waits in the queue, or is about to start"


def _asked(record: Submitted, kind: str, *which: str) -> Mapping[str, Any]:
    """A list of objects; an empty one where the cluster does not know that kind, or does not tell."""
    get = ["kubectl", "get", kind, *which, "--output", "json", *namespace_words(record)]
    try:
        said = tool_answer(get, about=f"the {kind} of {record.name}")
    except PlaitError:
        if kind == "pods":
            raise
        return {}
    try:
        return parse_object(said.encode()) if said.strip() else {}
    except ValueError as error:
        raise PlaitError(f"the {kind} of {record.name}: kubectl answers what is no JSON ({error}); update it") from None


def kubernetes_log_lines(record: Submitted) -> Iterator[str]:
    """What node 0 has printed so far."""
    index = f"{_selector(record)},batch.kubernetes.io/job-completion-index=0"
    get = ["kubectl", "logs", "--selector", index, "--tail", "-1", *namespace_words(record)]
    yield from tool_answer(get, about=f"the output of {record.name}").splitlines()


def end_in_kubernetes(record: Submitted) -> None:
    """Delete what starts pods; they save first. Volume and recipe stay."""
    delete = ["kubectl", "delete", record.job, record.label, "--wait=false", *namespace_words(record)]
    tool_answer(delete, about=f"the job {record.name}")


def copy_from_kubernetes(record: Submitted, folder: Path, working: WorkingFolder, screen: Screen) -> None:
    """Copy the run's folder from node 0's pod while it runs, else by a pod that only reads the volume."""
    pod = running_pod(_asked(record, "pods", "--selector", _selector(record)))
    if pod is not None:
        _unpack(record, pod, CONTAINER, folder, working)
        return
    if not record.volume:
        raise PlaitError(f"no pod of {record.name} runs, and its volume is not known; any pod can mount it at /work")
    screen.print(f"reads    the volume {record.volume}, by a pod that is made for it, since none of the run's own runs")
    reader = reader_pod(record.label, record.image, record.volume, record.namespace)
    name, words = reader["metadata"]["name"], namespace_words(record)
    about = f"the pod {name}, which is to read the volume {record.volume}"
    tool_answer(["kubectl", "apply", "--filename", "-"], stdin=yaml_document(reader), about=about)
    try:
        ready = ["kubectl", "wait", "--for=condition=Ready", f"pod/{name}", f"--timeout={READER_AT_LATEST_S:.0f}s"]
        tool_answer([*ready, *words], about=about, within_s=READER_AT_LATEST_S + 30)
        _unpack(record, name, READER_CONTAINER, folder, working)
    finally:
        tool_answer(["kubectl", "delete", "pod", name, "--ignore-not-found", "--wait=false", *words], about=about)


def _unpack(record: Submitted, pod: str, container: str, folder: Path, working: WorkingFolder) -> None:
    archive = archive_command(WORK_FOLDER, folder)
    command = ["kubectl", "exec", *namespace_words(record), pod, "--container", container, "--", *archive]
    unpack_answer(command, working.path, f"the pod {pod} does not give {folder}")


def _selector(record: Submitted) -> str:
    return f"app.kubernetes.io/instance={record.label},app.kubernetes.io/name=plait"
