"""The arguments of Python callers, checked by name: one sentence for a wrong one, before anything begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import ParamSpec, TypeVar

from plait.errors import PlaitError

_Types = tuple[type, ...]
_Parameters = ParamSpec("_Parameters")
_Returned = TypeVar("_Returned")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """What an argument may be: its types in words, and the least number or the words that are allowed."""

    text: str
    types: _Types
    least: float | None = None
    words: Sequence[str] = field(default=())


_TEXT = _Wanted(text="a text", types=(str,))
_OPTIONAL_TEXT = _Wanted(text="a text", types=(str, type(None)))
_PATH = _Wanted(text="a path", types=(str, Path))
_OPTIONAL_PATH = _Wanted(text="a path", types=(str, Path, type(None)))
_COUNT = _Wanted(text="a whole number", types=(int,), least=1)
_OPTIONAL_COUNT = _Wanted(text="a whole number", types=(int, type(None)), least=1)
_NATURAL = _Wanted(text="a whole number", types=(int,), least=0)
_REAL = _Wanted(text="a number", types=(int, float), least=0)
_YES_OR_NO = _Wanted(text="True or False", types=(bool,))
_WANTED: Mapping[str, _Wanted] = {
    "adapter": _OPTIONAL_PATH,
    "address": _OPTIONAL_TEXT,
    "again": _YES_OR_NO,
    "at": _TEXT,
    "availability": _OPTIONAL_PATH,
    "choices": _OPTIONAL_PATH,
    "cluster": _OPTIONAL_TEXT,
    "deed": _Wanted(text='"send" or "show"', types=(str,), words=("send", "show")),
    "heldout_of": _OPTIONAL_PATH,
    "dtype": _Wanted(text='"float32", "bfloat16" or "float16"', types=(str,), words=("float32", "bfloat16", "float16")),
    "field": _OPTIONAL_TEXT,
    "folder": _OPTIONAL_PATH,
    "form": _Wanted(text='"auto", "list" or "frame"', types=(str,), words=("auto", "list", "frame")),
    "hosts": _COUNT,
    "nodes": _OPTIONAL_COUNT,
    "html": _OPTIONAL_PATH,
    "limit_s": _REAL,
    "md": _OPTIONAL_PATH,
    "on": _Wanted(
        text='"slurm", "ssh", "kubernetes", "ray", "skypilot" or "dstack"',
        types=(str,),
        words=("slurm", "ssh", "kubernetes", "ray", "skypilot", "dstack"),
    ),
    "pool": _OPTIONAL_PATH,
    "port": _NATURAL,
    "progress": _Wanted(text='"auto", "lines" or "off"', types=(str,), words=("auto", "lines", "off")),
    "prompt": _TEXT,
    "run": _PATH,
    "secret_file": _OPTIONAL_PATH,
    "seed": _Wanted(text="a whole number", types=(int,)),
    "sequence": _Wanted(text="a whole number", types=(int, type(None)), least=2),
    "silent_s": _REAL,
    "steps": _COUNT,
    "target": _PATH,
    "temperature": _REAL,
    "threads": _OPTIONAL_COUNT,
    "timing": _Wanted(text='"bounded" or "none"', types=(str,), words=("bounded", "none")),
    "to": _PATH,
    "tokens": _COUNT,
    "top_p": _REAL,
    "what": _Wanted(text='"model", "adapter" or "merged"', types=(str,), words=("model", "adapter", "merged")),
    "where": _Wanted(text='"anywhere" or "here"', types=(str,), words=("anywhere", "here")),
    "workers": _OPTIONAL_COUNT,
}


def check_arguments(**arguments: object) -> None:
    """Raise PlaitError for the first argument that is not what its name wants."""
    for name, value in arguments.items():
        wanted = _WANTED[name]
        is_bool = isinstance(value, bool) and bool not in wanted.types
        if is_bool or not isinstance(value, wanted.types) or (wanted.words and value not in wanted.words):
            raise PlaitError(f"{name} = {value!r:.80} is not usable; give {wanted.text}")
        if isinstance(value, int | float) and wanted.least is not None and not value >= wanted.least:
            raise PlaitError(f"{name} = {value!r} is too small; give {wanted.least:g} or more")


def texts_of(name: str, values: object) -> Sequence[str]:
    """The texts or paths of a list, or a single one; raises PlaitError for anything else."""
    if isinstance(values, str | Path):
        return [str(values)]
    if not isinstance(values, list | tuple) or not all(isinstance(value, str | Path) for value in values):
        raise PlaitError(f"{name} = {values!r:.80} is not usable; give a list of texts")
    return [str(value) for value in values]


def with_known_keywords(
    *options: str, hint: Callable[[str, Sequence[str]], str] = lambda unknown, known: ""
) -> Callable[[Callable[_Parameters, _Returned]], Callable[_Parameters, _Returned]]:
    """Decorates a public function: a keyword that it does not take is answered with one sentence that says what to
    write. `options` are the names behind its `**options`; `hint` may have better advice than the nearest name."""

    def decorated(function: Callable[_Parameters, _Returned]) -> Callable[_Parameters, _Returned]:
        @wraps(function)
        def call(*arguments: _Parameters.args, **keywords: _Parameters.kwargs) -> _Returned:
            named = [one.name for one in signature(function).parameters.values() if one.kind != Parameter.VAR_KEYWORD]
            known = [*named, *options]
            if unknown := next((name for name in keywords if name not in known), None):
                advice = hint(unknown, known) or _nearest_names(unknown, known)
                raise PlaitError(f"plait.{function.__name__} takes no {unknown}; {advice}")
            return function(*arguments, **keywords)

        return call

    return decorated


def _nearest_names(unknown: str, known: Sequence[str]) -> str:
    if near := get_close_matches(unknown, known, n=1):
        return f"did you mean {near[0]}?"
    return f"it takes {', '.join(known)}" if known else "it takes nothing"
