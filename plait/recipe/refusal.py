"""A recipe that does not fit the schema, as one sentence with its correction."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ValidationError

from plait.checked_json import Found, own_sentence, wanted_value
from plait.recipe.schema import RunConfig, SourceSection
from plait.recipe.values import LONGEST_NAME


def refusal_sentence(error: ValidationError) -> str:
    """The first validation error as one sentence with its correction; an unknown key comes before all other errors."""
    complaints = error.errors(include_url=False)
    first = next((c for c in complaints if c["type"] == "extra_forbidden"), complaints[0])
    location = [str(part) for part in first["loc"]]
    section, name = _section(location)
    if first["type"] == "extra_forbidden":
        inside = SourceSection if location[:2] == ["data", "files"] else section
        return _unknown(".".join(map(_shown, [*location[:2], *location[2:][-1:]])), location[-1], inside)
    if first["type"] == "missing" and len(location) <= 2:
        return f'the recipe does not say {".".join(location)}; add for example files = "my-text.txt" under [data]'
    about = [c for c in complaints if [str(part) for part in c["loc"][:2]] == location[:2]]
    own = next((sentence for c in about if (sentence := own_sentence(c))), None)
    wanted = " or ".join(dict.fromkeys(wanted_value(c) for c in about))
    key = ".".join(location[: 2 if name else 1])
    return (
        f"{key} is not usable: {own or f'it should be {wanted}'}{_describe(section, name)}{_did_you_mean(key, about)}"
    )


_LIKELY_BELOW = 1e9
"""Larger numbers are unlikely to mean minutes or steps."""


def _did_you_mean(key: str, about: Sequence[Found]) -> str:
    """A number where an amount such as "60 steps" is wanted: the likely units."""
    given = about[0]["input"]
    is_amount = key == "train.budget" or key.endswith(".every")
    if is_amount and isinstance(given, int | float) and not isinstance(given, bool) and 0 < given < _LIKELY_BELOW:
        minutes = "minute" if given == 1 else "minutes"
        steps = f' or "{given} {"step" if given == 1 else "steps"}"' if float(given).is_integer() else ""
        return f'; did you mean "{given} {minutes}"{steps}?'
    return ""


def _section(location: Sequence[str]) -> tuple[type[BaseModel], str | None]:
    """The schema section that contains a location, and the name of its field at that location, or None."""
    field = RunConfig.model_fields.get(location[0])
    if field is None or not isinstance(field.annotation, type):
        return RunConfig, None
    known = field.annotation
    name = next((own for own, key in _keys(known).items() if key in location[1:2]), None)
    return known, name


def _keys(section: type[BaseModel]) -> dict[str, str]:
    """The key in the recipe of each field of a section."""
    return {name: field.alias or name for name, field in section.model_fields.items()}


def _unknown(key: str, word: str, section: type[BaseModel]) -> str:
    names = list(_keys(section).values())
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    if setting := setting_named(word):
        return f"{key} is not a key of the recipe; did you mean {setting}?"
    if near:
        path = key.rpartition(".")[0]
        return f"{key} is not a key of the recipe; did you mean {f'{path}.' if path else ''}{near[0]}?"
    return f"{key} is not a key of the recipe; known here are {', '.join(names)}"


def setting_named(word: str) -> str:
    """The first key of a recipe, as section.key, whose last part is the word; empty where there is none."""
    tops = (top for top, field in RunConfig.model_fields.items() if word in _fields(field.annotation))
    return next((f"{top}.{word}" for top in tops), "")


def described_settings() -> list[tuple[str, str]]:
    """Every key of a recipe, as section.key, with what it is."""
    sections = ((top, field.annotation) for top, field in RunConfig.model_fields.items())
    return [
        (f"{top}.{key}", (section.model_fields[name].description or "").partition("\n")[0])
        for top, section in sections
        if isinstance(section, type) and issubclass(section, BaseModel)
        for name, key in _keys(section).items()
    ]


def _fields(annotation: object) -> Mapping[str, object]:
    return getattr(annotation, "model_fields", {})


def _shown(key: str) -> str:
    """A key as it stands in the file, in quotes where it is empty or has signs that a terminal would obey."""
    return key[:LONGEST_NAME] if key.isprintable() and key else json.dumps(key)[:LONGEST_NAME]


def _describe(section: type[BaseModel], name: str | None) -> str:
    text = section.model_fields[name].description if name else None
    return f" ({text.rstrip('.')})" if text else ""
