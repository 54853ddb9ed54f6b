"""Kubernetes: the machines by kubectl, a job's manifests, and its pods' states, output and files.

Manifests are plain dicts: a JobSet, a TrainJob or a Job, and what each of them needs. None holds a secret.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from plait.checked_json import parse_object
from plait.clusters.job import (
    GPUS_VARIABLE,
    LEADER_VARIABLE,
    PORT_VARIABLE,
    RANK_VARIABLE,
    SECRET_FILE_VARIABLE,
    USUAL_PORT,
    ClusterJob,
    ClusterSystem,
    Outgoing,
    Submitted,
    keep_record,
    node_arguments,
)
from plait.clusters.machines import SERVER, NodeKind, cluster_of_node_kinds
from plait.clusters.request import JobKind, Option, SubmitRequest, read_own_text
from plait.clusters.tools import DESCRIBE, archive_command, tool_answer, unpack_answer
from plait.commands.programs.program_file import program_bytes
from plait.errors import PlaitError
from plait.hosts.handshake import new_secret
from plait.machines.catalog import find_device_by_driver_name
from plait.machines.cluster import Cluster
from plait.recipe.schema import RunConfig
from plait.screen.screen import Screen
from plait.working_folder import WorkingFolder

_QUANTITY = r"\d+(\.\d+)?([kMGTPE]|[KMGTPE]i)?"
_OBJECT_NAME = r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_HOST = r"[A-Za-z0-9][A-Za-z0-9.-]*(:\d+)?"
IMAGE_FORM = rf"({_HOST}/)?[a-z0-9]+([._-]+[a-z0-9]+|/[a-z0-9]+)*(:\w[\w.-]{{0,127}})?(@sha256:[0-9a-f]+)?"
_OPTIONS: Mapping[str, Option] = {
    "image": Option("the container image (needed)", IMAGE_FORM, "registry.example/plait:1"),
    "namespace": Option("the namespace", r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", "research"),
    "queue": Option("Kueue's LocalQueue", _OBJECT_NAME, "research"),
    "volume": Option("a claim that exists; one is made if left out", _OBJECT_NAME, "my-claim"),
    "storage": Option("the size of the claim that is made, such as 100Gi", _QUANTITY, "100Gi"),
    "storage_class": Option("its class", _OBJECT_NAME, "standard"),
    "cpu": Option("cores of each pod", r"\d+(\.\d{1,3})?|\d+m", "16"),
    "memory": Option("memory of each pod, such as 64Gi", _QUANTITY, "64Gi"),
    "rdma": Option(
        "a resource of the RDMA device plugin, such as rdma/hca_shared_devices_a: each pod asks for one",
        rf"{_OBJECT_NAME}/[A-Za-z0-9]([\w.-]{{0,61}}[A-Za-z0-9])?",
        "rdma/hca_shared_devices_a",
    ),
    "network": Option("host, where RDMA has no device plugin: pods use their machines' network", "host", "host"),
    "patch": Option("a YAML file that is merged into the manifests: by kind, Pod for the pods' template", ".+"),
    "grace": Option("how long a pod gets to save before it is removed, such as 5 minutes", ".*"),
}


# The machines.


def _cluster(request: SubmitRequest, options: Mapping[str, str]) -> Cluster:
    """The nodes that take pods."""
    said = tool_answer(["kubectl", "get", "nodes", "--output", "json"], about="the nodes of Kubernetes", within_s=30)
    try:
        nodes = kubernetes_nodes(parse_object(said.encode()))
    except (ValueError, KeyError, AttributeError) as error:
        raise PlaitError(f"the nodes of Kubernetes: kubectl's answer is not understood ({error}); {DESCRIBE}") from None
    return cluster_of_node_kinds(nodes, "Kubernetes")


def _products_of(job: ClusterJob) -> tuple[str, ...]:
    """The product names that machines with the job's GPUs have as labels."""
    if not job.uses_gpus:
        return ()
    said = tool_answer(["kubectl", "get", "nodes", "--output", "json"], about="the nodes of Kubernetes", within_s=30)
    return gpu_products(parse_object(said.encode()), job.groups[0].device)


def gpu_products(answer: Mapping[str, Any], device: str) -> tuple[str, ...]:
    """The product names, sorted, that nodes of a NodeList with this device of the catalogue have as a label."""
    labels = [item.get("metadata", {}).get("labels", {}).get(GPU_PRODUCT_LABEL, "") for item in _items(answer)]
    found = {text for text in labels if text and (known := find_device_by_driver_name(text)) and known.name == device}
    return tuple(sorted(found))


def kubernetes_nodes(answer: Mapping[str, Any]) -> list[NodeKind]:
    """The nodes of a NodeList that may be used: those with GPUs, or where no node has any, all."""
    found = [_node_kind(item) for item in _items(answer) if _takes_pods(item.get("spec", {}))]
    return [kind for kind in found if kind.device != SERVER] or found


def _takes_pods(spec: Mapping[str, Any]) -> bool:
    taints = spec.get("taints") or []
    effects = [taint.get("effect") for taint in taints if "nvidia.com/gpu" not in taint.get("key", "")]
    return not spec.get("unschedulable") and "NoSchedule" not in effects


def _node_kind(item: Mapping[str, Any]) -> NodeKind:
    labels, room = item["metadata"].get("labels", {}), item["status"].get("allocatable", {})
    cpu = str(room.get("cpu", "1"))
    cores = max(1, int(cpu.removesuffix("m")) // 1000 if cpu.endswith("m") else int(cpu))
    gpus = int(room.get(GPU_RESOURCE, "0"))
    if not gpus:
        return NodeKind(device=SERVER, per_node=1, cores=cores)
    product = labels.get(GPU_PRODUCT_LABEL, "")
    device = find_device_by_driver_name(product)
    if device is None:
        name = item["metadata"].get("name", "a node")
        raise PlaitError(f'the catalogue does not know the GPUs of {name} ("{product}"); {DESCRIBE}')
    return NodeKind(device=device.name, per_node=gpus, cores=cores)


# The manifests.

USER_ID = 10001
"""User of the image built from install/Containerfile, and of every pod."""
WORK_FOLDER = "/work"
"""Where the volume with text, runs and prepared data is mounted; also the working folder of the command."""
INPUT_FOLDER = "/etc/plait"
GPU_RESOURCE = "nvidia.com/gpu"
GPU_PRODUCT_LABEL = "nvidia.com/gpu.product"
"""NVIDIA's feature discovery labels machines with it."""
RESTARTS_AT_MOST = 20
"""For each pod."""
KEPT_AFTER_END_S = 7 * 86_400
"""How long a job's object is kept after its end, for plait status and logs."""
_RESOLVERS: Sequence[Mapping[str, Any]] = (
    {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
        "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
    },
    {"ipBlock": {"cidr": "169.254.20.10/32"}},
)
"""The cluster's DNS: CoreDNS and kube-dns have this label, and NodeLocal DNSCache this address."""
SECRET_FOLDER = "/etc/plait-join"
NOT_AGAIN = (2, 93)
"""Exit codes that a restart would repeat: bad input, and no progress."""
_CONTAINER, _READER, _BLOCK = "node", "reader", "node"
_READER_S = 3600
"""Lifetime of the pod that only waits while files are copied."""
_SECRET_KEY = "secret"
_INDEX = "batch.kubernetes.io/job-completion-index"


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesObject:
    """One object for the cluster, and its comments for a reader."""

    value: Mapping[str, Any]
    comments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """Additions to a job's manifests: names of GPUs as in the machines' labels, and the user's own values by kind of
    object, with "Pod" for the pods' template."""

    products: tuple[str, ...] = ()
    patch: Mapping[str, Any] = field(default_factory=dict)


def parse_patch(text: str, file: str) -> Mapping[str, Any]:
    """The YAML of `--with patch=`; raises PlaitError if it is not a mapping of kinds to mappings."""
    try:
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise PlaitError(f"{file} has an alias (*name), which may stand for any number of values; write them out")
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        where = getattr(error, "problem_mark", None)
        raise PlaitError(f"{file} is not YAML{f' (line {where.line + 1})' if where else ''}; correct it") from None
    if not isinstance(found, dict) or not all(isinstance(value, dict) for value in found.values()):
        raise PlaitError(f"{file} is not a patch; write a kind and below it what is merged, such as Pod: {{spec: …}}")
    return {str(kind): value for kind, value in found.items()}


def merged(value: Any, patch: Any) -> Any:
    """A value merged with a patch: mappings key by key, lists of named things by name, other lists concatenated; null
    removes a key."""
    if isinstance(value, Mapping) and isinstance(patch, Mapping):
        both = {**value, **{key: merged(value.get(key), one) for key, one in patch.items()}}
        return {key: one for key, one in both.items() if one is not None}
    if isinstance(value, list) and isinstance(patch, list):
        named = {one["name"]: one for one in patch if _name_of(one) is not None}
        kept = [merged(one, named.pop(_name_of(one), {})) if isinstance(one, Mapping) else one for one in value]
        return [*kept, *(one for one in patch if _name_of(one) is None or _name_of(one) in named)]
    return patch


def _name_of(one: Any) -> Any:
    name = one.get("name") if isinstance(one, Mapping) else None
    return name if isinstance(name, str) else None


def manifests(
    job: ClusterJob,
    options: Mapping[str, str],
    kind: JobKind,
    files: Mapping[str, str],
    extras: Extras = Extras(),
) -> list[KubernetesObject]:
    """All objects of a job in the order of creation; the last one starts it. `files` are the recipe or the program by
    name. Raises PlaitError for a patch of an object that the job does not have."""
    objects = _objects_of_job(job, options, kind, files, extras)
    known = [one.value["kind"] for one in objects]
    if odd := next((name for name in extras.patch if name not in (*known, "Pod")), None):
        raise PlaitError(f"--with patch: this job has no {odd}; patch {', '.join((*dict.fromkeys(known), 'Pod'))}")
    return [replace(one, value=merged(one.value, extras.patch.get(one.value["kind"], {}))) for one in objects]


def _objects_of_job(
    job: ClusterJob, options: Mapping[str, str], kind: JobKind, files: Mapping[str, str], extras: Extras
) -> list[KubernetesObject]:
    several, queue = job.nodes > 1, options.get("queue")

    def one(api: str, of_kind: str, name: str, body: Mapping[str, Any], *comments: str) -> KubernetesObject:
        starts = of_kind in ("JobSet", "TrainJob", "Job")  # waits in the queue, if there is one, and is let in whole
        labels = {**_labels(job), **({"kueue.x-k8s.io/queue-name": queue} if starts and queue else {})}
        about = {"name": name, **_if("namespace", options.get("namespace")), "labels": labels}
        value = {"apiVersion": api, "kind": of_kind, "metadata": about, **body}
        return KubernetesObject(value=value, comments=comments)

    def starting(api: str, of_kind: str, spec: Mapping[str, Any]) -> KubernetesObject:
        body = {"spec": {**({"suspend": True} if queue else {}), **spec}}
        return one(api, of_kind, job.name, body, *_start_comments(job, options))

    data = {_config_map_key(name): text for name, text in files.items()}
    objects = [one("v1", "ConfigMap", f"{job.name}-input", {"data": data}, "The recipe or the program.")]
    if "volume" not in options:
        claim = {
            "accessModes": ["ReadWriteMany" if several else "ReadWriteOnce"],
            **_if("storageClassName", options.get("storage_class")),
            "resources": {"requests": {"storage": options.get("storage", "100Gi")}},
        }
        about = "Text, prepared data, runs and checkpoints; all pods see it at /work."
        objects.append(one("v1", "PersistentVolumeClaim", _claim_name(job, options), {"spec": claim}, about))
    if several:
        own = {"podSelector": {"matchLabels": _labels(job)}}
        names = [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]
        policy = {
            **own,
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [own]}],
            "egress": [{"to": [own]}, {"to": [*_RESOLVERS], "ports": names}],
        }
        about = "Only this run's pods talk to each other; apart from that they may ask the cluster's DNS for names."
        objects.append(one("networking.k8s.io/v1", "NetworkPolicy", job.name, {"spec": policy}, about))
    pod = merged(_pod_template(job, options, files, kind, extras.products), extras.patch.get("Pod", {}))
    match kind:
        case "jobset":
            objects.append(starting("jobset.x-k8s.io/v1alpha2", "JobSet", _job_set(job, _indexed_job(job, pod))))
        case "trainjob":
            trainer_api = "trainer.kubeflow.org/v1alpha1"
            inner = _indexed_job(job, pod)
            del inner["completions"], inner["parallelism"]  # the TrainJob sets them
            job_set = _job_set(job, inner, {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"})
            runtime = {"mlPolicy": {"numNodes": job.nodes}, "template": {"spec": job_set}}
            about = "How pods of this run are made; plait starts the workers in them itself."
            objects.append(one(trainer_api, "TrainingRuntime", job.name, {"spec": runtime}, about))
            [container] = pod["spec"]["containers"]
            trainer = {key: container[key] for key in ("image", "command", "env")}
            trainer |= {"numNodes": job.nodes, "resourcesPerNode": container["resources"]}
            refers = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name}
            objects.append(starting(trainer_api, "TrainJob", {"runtimeRef": refers, "trainer": trainer}))
        case "job":
            if several:
                service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": _labels(job)}
                about = "Names for the pods, without an address of its own (headless)."
                objects.append(one("v1", "Service", job.name, {"spec": service}, about))
                pod["spec"]["subdomain"] = job.name
            kept = {"ttlSecondsAfterFinished": KEPT_AFTER_END_S}
            objects.append(starting("batch/v1", "Job", {**_indexed_job(job, pod), **kept}))
    return objects


def manifests_text(
    job: ClusterJob,
    options: Mapping[str, str],
    kind: JobKind,
    files: Mapping[str, str],
    extras: Extras = Extras(),
) -> str:
    """The manifests as one file for `kubectl apply -f`."""
    lines = ["Made by plait submit.", *job.why]
    if job.nodes > 1:
        where = f" --namespace {options['namespace']}" if "namespace" in options else ""
        lines += [
            "the secret is no part of these manifests; make it once, before them:",
            "    tr -dc 0-9A-HJKMNP-TV-Z </dev/urandom | head -c 28 |",
            f"      kubectl create secret generic {job.name}-join{where} --from-file={_SECRET_KEY}=/dev/stdin",
        ]
    parts = [
        (lines, ""),
        *((one.comments, yaml_text(one.value)) for one in manifests(job, options, kind, files, extras)),
    ]
    return "---\n".join("".join(f"# {comment}\n" for comment in comments) + text for comments, text in parts)


class _Dumper(yaml.SafeDumper):
    """Writes multi-line texts as blocks, and no anchors for repeated values."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def yaml_text(value: Mapping[str, Any]) -> str:
    """One YAML document, its keys in the order given."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def _if(key: str, value: str | None) -> dict[str, str]:
    return {key: value} if value else {}


def _labels(job: ClusterJob) -> dict[str, str]:
    """Labels that select only this run's pods."""
    return {"app.kubernetes.io/name": "plait", "app.kubernetes.io/instance": job.name}


def _config_map_key(name: str) -> str:
    """A file's name as a ConfigMap's key: only letters, digits, "-", "_" and "."."""
    return re.sub(r"[^-._a-zA-Z0-9]", "-", name)


def _claim_name(job: ClusterJob, options: Mapping[str, str]) -> str:
    return options.get("volume", f"{job.name}-work")


def _job_set(job: ClusterJob, inner: Mapping[str, Any], labels: Mapping[str, str] | None = None) -> dict[str, Any]:
    """One set of pods, in which a lost pod is restarted by itself; all of them once one has failed too often, but not
    after an exit code that a restart would repeat. Needs JobSet 0.7."""

    def rule(name: str, reason: str) -> dict[str, Any]:
        return {"name": name, "action": "FailJobSet", "onJobFailureReasons": [reason]}

    rules = [rule("timeIsOver", "DeadlineExceeded"), rule("notAgain", "PodFailurePolicy")]
    kept = {} if labels else {"ttlSecondsAfterFinished": KEPT_AFTER_END_S}  # a TrainJob's goes with that
    template = {**({"metadata": {"labels": labels}} if labels else {}), "spec": inner}
    return {
        "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
        **kept,
        "failurePolicy": {"maxRestarts": RESTARTS_AT_MOST, "restartStrategy": "BlockingRecreate", "rules": rules},
        "replicatedJobs": [{"name": _BLOCK, "replicas": 1, "template": template}],
    }


def _indexed_job(job: ClusterJob, pod: Mapping[str, Any]) -> dict[str, Any]:
    """The spec of a Job with one pod per node, numbered from 0. A pod that fails or is evicted is restarted by itself,
    and rejoins the run, which continues."""
    codes = {"containerName": _CONTAINER, "operator": "In", "values": list(NOT_AGAIN)}
    lost = [{"type": "DisruptionTarget", "status": "True"}]
    rules = [
        {"action": "FailJob", "onExitCodes": codes},
        {"action": "Ignore", "onPodConditions": lost},
    ]
    return {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": RESTARTS_AT_MOST * job.nodes,
        "podReplacementPolicy": "Failed",
        **({} if job.time_s is None else {"activeDeadlineSeconds": job.time_s}),
        "podFailurePolicy": {"rules": rules},
        "template": pod,
    }


def _pod_template(
    job: ClusterJob, options: Mapping[str, str], files: Mapping[str, str], kind: JobKind, products: Sequence[str]
) -> dict[str, Any]:
    """The pod of each node: non-root, with a read-only root file system."""
    first_pod = f"{job.name}-0" if kind == "job" else f"{job.name}-{_BLOCK}-0-0"
    rdma = {options["rdma"]: 1} if "rdma" in options else {}
    gpus = job.groups[0].gpus
    cpu, memory = options.get("cpu", str(6 * gpus or 4)), options.get("memory", f"{48 * gpus or 16}Gi")
    devices = {**({GPU_RESOURCE: gpus} if gpus else {}), **rdma}
    # Requests that equal the limits: a pod of the class Guaranteed is the last that a full machine ends.
    resources = {"cpu": cpu, "memory": memory, **devices}
    container = {
        "name": _CONTAINER,
        "image": options["image"],
        "command": container_command(job),
        "workingDir": WORK_FOLDER,
        "env": _variables(job, f"{first_pod}.{job.name}"),
        "resources": {"requests": resources, "limits": resources},
        # RDMA keeps memory in place, which needs a capability of its own.
        "securityContext": _container_security({"add": ["IPC_LOCK"]} if rdma else {}),
        "volumeMounts": [
            {"name": "work", "mountPath": WORK_FOLDER},
            {"name": "input", "mountPath": INPUT_FOLDER, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
            *([{"name": "join", "mountPath": SECRET_FOLDER, "readOnly": True}] if job.nodes > 1 else []),
        ],
    }
    # For the pod's group, which fsGroup gives it: the file is root's.
    secret = {"secretName": f"{job.name}-join", "defaultMode": 0o440}
    # Where a file's name is not its key, the file gets its name back in the pod.
    items = [{"key": _config_map_key(name), "path": name} for name in files]
    renamed = {"items": items} if any(item["key"] != item["path"] for item in items) else {}
    spec = {
        **_pod_basics(job.grace_s),
        **({"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if "network" in options else {}),
        **_places(job, products),
        # Machines with GPUs often keep pods away that ask for none, by a taint that has the resource's name.
        **({"tolerations": [{"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"}]} if gpus else {}),
        "containers": [container],
        "volumes": [
            {"name": "work", "persistentVolumeClaim": {"claimName": _claim_name(job, options)}},
            {"name": "input", "configMap": {"name": f"{job.name}-input", **renamed}},
            {"name": "tmp", "emptyDir": {"sizeLimit": "10Gi"}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}},
            *([{"name": "join", "secret": secret}] if job.nodes > 1 else []),
        ],
    }
    return {"metadata": {"labels": _labels(job)}, "spec": spec}


def _pod_basics(grace_s: int) -> dict[str, Any]:
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace_s,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def _container_security(capabilities: Mapping[str, Any]) -> dict[str, Any]:
    dropped = {"drop": ["ALL"], **capabilities}
    return {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": dropped}


def _places(job: ClusterJob, products: Sequence[str]) -> dict[str, Any]:
    """On machines with the GPUs of the plan, whose labels name these `products`; one pod a machine, so that no two
    share its cores and links; all of them near each other."""
    affinity: dict[str, Any] = {}
    if products and job.uses_gpus:
        has = {"key": GPU_PRODUCT_LABEL, "operator": "In", "values": list(products)}
        terms = {"nodeSelectorTerms": [{"matchExpressions": [has]}]}
        affinity["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    if job.nodes > 1:
        affinity |= _apart_and_near(job)
    return {"affinity": affinity} if affinity else {}


def _apart_and_near(job: ClusterJob) -> dict[str, Any]:
    selector = {"labelSelector": {"matchLabels": _labels(job)}}
    machine = {**selector, "topologyKey": "kubernetes.io/hostname"}
    zone = {**selector, "topologyKey": "topology.kubernetes.io/zone"}
    near = (
        {"requiredDuringSchedulingIgnoredDuringExecution": [zone]}
        if job.near
        else {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": zone}]}
    )
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [machine]}, "podAffinity": near}


def container_command(job: ClusterJob) -> list[str]:
    """The command of each pod. Kubernetes would replace "$(NAME)" by a variable, and reads "$$" as "$"."""
    return ["python3", *node_arguments(job, [word.replace("$", "$$") for word in job.target])]


def _variables(job: ClusterJob, leader: str) -> list[dict[str, Any]]:
    """Which node this is, who leads, and where the secret lies, which is no part of the manifest."""
    variables: list[dict[str, Any]] = [{"name": "HOME", "value": "/tmp"}, {"name": "PYTHONUNBUFFERED", "value": "1"}]
    if gpus := job.groups[0].gpus:
        variables.append({"name": GPUS_VARIABLE, "value": str(gpus)})
    if job.nodes == 1:
        return variables
    index = {"fieldRef": {"fieldPath": f"metadata.annotations['{_INDEX}']"}}
    return [
        {"name": RANK_VARIABLE, "valueFrom": index},
        {"name": LEADER_VARIABLE, "value": leader},
        {"name": PORT_VARIABLE, "value": str(USUAL_PORT)},
        {"name": SECRET_FILE_VARIABLE, "value": f"{SECRET_FOLDER}/{_SECRET_KEY}"},
        *variables,
    ]


def _start_comments(job: ClusterJob, options: Mapping[str, str]) -> Iterator[str]:
    zone = job.near or "all pods in one zone, if it has room: each step sends gradients between them"
    yield f"One pod a machine, with all devices of a tensor group; {zone}."
    if queue := options.get("queue"):
        yield f"Kueue lets all pods of it in at once, or none (queue {queue})."
    if "network" in options:
        yield (
            "Pods use their machines' network, as asked (RDMA without a device plugin): a NetworkPolicy does not hold "
            "there, so the machines' own network must be private."
        )


# A job that is sent, and its files.

_CONFIG_MAP_AT_MOST = 200_000
"""Bytes. Kubernetes takes a mebibyte, but `kubectl apply` notes all of it in an annotation, which holds 262,144."""
_READER_AT_LATEST_S = 180.0


def _prepare(job: ClusterJob, request: SubmitRequest, options: Mapping[str, str], config: RunConfig | None) -> Outgoing:
    """The manifests; the recipe or the program travels in them."""
    if "rdma" in options and "network" in options:
        raise PlaitError("--with rdma gives each pod a device of its own, and needs no host network; leave network out")
    file, kind = Path(job.target[0]), request.kind or "jobset"
    text = program_bytes(file).decode("utf-8", "replace")
    if len(text.encode()) > _CONFIG_MAP_AT_MOST:
        raise PlaitError(f"{file} is too large to travel in a ConfigMap; put it into the image or the volume")
    inside = replace(job, target=(f"{INPUT_FOLDER}/{file.name}", *job.target[1:]))
    patch = parse_patch(read_own_text(Path(options["patch"]), "patch"), options["patch"]) if "patch" in options else {}
    extras = Extras(products=() if request.cluster is not None else _products_of(job), patch=patch)
    sent = manifests_text(inside, options, kind, {file.name: text}, extras)
    record = Submitted(
        name=job.run,
        label=job.name,
        scheduler="kubernetes",
        job=kind,
        namespace=options.get("namespace", ""),
        image=options["image"],
        volume=_claim_name(job, options),
    )

    def send(screen: Screen, working: WorkingFolder) -> None:
        # Asked before anything is sent: a cluster without that kind of object has no trace of the run then.
        if _is_there(record):
            delete = " ".join(["kubectl delete", kind, job.name, *_namespace(record)])
            raise PlaitError(
                f"{job.run} is in the cluster already; end it first: plait stop {job.run}, or where it was submitted "
                f"from another folder {delete}"
            )
        if job.nodes > 1:  # a fresh secret, by standard input; one that an earlier start left is replaced
            name = f"{record.label}-join"
            _kubectl(record, "delete", "secret", name, "--ignore-not-found", about="the secret")
            create = ("create", "secret", "generic", name, f"--from-file={_SECRET_KEY}=/dev/stdin")
            _kubectl(record, *create, stdin=new_secret().text, about="the secret")
        _kubectl(record, "apply", "--filename", "-", stdin=sent)
        keep_record(record, working)
        if job.nodes > 1:
            _give_secret_to_job(record, kind, screen)
        screen.print(f"sent     {job.name}: a {kind} in Kubernetes")
        screen.print(
            f"         plait status {job.run}, plait logs {job.run}, plait stop {job.run}, plait fetch {job.run}"
        )

    return Outgoing(file=f"{job.name}.yaml", text=sent, run=job.run, send=send)


def _give_secret_to_job(record: Submitted, kind: JobKind, screen: Screen) -> None:
    """Have Kubernetes delete the secret together with the job; without the right to do that it stays."""
    name = f"{record.label}-join"
    try:
        found = parse_object(_kubectl(record, "get", kind, record.label, "--output", "json").encode())
        owner = {
            **{key: found[key] for key in ("apiVersion", "kind")},
            **{key: found["metadata"][key] for key in ("name", "uid")},
        }
        patch = json.dumps({"metadata": {"ownerReferences": [owner]}})
        _kubectl(record, "patch", "secret", name, "--type", "merge", "--patch", patch, about="the secret")
    except (PlaitError, ValueError, KeyError, TypeError):
        screen.print(f"secret   {name} stays when the job is deleted: kubectl delete secret {name}")


def _kubectl(record: Submitted, *words: str, about: str = "", stdin: str = "", within_s: float = 120.0) -> str:
    command = ["kubectl", *words, *_namespace(record)]
    return tool_answer(command, about=about or f"the job {record.name}", stdin=stdin, within_s=within_s)


def _namespace(record: Submitted) -> list[str]:
    return ["--namespace", record.namespace] if record.namespace else []


def _selector(record: Submitted) -> str:
    return f"app.kubernetes.io/instance={record.label},app.kubernetes.io/name=plait"


def _is_there(record: Submitted) -> bool:
    return bool(_kubectl(record, "get", record.job, record.label, "--ignore-not-found", "--output", "name").strip())


def _objects(record: Submitted, kind: str, *which: str) -> list[Mapping[str, Any]]:
    """Objects of one kind; empty where the cluster lacks that kind or denies access, unless these are pods."""
    try:
        said = _kubectl(record, "get", kind, *which, "--output", "json", about=f"the {kind} of {record.name}")
    except PlaitError:
        if kind == "pods":
            raise
        return []
    try:
        return _items(parse_object(said.encode())) if said.strip() else []
    except ValueError as error:
        raise PlaitError(f"the {kind} of {record.name}: kubectl's answer is not JSON ({error}); update it") from None


def _items(answer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    items = answer.get("items")
    return [item for item in items if isinstance(item, Mapping)] if isinstance(items, list) else []


def _log_lines(record: Submitted, working: WorkingFolder) -> Iterator[str]:
    first = f"{_selector(record)},{_INDEX}=0"
    about = f"the output of {record.name}"
    yield from _kubectl(record, "logs", "--selector", first, "--tail", "-1", about=about).splitlines()


def _end(record: Submitted) -> None:
    """Delete the object that starts the pods, which save first; the volume and the recipe stay."""
    _kubectl(record, "delete", record.job, record.label, "--wait=false")


def _copy(record: Submitted, folder: Path, working: WorkingFolder, screen: Screen) -> None:
    """Copy the run's folder from node 0's pod while it runs, else by a pod that only reads the volume."""

    def unpack(pod: str, container: str) -> None:
        archive = archive_command(WORK_FOLDER, folder)
        command = ["kubectl", "exec", *_namespace(record), pod, "--container", container, "--", *archive]
        unpack_answer(command, working.path, f"the pod {pod} does not give {folder}")

    pod = running_pod(_objects(record, "pods", "--selector", _selector(record)))
    if pod is not None:
        unpack(pod, _CONTAINER)
        return
    if not record.volume:
        raise PlaitError(f"no pod of {record.name} runs, and its volume is not known; any pod can mount it at /work")
    screen.print(f"reads    the volume {record.volume}, by a pod that is made for it, since none of the run's own runs")
    reader = _reader_pod(record)
    name = reader["metadata"]["name"]
    about = f"the pod {name}, which is to read the volume {record.volume}"
    _kubectl(record, "apply", "--filename", "-", stdin=yaml_text(reader), about=about)
    try:
        ready = ("wait", "--for=condition=Ready", f"pod/{name}", f"--timeout={_READER_AT_LATEST_S:.0f}s")
        _kubectl(record, *ready, about=about, within_s=_READER_AT_LATEST_S + 30)
        unpack(name, _READER)
    finally:
        _kubectl(record, "delete", "pod", name, "--ignore-not-found", "--wait=false", about=about)


def _reader_pod(record: Submitted) -> dict[str, Any]:
    """A pod that only waits, for copying files of the volume once the run's own pods have ended."""
    labels = {"app.kubernetes.io/name": "plait-fetch", "app.kubernetes.io/instance": record.label}
    container = {
        "name": _READER,
        "image": record.image,
        "command": ["sleep", str(_READER_S)],
        "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        "securityContext": _container_security({}),
        "volumeMounts": [{"name": "work", "mountPath": WORK_FOLDER, "readOnly": True}],
    }
    spec = {
        **_pod_basics(1),
        "activeDeadlineSeconds": _READER_S,
        "containers": [container],
        "volumes": [{"name": "work", "persistentVolumeClaim": {"claimName": record.volume}}],
    }
    about = {"name": f"{record.label}-fetch", **_if("namespace", record.namespace), "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec}


# The states of pods as sentences: why one waits or ended, why there are none, and how to fix that.

_WAITING = {
    "ErrImagePull": "its image cannot be pulled: check the name and the cluster's rights (imagePullSecrets)",
    "ImagePullBackOff": "its image cannot be pulled: check the name and the cluster's rights (imagePullSecrets)",
    "InvalidImageName": "that is not the name of an image: correct --with image=",
    "CreateContainerConfigError": "something that it names is missing, most likely the secret: submit again",
    "CreateContainerError": "its container cannot be made: see kubectl describe pod",
}
_ENDED = {
    "OOMKilled": "it had too little memory: submit again with more, --with memory=",
    "ContainerCannotRun": "its image has no python3 with plait: build it from install/Containerfile",
    "StartError": "its image has no python3 with plait: build it from install/Containerfile",
}
_CODES = {
    2: "its input is wrong: plait logs says what",
    75: "everything is saved, and it continues",
    93: "it made no progress: plait logs says why",
    143: "it received SIGTERM and saved",
    137: "it was killed, most likely for its memory: submit again with more, --with memory=",
}


def _state(record: Submitted) -> str:
    if lines := pod_lines(_objects(record, "pods", "--selector", _selector(record))):
        return "; ".join(lines)
    if not _is_there(record):
        return "it is not in the cluster any more; plait fetch has its run"
    why = _queue_sentence(_objects(record, "workloads"), record.label) or _warning_sentence(
        _objects(record, "events", "--field-selector", "type=Warning"), record.label
    )
    return f"no pods: {why or 'it waits in the queue, or is about to start'}"


def pod_lines(pods: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each pod, by its number; alike ones in one line."""
    found: dict[str, list[str]] = {}
    for item in sorted(pods, key=_order):
        found.setdefault(_sentence(item), []).append(_order(item)[1] or str(item["metadata"].get("name", "?")))
    return [f"node {_numbers(names)} {sentence}" for sentence, names in found.items()]


def running_pod(pods: Sequence[Mapping[str, Any]]) -> str | None:
    """The name of node 0's pod while its container runs."""
    for item in pods:
        if _order(item)[1] in ("0", "") and item.get("status", {}).get("phase") == "Running":
            return str(item["metadata"]["name"])
    return None


def _queue_sentence(workloads: Sequence[Mapping[str, Any]], name: str) -> str:
    """Why Kueue has not let a job in, by its Workload, which the job owns; empty where there is none, or it is in."""
    for item in workloads:
        owners = item.get("metadata", {}).get("ownerReferences") or []
        conditions = {one.get("type"): one for one in _conditions(item.get("status", {}))}
        is_in = conditions.get("Admitted", {}).get("status") == "True"
        if not is_in and any(owner.get("name") == name for owner in owners):
            said = _one_line(conditions.get("QuotaReserved", {}).get("message", ""))
            return f"it waits in Kueue's queue ({said or 'it does not say why'}): kubectl describe localqueue shows it"
    return ""


def _warning_sentence(events: Sequence[Mapping[str, Any]], name: str) -> str:
    """The newest warning about a job or what it made, such as a quota that keeps pods away; empty where there is
    none."""
    about = [one for one in events if f"{one.get('involvedObject', {}).get('name', '')}-".startswith(f"{name}-")]
    newest = max(about, key=lambda one: str(one.get("lastTimestamp") or one.get("eventTime") or ""), default=None)
    if newest is None:
        return ""
    said = _one_line(newest.get("message", ""))
    fix = "ask for less, or end other jobs of the namespace" if "exceeded quota" in said else "see kubectl get events"
    return f"it waits ({said}): {fix}"


def _order(item: Mapping[str, Any]) -> tuple[int, str]:
    about = item.get("metadata", {})
    index = {**about.get("labels", {}), **about.get("annotations", {})}.get(_INDEX, "")
    return (int(index) if str(index).isdecimal() else 0), str(index)


def _sentence(item: Mapping[str, Any]) -> str:
    status = item.get("status", {})
    phase = str(status.get("phase", "Unknown"))
    if status.get("reason") == "Evicted":
        return f"was evicted ({_one_line(status.get('message', ''))}); it restarts by itself and continues"
    disruption = next((one for one in _conditions(status) if one.get("type") == "DisruptionTarget"), None)
    if disruption is not None and phase == "Failed":
        why = _one_line(disruption.get("message", "")) or str(disruption.get("reason", ""))
        return f"was taken away ({why}); it restarts by itself and continues"
    return next(_container_sentences(status), None) or _phase_sentence(phase, status)


def _container_sentences(status: Mapping[str, Any]) -> Iterator[str]:
    for container in status.get("containerStatuses") or []:
        state = container.get("state", {})
        waiting, ended = state.get("waiting", {}), state.get("terminated", {})
        reason = waiting.get("reason", "")
        if reason in _WAITING:
            said = _one_line(waiting.get("message", ""))
            yield f"waits, {_WAITING[reason]} ({said or reason})"
        elif ended and ended.get("exitCode"):
            code, why = int(ended["exitCode"]), str(ended.get("reason", ""))
            yield f"ended with exit code {code}: {_ENDED.get(why) or _CODES.get(code, 'plait logs says why')}"


def _phase_sentence(phase: str, status: Mapping[str, Any]) -> str:
    if phase == "Pending":
        for one in _conditions(status):
            if one.get("type") == "PodScheduled" and one.get("status") == "False":
                said = _one_line(one.get("message", ""))
                if "SchedulingGated" in str(one.get("reason")):
                    return "waits in the queue (Kueue has not let it in)"
                return f"waits for a machine ({said or one.get('reason')})"
        return "is about to start"
    words = {"Running": "runs", "Succeeded": "is finished", "Failed": "failed: plait logs says why"}
    return words.get(phase, f"is {phase}: see kubectl get pods")


def _conditions(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(status.get("conditions") or [])


def _one_line(text: str) -> str:
    return " ".join(str(text).split()).rstrip(".")[:200]


def _numbers(names: Sequence[str]) -> str:
    """["0", "1", "2", "5"] -> "0-2, 5"."""
    if not all(name.isdecimal() for name in names):
        return ", ".join(names)
    parts: list[list[int]] = []
    for number in sorted(map(int, names)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


KUBERNETES = ClusterSystem(
    options=_OPTIONS, cluster=_cluster, prepare=_prepare, state=_state, log_lines=_log_lines, end=_end, copy=_copy
)
