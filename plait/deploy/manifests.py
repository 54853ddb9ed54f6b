"""The manifests of a job in Kubernetes: a JobSet, a TrainJob or a plain Job, and what each of them needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from plait.deploy.cluster_job import ClusterJob
from plait.deploy.pod import (
    CONTAINER,
    SECRET_KEY,
    KubernetesRequest,
    config_map_key,
    container_command,
    container_resources,
    container_variables,
    pod_template,
    run_labels,
)
from plait.deploy.yaml_text import yaml_document

JobKind = Literal["jobset", "trainjob", "job"]
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
RESTARTS_AT_MOST = 20
NOT_AGAIN = (2, 93)
"""Exit codes after which another try would end as this one did: bad input, and no progress."""
_BLOCK, _GROUP = "node", "batch.kubernetes.io"
SECRET_ADVICE = (
    "the secret is no part of these manifests; make it once, before them:",
    "    tr -dc 0-9A-HJKMNP-TV-Z </dev/urandom | head -c 28 |",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesObject:
    """One object for the cluster, and what a reader is told of it."""

    value: Mapping[str, Any]
    comments: tuple[str, ...] = ()


def manifests(job: ClusterJob, request: KubernetesRequest, kind: JobKind) -> list[KubernetesObject]:
    """All objects of a job in the order in which they are made; the last one starts it. None holds a secret."""
    objects = [_input(job, request)]
    objects += [] if request.volume else [_claim(job, request)]
    objects += [_network_policy(job, request)] if job.nodes > 1 else []
    match kind:
        case "jobset":
            return [*objects, _job_set(job, request)]
        case "trainjob":
            return [*objects, _training_runtime(job, request), _train_job(job, request)]
        case "job":
            return [*objects, *([_service(job, request)] if job.nodes > 1 else []), _plain_job(job, request)]


def manifests_text(job: ClusterJob, request: KubernetesRequest, kind: JobKind) -> str:
    """The manifests as one file for `kubectl apply -f`."""
    first = ["Made by plait submit.", *job.why, *secret_advice(job, request)]
    documents = [yaml_document(each.value, each.comments) for each in manifests(job, request, kind)]
    return "".join(f"# {line}\n" for line in first) + "---\n" + "---\n".join(documents)


def secret_advice(job: ClusterJob, request: KubernetesRequest) -> list[str]:
    """How the secret comes into the cluster without being an argument of any program."""
    if job.nodes == 1:
        return []
    where = f" --namespace {request.namespace}" if request.namespace else ""
    create = f"kubectl create secret generic {job.name}-join{where} --from-file={SECRET_KEY}=/dev/stdin"
    return [*SECRET_ADVICE, f"      {create}"]


def _about(job: ClusterJob, request: KubernetesRequest, name: str, *, starts: bool = False) -> dict[str, Any]:
    """An object's name and labels. What starts pods waits in a queue, if one is named, and is let in as a whole."""
    queue = {QUEUE_LABEL: request.queue} if starts and request.queue else {}
    namespace = {"namespace": request.namespace} if request.namespace else {}
    return {"name": name, **namespace, "labels": {**run_labels(job), **queue}}


def _input(job: ClusterJob, request: KubernetesRequest) -> KubernetesObject:
    value = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _about(job, request, f"{job.name}-input"),
        "data": {config_map_key(name): text for name, text in request.files.items()},
    }
    return KubernetesObject(value=value, comments=("The recipe or the program.",))


def _claim(job: ClusterJob, request: KubernetesRequest) -> KubernetesObject:
    spec = {
        "accessModes": ["ReadWriteMany" if job.nodes > 1 else "ReadWriteOnce"],
        **({"storageClassName": request.storage_class} if request.storage_class else {}),
        "resources": {"requests": {"storage": request.storage}},
    }
    value = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _about(job, request, f"{job.name}-work"),
        "spec": spec,
    }
    return KubernetesObject(
        value=value, comments=("Text, prepared data, runs and checkpoints; all pods see it at /work.",)
    )


def _network_policy(job: ClusterJob, request: KubernetesRequest) -> KubernetesObject:
    own = {"podSelector": {"matchLabels": run_labels(job)}}
    names = [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]
    spec = {
        "podSelector": own["podSelector"],
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [own]}],
        "egress": [{"to": [own]}, {"ports": names}],
    }
    value = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _about(job, request, job.name),
        "spec": spec,
    }
    return KubernetesObject(
        value=value, comments=("Only this run's pods talk to each other; beside that they ask for names.",)
    )


def _service(job: ClusterJob, request: KubernetesRequest) -> KubernetesObject:
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": run_labels(job)}
    value = {"apiVersion": "v1", "kind": "Service", "metadata": _about(job, request, job.name), "spec": spec}
    return KubernetesObject(value=value, comments=("Names for the pods, no address of its own (headless).",))


def _job_set(job: ClusterJob, request: KubernetesRequest) -> KubernetesObject:
    value = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _about(job, request, job.name, starts=True),
        "spec": {**({"suspend": True} if request.queue else {}), **_job_set_spec(job, request)},
    }
    return KubernetesObject(value=value, comments=_start_comments(job, request))


def _job_set_spec(job: ClusterJob, request: KubernetesRequest) -> dict[str, Any]:
    """One set of pods, all made anew when one is lost, and not again for what another try cannot mend."""
    rules = [
        {"name": "timeIsOver", "action": "FailJobSet", "onJobFailureReasons": ["DeadlineExceeded"]},
        {
            "name": "notAgain",
            "action": "FailJobSet",
            "onJobFailureReasons": ["PodFailurePolicy"],
            "onJobFailureMessagePatterns": [f".*exit code {code}.*" for code in NOT_AGAIN],
        },
        {
            "name": "nodeTakenAway",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
            "onJobFailureMessagePatterns": [".*DisruptionTarget.*"],
        },
    ]
    restarts = {"maxRestarts": RESTARTS_AT_MOST, "restartStrategy": "BlockingRecreate", "rules": rules}
    template = {"spec": _indexed_job(job, request, leader=f"{job.name}-{_BLOCK}-0-0.{job.name}", backoff=0)}
    return {
        "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
        "failurePolicy": restarts,
        "replicatedJobs": [{"name": _BLOCK, "replicas": 1, "template": template}],
    }


def _indexed_job(job: ClusterJob, request: KubernetesRequest, *, leader: str, backoff: int) -> dict[str, Any]:
    """The spec of a Job with a pod for each node, numbered from 0 on."""
    lost: Sequence[Mapping[str, Any]] = [{"type": "DisruptionTarget", "status": "True"}]
    codes = {"containerName": CONTAINER, "operator": "In", "values": list(NOT_AGAIN)}
    return {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": backoff,
        "podReplacementPolicy": "Failed",
        **({"activeDeadlineSeconds": job.time_s} if job.time_s is not None else {}),
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": codes},
                {"action": "Ignore" if backoff else "FailJob", "onPodConditions": lost},
            ]
        },
        "template": pod_template(job, request, leader),
    }


def _training_runtime(job: ClusterJob, request: KubernetesRequest) -> KubernetesObject:
    spec = {"mlPolicy": {"numNodes": job.nodes}, "template": {"spec": _runtime_job_set(job, request)}}
    value = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": _about(job, request, job.name),
        "spec": spec,
    }
    return KubernetesObject(
        value=value, comments=("How pods of this run are made; plait starts the workers in them itself.",)
    )


def _runtime_job_set(job: ClusterJob, request: KubernetesRequest) -> dict[str, Any]:
    """The JobSet behind a TrainJob, which itself sets the number of pods."""
    spec = _job_set_spec(job, request)
    [block] = spec["replicatedJobs"]
    inner = {
        key: value for key, value in block["template"]["spec"].items() if key not in ("completions", "parallelism")
    }
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    return {**spec, "replicatedJobs": [{**block, "template": {"metadata": {"labels": labels}, "spec": inner}}]}


def _train_job(job: ClusterJob, request: KubernetesRequest) -> KubernetesObject:
    trainer = {
        "image": request.image,
        "command": container_command(job),
        "env": container_variables(job, f"{job.name}-{_BLOCK}-0-0.{job.name}"),
        "numNodes": job.nodes,
        "resourcesPerNode": container_resources(job, request),
    }
    runtime = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name}
    value = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _about(job, request, job.name, starts=True),
        "spec": {**({"suspend": True} if request.queue else {}), "runtimeRef": runtime, "trainer": trainer},
    }
    return KubernetesObject(value=value, comments=_start_comments(job, request))


def _plain_job(job: ClusterJob, request: KubernetesRequest) -> KubernetesObject:
    spec = _indexed_job(job, request, leader=f"{job.name}-0.{job.name}", backoff=RESTARTS_AT_MOST * job.nodes)
    template = spec["template"]
    named = {**template, "spec": {**({"subdomain": job.name} if job.nodes > 1 else {}), **template["spec"]}}
    value = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _about(job, request, job.name, starts=True),
        "spec": {**({"suspend": True} if request.queue else {}), **spec, "template": named},
    }
    return KubernetesObject(value=value, comments=_start_comments(job, request))


def _start_comments(job: ClusterJob, request: KubernetesRequest) -> tuple[str, ...]:
    """What the placement of the pods is for."""
    host = (
        "Pods use their machines' network, as asked (RDMA without a device plugin): a NetworkPolicy does not hold "
        "there, so the machines' own network must be private.",
    )
    zone = job.near or "all pods in one zone, if it has room: each step sends gradients between them"
    queued = (f"Kueue lets all pods of it in at once, or none (queue {request.queue}).",) if request.queue else ()
    host = host if request.network == "host" else ()
    return (f"One pod a machine, with all devices of a tensor group; {zone}.", *queued, *host)
