"""The options of `plait submit`, read and checked."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from plait.arguments import texts_of
from plait.errors import PlaitError
from plait.regular_file import read_regular_file
from plait.units import parse_amount

Scheduler = Literal["slurm", "ssh", "kubernetes", "ray", "skypilot", "dstack"]
JobKind = Literal["jobset", "trainjob", "job"]
SHORTEST_TIME_S = 60
_OWN_TEXT_BYTES = 1 << 20
WORD = r"[A-Za-z0-9_./:@%+,=-]+"
_CLOCK = re.compile(r"(?:(\d{1,4})-)?(\d{1,4})(?::([0-5]\d))?(?::([0-5]\d))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitRequest:
    """A submission as the user typed it; None or empty for what plait chooses."""

    target: tuple[str, ...]
    scheduler: Scheduler
    cluster: str | None = None
    nodes: int | None = None
    gpus: int | None = None
    machines: tuple[str, ...] = ()
    time: str | None = None
    kind: JobKind | None = None
    options: tuple[str, ...] = ()
    """Each is `KEY=VALUE`."""


@dataclass(frozen=True, slots=True)
class Option:
    """One key of `--with`."""

    about: str
    form: str = WORD
    """A regular expression for its values."""
    example: str = ""
    """A valid value, for the error."""


def request_from_call(
    target: tuple[str, ...], on: str, cluster: str | None, nodes: int | None, options: Mapping[str, object] | None
) -> SubmitRequest:
    """The request of a Python caller, whose `options` are time, gpus, machines, kind and the keys of `--with`."""
    if not isinstance(options or {}, Mapping):
        raise PlaitError(f"options = {options!r:.80} is not usable; give a dict, for example {{'partition': 'gpu'}}")
    asked = dict(options or {})
    gpus, machines, time = asked.pop("gpus", None), asked.pop("machines", ()), asked.pop("time", None)
    if gpus is not None and (isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 1):
        raise PlaitError(f"options: gpus = {gpus!r:.80} is not usable; give a whole number, 1 or more")
    named = ",".join(texts_of("options: machines", machines))
    return SubmitRequest(
        target=target,
        scheduler=parse_scheduler(on),
        cluster=cluster,
        nodes=nodes,
        gpus=gpus,
        machines=parse_machines(named or None),
        time=None if time is None else str(time),
        kind=parse_kind(str(asked.pop("kind"))) if "kind" in asked else None,
        options=tuple(f"{key}={value}" for key, value in asked.items()),
    )


def parse_options(texts: Sequence[str], known: Mapping[str, Option], scheduler: Scheduler) -> dict[str, str]:
    """The values of `KEY=VALUE` texts by key."""
    found = dict[str, str]()
    for text in texts:
        key, sign, value = text.partition("=")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise PlaitError(f"--with {key}: {scheduler} has no such option; write {', '.join(near or known)}")
        option = known[key]
        if not sign or not value:
            raise PlaitError(f"--with {key} has no value; write --with {key}=VALUE ({option.about})")
        if key in found:
            raise PlaitError(f"--with {key} is given twice; write it once")
        if not re.fullmatch(option.form, value, re.ASCII | re.DOTALL):
            said = f"--with {key}={value!r}"
            if option.example:
                raise PlaitError(f"{said} is not in the form that {scheduler} uses; write for example {option.example}")
            raise PlaitError(f"{said} has unusable characters; use letters, digits and -_./:")
        found[key] = value
    return found


def read_own_text(file: Path, key: str) -> str:
    """The text of the file in `--with KEY=FILE`; raises PlaitError if it cannot be read."""
    try:
        return read_regular_file(file, _OWN_TEXT_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise PlaitError(f"--with {key}={file} cannot be read ({why}); name a text file") from None


def parse_scheduler(text: str) -> Scheduler:
    """The value of `--on`."""
    for scheduler in get_args(Scheduler):
        if text == scheduler:
            return scheduler
    known = get_args(Scheduler)
    raise PlaitError(
        f'--on "{text}" is not a scheduler that plait submits to; write {", ".join(known[:-1])} or {known[-1]}'
    )


def parse_kind(text: str) -> JobKind:
    """The value of `--kind`."""
    for kind in get_args(JobKind):
        if text == kind:
            return kind
    raise PlaitError(f'--kind "{text}" is not a kind of job; write jobset, trainjob or job')


def parse_machines(text: str | None) -> tuple[str, ...]:
    """The names of "a,b,c"; raises PlaitError for a name that ssh would take for an option."""
    names = [name.strip() for name in text.split(",")] if text else []
    for name in names:
        if not name or name.startswith("-") or any(sign.isspace() for sign in name):
            raise PlaitError(f'--machines has "{name}", which is not the name of a machine; write them as a,b,c')
    return tuple(names)


def parse_time_s(text: str, *, option: str = "--time ", shortest_s: int = SHORTEST_TIME_S) -> int:
    """Seconds of "2 hours", or a scheduler's "36:00:00", "1-12:00:00" and "1-12"."""
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
            raise PlaitError(f'{option}"{text}" is not a length of time; write for example "8 hours" or 08:00:00')
        total = round(amount.value)
    if total < shortest_s:
        raise PlaitError(f'{option}"{text}" is too short to do anything in; write {shortest_s} s or more')
    return total
