"""What a run's pods are up to, as sentences: why one waits, why one ended, why there are none, and what helps; from
kubectl's JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

INDEX = "batch.kubernetes.io/job-completion-index"
_WAITING = {
    "ErrImagePull": "its image cannot be had: check the name, and that the cluster may pull it (imagePullSecrets)",
    "ImagePullBackOff": "its image cannot be had: check the name, and that the cluster may pull it (imagePullSecrets)",
    "InvalidImageName": "that is no name of an image: mend --with image=",
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
    75: "all is saved, and it goes on",
    93: "it came no further than before: plait logs says why",
    143: "it was told to end, and saved",
    137: "it was killed, most likely for its memory: submit again with more, --with memory=",
}


def pod_lines(answer: Mapping[str, Any]) -> list[str]:
    """A line for each pod of a PodList, by its number; alike ones in one line."""
    found: dict[str, list[str]] = {}
    for item in sorted(_items(answer), key=_order):
        found.setdefault(_sentence(item), []).append(_order(item)[1] or str(item["metadata"].get("name", "?")))
    return [f"node {_numbers(names)} {sentence}" for sentence, names in found.items()]


def running_pod(answer: Mapping[str, Any]) -> str | None:
    """The name of node 0's pod while its container runs."""
    for item in _items(answer):
        if _order(item)[1] in ("0", "") and item.get("status", {}).get("phase") == "Running":
            return str(item["metadata"]["name"])
    return None


def queue_sentence(workloads: Mapping[str, Any], name: str) -> str:
    """Why Kueue has not let a job in, by its Workload, which the job owns; empty where there is none, or it is in."""
    for item in _items(workloads):
        owners = item.get("metadata", {}).get("ownerReferences") or []
        conditions = {one.get("type"): one for one in _conditions(item.get("status", {}))}
        is_in = conditions.get("Admitted", {}).get("status") == "True"
        if not is_in and any(owner.get("name") == name for owner in owners):
            said = _one_line(conditions.get("QuotaReserved", {}).get("message", ""))
            return f"it waits in Kueue's queue ({said or 'it does not say why'}): kubectl describe localqueue shows it"
    return ""


def warning_sentence(events: Mapping[str, Any], name: str) -> str:
    """The newest warning about a job or what it made, such as a quota that keeps pods away; empty where there is
    none."""
    about = [one for one in _items(events) if _is_about(str(one.get("involvedObject", {}).get("name", "")), name)]
    newest = max(about, key=lambda one: str(one.get("lastTimestamp") or one.get("eventTime") or ""), default=None)
    if newest is None:
        return ""
    said = _one_line(newest.get("message", ""))
    mend = "ask for less, or end other jobs of the namespace" if "exceeded quota" in said else "see kubectl get events"
    return f"it waits ({said}): {mend}"


def _is_about(other: str, name: str) -> bool:
    return other == name or other.startswith(f"{name}-")


def _items(answer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    items = answer.get("items")
    return [item for item in items if isinstance(item, Mapping)] if isinstance(items, list) else []


def _order(item: Mapping[str, Any]) -> tuple[int, str]:
    about = item.get("metadata", {})
    index = {**about.get("labels", {}), **about.get("annotations", {})}.get(INDEX, "")
    return (int(index) if str(index).isdecimal() else 0), str(index)


def _sentence(item: Mapping[str, Any]) -> str:
    status = item.get("status", {})
    phase = str(status.get("phase", "Unknown"))
    if status.get("reason") == "Evicted":
        return f"was evicted ({_one_line(status.get('message', ''))}); it starts again by itself and goes on"
    disruption = next((one for one in _conditions(status) if one.get("type") == "DisruptionTarget"), None)
    if disruption is not None and phase == "Failed":
        why = _one_line(disruption.get("message", "")) or str(disruption.get("reason", ""))
        return f"was taken away ({why}); it starts again by itself and goes on"
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
