"""YAML that reads back as it was, and an image that is the one which the manifests expect."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as some

from plait.clusters.job import ClusterJob, NodeGroup
from plait.clusters.kubernetes import (
    USER_ID,
    Extras,
    container_command,
    gpu_products,
    manifests,
    manifests_text,
    parse_patch,
    yaml_text,
)
from plait.clusters.request import JobKind
from plait.errors import PlaitError
from tests.clusters.strict import VERSIONS, complaints, documents, pod_specs

ROOT = Path(__file__).parents[2]
TEXTS = some.text(some.characters(exclude_categories=("Cs", "Cc"), exclude_characters="\u2028\u2029\ufeff\ufffe\uffff"))
LINES = some.lists(TEXTS, min_size=1).map(lambda lines: "".join(f"{line}\n" for line in lines))
SCALARS = ("yes", "No", "null", "~", "1e3", "0x1f", "12:30:00", "=", "2026-11-25", ".5", ".5e3", "...")
SIGNS = ("- a", "a: b", "a #b", "'", '"', "", " a", "a ")
ODD = some.sampled_from([*SCALARS, *SIGNS])
KEYS = some.one_of(TEXTS, ODD)
VALUES = some.recursive(
    some.one_of(TEXTS, LINES, ODD, some.integers(), some.booleans()),
    lambda inner: some.one_of(some.lists(inner, max_size=4), some.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=12,
)


@given(some.dictionaries(KEYS, VALUES, min_size=1, max_size=4))
def test_yaml_reads_back_as_the_value_that_it_was_made_of(value: dict[str, object]) -> None:
    assert yaml.safe_load(yaml_text(value)) == value


def test_the_image_is_the_one_that_the_manifests_expect() -> None:
    text = (ROOT / "install" / "Containerfile").read_text()
    tested = re.findall(r'^TESTED_TORCH = "(.+)"$', (ROOT / "install" / "torch_build.py").read_text(), re.MULTILINE)
    assert re.findall(r"^ARG TORCH=(.+)$", text, re.MULTILINE) == tested
    assert re.findall(r"^USER (\d+):(\d+)$", text, re.MULTILINE) == [(str(USER_ID), str(USER_ID))]


@pytest.mark.parametrize("kind", ["jobset", "trainjob", "job"])
def test_one_node_needs_no_meeting(kind: JobKind) -> None:
    """No service, no policy, no secret, and a volume that one pod mounts."""
    job = ClusterJob(name="one", run="one", target=("a.toml",), groups=(NodeGroup(nodes=1, gpus=1),), grace_s=60)
    text = manifests_text(job, {"image": "plait:1"}, kind, {"a.toml": "[data]\n"})
    kinds = {value["kind"] for value in documents(text)}
    assert not kinds & {"Service", "NetworkPolicy", "Secret"} and "PLAIT_SECRET" not in text
    [claim] = [value for value in documents(text) if value["kind"] == "PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    pods = [spec for value in documents(text) for spec in pod_specs(value)]
    assert all(spec["terminationGracePeriodSeconds"] == 60 and "affinity" not in spec for spec in pods)


@pytest.mark.parametrize("kind", ["jobset", "trainjob", "job"])
def test_a_file_whose_name_no_config_map_takes_has_its_name_again_in_the_pods(kind: JobKind) -> None:
    """A ConfigMap's keys are of letters, digits, "-", "_" and "." (its schema does not say so: validation does)."""
    job = ClusterJob(
        name="one", run="one", target=("/etc/plait/mein rezept.toml",), groups=(NodeGroup(nodes=2, gpus=1),)
    )
    values = documents(manifests_text(job, {"image": "a:1"}, kind, {"mein rezept.toml": "[data]\n"}))
    [data] = [value["data"] for value in values if value["kind"] == "ConfigMap"]
    assert (
        data == {"mein-rezept.toml": "[data]\n"}
        and [bad for value in values for bad in complaints(value, VERSIONS[0])] == []
    )
    volumes = [volume for value in values for spec in pod_specs(value) for volume in spec["volumes"]]
    [mounted] = [volume["configMap"] for volume in volumes if "configMap" in volume]
    assert mounted == {"name": "one-input", "items": [{"key": "mein-rezept.toml", "path": "mein rezept.toml"}]}


def _expanded(word: str, variables: dict[str, str]) -> str:
    """A word of a container's command as the kubelet hands it on (kubernetes.io: "Define a Command and Arguments")."""
    return re.sub(
        r"\$\$|\$\(([^()]*)\)", lambda found: "$" if found[1] is None else variables.get(found[1], found[0]), word
    )


@given(some.lists(some.text(some.sampled_from("$()HOME {}"), min_size=1), min_size=1))
def test_kubernetes_puts_no_variable_into_what_was_typed(target: list[str]) -> None:
    job = ClusterJob(name="one", run="one", target=tuple(target), groups=(NodeGroup(nodes=1, gpus=0),))
    command = container_command(job)
    assert [_expanded(word, {"HOME": "/tmp"}) for word in command[-len(target) :]] == target


def test_layers_that_reach_over_machines_keep_all_pods_in_one_zone() -> None:
    groups = (NodeGroup(nodes=2, gpus=8),)
    near = ClusterJob(name="wide", run="wide", target=("a.toml",), groups=groups, near="16 devices split each layer")
    [start] = [one for one in manifests(near, {"image": "plait:1"}, "job", {}) if one.value["kind"] == "Job"]
    [pod] = pod_specs(start.value)
    assert list(pod["affinity"]["podAffinity"]) == ["requiredDuringSchedulingIgnoredDuringExecution"]
    assert any("16 devices split each layer" in comment for comment in start.comments)


PATCH = """
Pod:
  metadata:
    annotations: {kueue.x-k8s.io/podset-required-topology: cloud.example/rack}
  spec:
    priorityClassName: research
    serviceAccountName: trainer
    imagePullSecrets: [{name: registry}]
    tolerations: [{key: team, operator: Exists}]
    containers:
    - name: node
      resources: {requests: {ephemeral-storage: 20Gi}, limits: {ephemeral-storage: 20Gi}}
KIND:
  metadata: {labels: {kueue.x-k8s.io/priority-class: high}}
"""


@pytest.mark.parametrize(("kind", "name"), [("jobset", "JobSet"), ("trainjob", "TrainJob"), ("job", "Job")])
def test_a_patch_is_merged_and_keeps_the_rest(kind: JobKind, name: str) -> None:
    """Each result passes the strict schemas."""
    job = ClusterJob(name="one", run="one", target=("a.toml",), groups=(NodeGroup(nodes=2, gpus=8),))
    extras = Extras(products=("NVIDIA-H100-80GB-HBM3",), patch=parse_patch(PATCH.replace("KIND", name), "patch.yaml"))
    made = [one.value for one in manifests(job, {"image": "plait:1"}, kind, {"a.toml": "[data]\n"}, extras)]
    assert [bad for value in made for version in VERSIONS for bad in complaints(value, version)] == []
    [pod] = [spec for value in made for spec in pod_specs(value)]
    [container] = pod["containers"]
    assert container["resources"]["limits"] == container["resources"]["requests"], "Guaranteed"
    assert container["resources"]["limits"]["ephemeral-storage"] == "20Gi" and container["image"] == "plait:1"
    assert [one.get("key") for one in pod["tolerations"]] == ["nvidia.com/gpu", "team"]
    assert pod["priorityClassName"] == "research" and pod["imagePullSecrets"] == [{"name": "registry"}]
    places = pod["affinity"]
    [term] = places["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"][0]["values"] == ["NVIDIA-H100-80GB-HBM3"]
    [apart] = places["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    assert made[-1]["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "high"
    assert made[-1]["metadata"]["labels"]["app.kubernetes.io/instance"] == "one"
    [policy] = [value for value in made if value["kind"] == "NetworkPolicy"]
    assert all("to" in rule for rule in policy["spec"]["egress"]), "names from the cluster's resolver alone"


@pytest.mark.parametrize(
    ("text", "says"),
    [("Deployment: {}", "has no Deployment; patch ConfigMap"), ("- a", "is not a patch"), ("a: [", "is not YAML")],
)
def test_a_patch_that_is_none_is_refused(text: str, says: str) -> None:
    job = ClusterJob(name="one", run="one", target=("a.toml",), groups=(NodeGroup(nodes=1, gpus=1),))
    with pytest.raises(PlaitError, match=says):
        manifests(job, {"image": "a:1"}, "job", {}, Extras(patch=parse_patch(text, "patch.yaml")))


def test_pods_go_to_machines_whose_label_is_of_the_plans_gpus() -> None:
    labels = ["NVIDIA-H100-80GB-HBM3", "NVIDIA-A100-SXM4-80GB", "", "NVIDIA-H100-80GB-HBM3"]
    nodes = {"items": [{"metadata": {"labels": {"nvidia.com/gpu.product": text}}} for text in labels]}
    assert gpu_products(nodes, "H100 SXM") == ("NVIDIA-H100-80GB-HBM3",)
    assert gpu_products(nodes, "H200 SXM") == ()
