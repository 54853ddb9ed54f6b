"""What a person asks of a scheduler beside nodes: `--with KEY=VALUE`, and `--time`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from plait.deploy.manifests import JobKind
from plait.errors import PlaitError
from plait.units import parse_amount

Scheduler = Literal["slurm", "ssh", "kubernetes"]
SCHEDULERS: tuple[Scheduler, ...] = ("slurm", "ssh", "kubernetes")
OPTION_KEYS: Mapping[Scheduler, Mapping[str, str]] = {
    "slurm": {
        "account": "whom the time is charged to",
        "qos": "a quality of service",
        "partition": "where; for unequal nodes one for each kind, joined by +",
        "reservation": "a reservation",
        "constraint": "features that nodes must have",
        "cpus": "cores of each node; whole nodes if left out",
        "memory": "memory of each node, such as 64G",
        "image": "a container: an image for pyxis, or apptainer:FILE.sif",
        "python": "Python with plait on the nodes; the one that runs now if left out",
        "grace": "how long before the end of its time a run is told to save, such as 5 minutes",
    },
    "ssh": {
        "python": "Python with plait on the machines; if left out an environment is made from the wheel",
        "wheel": "the wheel to install; the newest in dist/ if left out",
        "folder": "the folder to work in; plait-runs in the home folder if left out",
        "port": "where node 0 listens; 24717 if left out",
        "address": "the address at which the others reach the first machine; as its name is known here, if left out",
    },
    "kubernetes": {
        "image": "the container image (needed)",
        "namespace": "the namespace",
        "queue": "Kueue's LocalQueue",
        "volume": "a claim that exists; one is made if left out",
        "storage": "the size of the claim that is made, such as 100Gi",
        "storage_class": "its class",
        "cpu": "cores of each pod",
        "memory": "memory of each pod, such as 64Gi",
        "rdma": "a resource of the RDMA device plugin, such as rdma/hca_shared_devices_a: each pod asks for one",
        "network": "host, where RDMA has no device plugin: pods use their machines' network",
        "grace": "how long a pod gets to save when it is taken away, such as 5 minutes",
    },
}
_CLOCK = re.compile(r"(?:(\d{1,4})-)?(\d{1,4})(?::([0-5]\d))?(?::([0-5]\d))?")
_PLAIN = re.compile(r"[A-Za-z0-9_./:@%+,=-]+")
_ANY_TEXT = ("grace", "wheel")
"""A time of two words, and a file of this machine, whose folder may have a blank in its name."""
_QUANTITY = r"\d+(\.\d+)?([kMGTPE]|[KMGTPE]i)?"
_OBJECT_NAME = r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_HOST = r"[A-Za-z0-9][A-Za-z0-9.-]*(:\d+)?"
_IMAGE = rf"({_HOST}/)?[a-z0-9]+([._-]+[a-z0-9]+|/[a-z0-9]+)*(:\w[\w.-]{{0,127}})?(@sha256:[0-9a-f]+)?"
_FORMS: Mapping[Scheduler, Mapping[str, tuple[re.Pattern[str], str]]] = {
    "slurm": {
        "constraint": (re.compile(r"[A-Za-z0-9_.:,&|*()\[\]+=/-]+"), "a100&ib"),
        "cpus": (re.compile(r"[1-9]\d{0,4}"), "16"),
        "memory": (re.compile(r"\d+[KMGT]?"), "64G"),
        "image": (
            re.compile(r"(?!apptainer:$)[A-Za-z0-9_./:@%+,=#-]+"),
            "HOST#NAME:TAG or apptainer:FILE.sif",
        ),
    },
    "ssh": {},
    "kubernetes": {
        "image": (re.compile(_IMAGE), "registry.example/plait:1"),
        "namespace": (re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"), "research"),
        "queue": (re.compile(_OBJECT_NAME), "research"),
        "volume": (re.compile(_OBJECT_NAME), "my-claim"),
        "storage": (re.compile(_QUANTITY), "100Gi"),
        "storage_class": (re.compile(_OBJECT_NAME), "standard"),
        "cpu": (re.compile(r"\d+(\.\d{1,3})?|\d+m"), "16"),
        "memory": (re.compile(_QUANTITY), "64Gi"),
        "rdma": (re.compile(rf"{_OBJECT_NAME}/[A-Za-z0-9]([\w.-]{{0,61}}[A-Za-z0-9])?"), "rdma/hca_shared_devices_a"),
    },
}
"""How values look that are not just any word, each with an example."""
SHORTEST_TIME_S = 60


def parse_options(texts: Sequence[str], scheduler: Scheduler) -> dict[str, str]:
    """`KEY=VALUE` texts by key; raises PlaitError for a key that this scheduler does not have, or an odd value."""
    known, found = OPTION_KEYS[scheduler], dict[str, str]()
    for text in texts:
        key, sign, value = text.partition("=")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise PlaitError(f"--with {key} is nothing that {scheduler} takes here; write {near or ', '.join(known)}")
        if not sign or not value:
            raise PlaitError(f"--with {key} has no value; write --with {key}=VALUE ({known[key]})")
        if key in found:
            raise PlaitError(f"--with {key} is given twice; write it once")
        _check_form(scheduler, key, value)
        found[key] = value
    return found


def _check_form(scheduler: Scheduler, key: str, value: str) -> None:
    if key in _FORMS[scheduler]:
        form, example = _FORMS[scheduler][key]
        if not (value.isascii() and form.fullmatch(value)):
            raise PlaitError(f"--with {key}={value!r} is not as {scheduler} writes it; write for example {example}")
    elif not (_PLAIN.fullmatch(value) or key in _ANY_TEXT):
        raise PlaitError(f"--with {key}={value!r} has signs that no name has; use letters, digits and -_./:")


def parse_scheduler(text: str) -> Scheduler:
    """A scheduler by its name; raises PlaitError for any other text."""
    for scheduler in SCHEDULERS:
        if text == scheduler:
            return scheduler
    raise PlaitError(f'--on "{text}" is no scheduler that plait submits to; write slurm, ssh or kubernetes')


def parse_kind(text: str) -> JobKind:
    """A kind of Kubernetes object by its name; raises PlaitError for any other text."""
    for kind in get_args(JobKind):
        if text == kind:
            return kind
    raise PlaitError(f'--kind "{text}" is no kind of job; write jobset, trainjob or job')


def parse_port(text: str) -> int:
    """A port of "--with port="; raises PlaitError for anything else."""
    if not text.isdecimal() or not 0 < int(text) < 1 << 16:
        raise PlaitError(f"--with port={text} is no port; write a number from 1024 to 65535, or leave it out")
    return int(text)


def parse_grace_s(text: str) -> int:
    """Seconds of "5 minutes" in which a run saves; raises PlaitError for anything else, and for less than ten."""
    return parse_time_s(text, option="--with grace=", shortest_s=10)


def parse_time_s(text: str, *, option: str = "--time ", shortest_s: int = SHORTEST_TIME_S) -> int:
    """Seconds of "2 hours", or a scheduler's "36:00:00", "1-12:00:00" and "1-12"; raises PlaitError for all else."""
    match = _CLOCK.fullmatch(text.strip())
    if match and match[1] is None and match[3] is not None and match[4] is None:
        raise PlaitError(
            f'{option}"{text}" may be minutes or hours; write {text}:00 for hours, or "{match[2]} minutes"'
        )
    if match and (match[1] is not None or match[4] is not None):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    else:
        try:
            amount = parse_amount(text)
        except PlaitError:
            amount = None
        if amount is None or amount.unit != "seconds":
            raise PlaitError(f'{option}"{text}" is no time; write for example "8 hours" or 08:00:00')
        total = round(amount.value)
    if total < shortest_s:
        raise PlaitError(f'{option}"{text}" is too short to do anything in; write {shortest_s} s or more')
    return total


def parse_machines(text: str | None) -> tuple[str, ...]:
    """The names of "a,b,c"; raises PlaitError for what ssh would take for an option."""
    names: Sequence[str] = [name.strip() for name in (text or "").split(",")] if text else []
    for name in names:
        if not name or name.startswith("-") or any(sign.isspace() for sign in name):
            raise PlaitError(f'--machines has "{name}", which is no name of a machine; write them as a,b,c')
    return tuple(names)
