"""Manifests held against the schemas of Kubernetes and of its custom resources: unknown fields are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

HERE = Path(__file__).parent
VERSIONS = ("v1.29", "v1.33", "v1.37")
CUSTOM = {"JobSet": "jobset", "TrainJob": "trainjob", "TrainingRuntime": "clustertrainingruntime"}
"""A TrainingRuntime is the same as a ClusterTrainingRuntime, but within a namespace."""


def documents(text: str) -> list[dict[str, Any]]:
    """The objects of a file for kubectl."""
    return [value for value in yaml.safe_load_all(text) if value is not None]


def complaints(value: Mapping[str, Any], version: str) -> list[str]:
    """What the schemas say against an object, in one version of Kubernetes."""
    kind = value["kind"]
    schema = _custom_schema(CUSTOM[kind]) if kind in CUSTOM else _core_schema(version, kind)
    found = Draft202012Validator(schema).iter_errors(_without_kind(value) if kind in CUSTOM else value)
    return [f"{kind} {'.'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in found]


def pod_complaints(spec: Mapping[str, Any], version: str) -> list[str]:
    """What the schema of pods says against a pod's spec, in one version of Kubernetes."""
    whole = json.loads((HERE / "core" / f"{version}.json").read_text())
    [name] = [name for name in whole["$defs"] if name.endswith("core.v1.PodSpec")]
    found = Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": whole["$defs"]}).iter_errors(spec)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in found]


def _without_kind(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: inner for key, inner in value.items() if key != "metadata"}


@cache
def _core_schema(version: str, kind: str) -> dict[str, Any]:
    whole = json.loads((HERE / "core" / f"{version}.json").read_text())
    return {"$ref": f"#/$defs/{whole['kinds'][kind]}", "$defs": whole["$defs"]}


@cache
def _custom_schema(name: str) -> dict[str, Any]:
    definition = json.loads((HERE / "crds" / f"{name}.json").read_text())
    [version] = definition["spec"]["versions"]
    return strict(version["schema"]["openAPIV3Schema"])


def strict(schema: Any) -> Any:
    """A structural schema of a custom resource as plain JSON schema that knows no other fields."""
    if isinstance(schema, list):
        return [strict(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(inner) for key, inner in schema.items() if not key.startswith("x-kubernetes-")}
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    if "properties" in schema and isinstance(schema["properties"], dict) and schema.get("type") == "object":
        open_to_more = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
        made.setdefault("additionalProperties", bool(open_to_more))
    return made


def pod_specs(value: Any) -> Iterator[Mapping[str, Any]]:
    """Every pod's spec in an object, however deep."""
    if isinstance(value, Mapping):
        if "containers" in value:
            yield value
        for inner in value.values():
            yield from pod_specs(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from pod_specs(inner)


def restricted_faults(spec: Mapping[str, Any]) -> list[str]:
    """What of a pod breaks the Pod Security Standard "restricted"."""
    faults = [f"{key} is set" for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    context = spec.get("securityContext", {})
    if not context.get("runAsNonRoot") or context.get("runAsUser") == 0:
        faults.append("may run as root")
    if context.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        faults.append("no seccomp profile")
    allowed = {
        "configMap",
        "emptyDir",
        "persistentVolumeClaim",
        "secret",
        "projected",
        "downwardAPI",
        "csi",
        "ephemeral",
    }
    faults += [f"volume {volume['name']}" for volume in spec.get("volumes", []) if not set(volume) & allowed]
    for container in (*spec["containers"], *spec.get("initContainers", [])):
        inner = container.get("securityContext", {})
        if inner.get("allowPrivilegeEscalation") is not False:
            faults.append(f"{container['name']} may escalate")
        if inner.get("privileged") or inner.get("capabilities", {}).get("drop") != ["ALL"]:
            faults.append(f"{container['name']} keeps capabilities")
        if set(inner.get("capabilities", {})) - {"drop"}:
            faults.append(f"{container['name']} adds capabilities")
        if inner.get("procMount", "Default") != "Default" or any(
            "hostPort" in port for port in container.get("ports", [])
        ):
            faults.append(f"{container['name']} reaches the host")
    return faults
