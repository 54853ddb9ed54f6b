"""The pod of a node: non-root, with a root file system that nobody writes, and the variables that tell it who leads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.deploy.cluster_job import (
    GPUS_VARIABLE,
    LEADER_VARIABLE,
    PORT_VARIABLE,
    RANK_VARIABLE,
    USUAL_PORT,
    ClusterJob,
)

USER_ID = 10001
"""Of the image that install/Containerfile makes, and of every pod."""
WORK_FOLDER = "/work"
"""Where the volume with text, runs and prepared data lies, and where the command works."""
INPUT_FOLDER = "/etc/plait"
CONTAINER = "node"
READER_CONTAINER = "reader"
READER_S = 3600
"""Of a pod that only waits while files are copied: it ends by itself."""
SECRET_KEY = "secret"
_COMPLETION_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
SAME_ZONE = "topology.kubernetes.io/zone"
SAME_MACHINE = "kubernetes.io/hostname"


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesRequest:
    """What a platform asks for beside nodes and devices; empty where the cluster's own choice is taken."""

    image: str
    namespace: str = ""
    queue: str = ""
    """Kueue's LocalQueue; empty: the job is not queued."""
    volume: str = ""
    """A claim that exists; empty makes one."""
    storage: str = "100Gi"
    storage_class: str = ""
    cpu: str = ""
    memory: str = ""
    gpu_resource: str = "nvidia.com/gpu"
    rdma: str = ""
    """A resource of the cluster's RDMA device plugin; each pod asks for one, and keeps its own network."""
    network: str = ""
    """ "host": pods use their machines' network, for RDMA that has no device plugin."""
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """The recipe or the program by name: small texts that travel in a ConfigMap."""


def config_map_key(name: str) -> str:
    """A file's name as a ConfigMap takes it: letters, digits, "-", "_" and "." alone."""
    return re.sub(r"[^-._a-zA-Z0-9]", "-", name)


def run_labels(job: ClusterJob) -> dict[str, str]:
    """By which the pods of this run are found, and nobody else's."""
    return {"app.kubernetes.io/name": "plait", "app.kubernetes.io/instance": job.name}


def pod_template(job: ClusterJob, request: KubernetesRequest, leader: str) -> dict[str, Any]:
    """The template of every pod of a job; `leader` is the name of node 0's pod in the cluster's DNS."""
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_s,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": _pod_security(),
        **({"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if request.network == "host" else {}),
        **_places(job),
        **_tolerations(job, request),
        "containers": [_container(job, request, leader)],
        "volumes": _volumes(job, request),
    }
    return {"metadata": {"labels": run_labels(job)}, "spec": spec}


def _pod_security() -> dict[str, Any]:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "runAsGroup": USER_ID,
        "fsGroup": USER_ID,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _container_security(request: KubernetesRequest | None) -> dict[str, Any]:
    """Nothing but to run; RDMA keeps memory in place, which needs a capability of its own."""
    lock = {"add": ["IPC_LOCK"]} if request is not None and request.rdma else {}
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], **lock},
    }


def claim_name(job: ClusterJob, request: KubernetesRequest) -> str:
    """The claim of the volume that the pods work on."""
    return request.volume or f"{job.name}-work"


def reader_pod(name: str, image: str, claim: str, namespace: str) -> dict[str, Any]:
    """A pod that only waits, so that files of a run's volume can be copied once none of the run's own pods runs."""
    labels = {"app.kubernetes.io/name": "plait-fetch", "app.kubernetes.io/instance": name}
    container = {
        "name": READER_CONTAINER,
        "image": image,
        "command": ["sleep", str(READER_S)],
        "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        "securityContext": _container_security(None),
        "volumeMounts": [{"name": "work", "mountPath": WORK_FOLDER, "readOnly": True}],
    }
    spec = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": READER_S,
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": _pod_security(),
        "containers": [container],
        "volumes": [{"name": "work", "persistentVolumeClaim": {"claimName": claim}}],
    }
    about = {"name": f"{name}-fetch", **({"namespace": namespace} if namespace else {}), "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec}


def _places(job: ClusterJob) -> dict[str, Any]:
    """One pod a machine, so that no two share its cores and links; all of them near each other."""
    if job.nodes == 1:
        return {}
    selector = {"labelSelector": {"matchLabels": run_labels(job)}}
    spread = {"maxSkew": 1, "topologyKey": SAME_MACHINE, "whenUnsatisfiable": "DoNotSchedule", **selector}
    zone = {**selector, "topologyKey": SAME_ZONE}
    affinity = (
        {"requiredDuringSchedulingIgnoredDuringExecution": [zone]}
        if job.near
        else {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": zone}]}
    )
    return {"topologySpreadConstraints": [spread], "affinity": {"podAffinity": affinity}}


def _tolerations(job: ClusterJob, request: KubernetesRequest) -> dict[str, Any]:
    """Machines with GPUs often keep pods away that ask for none, by a taint that has the resource's name."""
    if not job.uses_gpus:
        return {}
    return {"tolerations": [{"key": request.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}]}


def container_command(job: ClusterJob) -> list[str]:
    """What the container runs, the same in each pod. Kubernetes would put variables in place of "$(NAME)", and reads
    "$$" as "$"."""
    target = [word.replace("$", "$$") for word in job.target]
    return ["python3", "-P", "-m", "plait", "node", "--nodes", str(job.nodes), "--", *target]


def container_variables(job: ClusterJob, leader: str) -> list[dict[str, Any]]:
    """The environment: which node this is, who leads, and the secret, which is no part of the manifest."""
    variables: list[dict[str, Any]] = [{"name": "HOME", "value": "/tmp"}, {"name": "PYTHONUNBUFFERED", "value": "1"}]
    if gpus := job.groups[0].gpus:
        variables.append({"name": GPUS_VARIABLE, "value": str(gpus)})
    if job.nodes == 1:
        return variables
    secret = {"secretKeyRef": {"name": f"{job.name}-join", "key": SECRET_KEY}}
    return [
        {"name": RANK_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": _COMPLETION_INDEX}}},
        {"name": LEADER_VARIABLE, "value": leader},
        {"name": PORT_VARIABLE, "value": str(USUAL_PORT)},
        {"name": "PLAIT_SECRET", "valueFrom": secret},
        *variables,
    ]


def container_resources(job: ClusterJob, request: KubernetesRequest) -> dict[str, Any]:
    """The same requests and limits, so that no pod is ended for what others took; cores may be had beyond them."""
    gpus = job.groups[0].gpus
    cpu, memory = request.cpu or str(6 * gpus or 4), request.memory or f"{48 * gpus or 16}Gi"
    devices = {request.gpu_resource: gpus} if gpus else {}
    devices |= {request.rdma: 1} if request.rdma else {}
    return {"requests": {"cpu": cpu, "memory": memory, **devices}, "limits": {"memory": memory, **devices}}


def _container(job: ClusterJob, request: KubernetesRequest, leader: str) -> dict[str, Any]:
    mounts = [
        {"name": "work", "mountPath": WORK_FOLDER},
        {"name": "input", "mountPath": INPUT_FOLDER, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    return {
        "name": CONTAINER,
        "image": request.image,
        "command": container_command(job),
        "workingDir": WORK_FOLDER,
        "env": container_variables(job, leader),
        "resources": container_resources(job, request),
        "securityContext": _container_security(request),
        "volumeMounts": mounts,
    }


def _file_names(request: KubernetesRequest) -> dict[str, Any]:
    """Where a file's name is not its key, the file gets its name back in the pod."""
    if all(config_map_key(name) == name for name in request.files):
        return {}
    return {"items": [{"key": config_map_key(name), "path": name} for name in request.files]}


def _volumes(job: ClusterJob, request: KubernetesRequest) -> list[dict[str, Any]]:
    return [
        {"name": "work", "persistentVolumeClaim": {"claimName": claim_name(job, request)}},
        {"name": "input", "configMap": {"name": f"{job.name}-input", **_file_names(request)}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "10Gi"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}},
    ]
