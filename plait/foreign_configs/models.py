"""The model that a configuration refers to by name: from a list of public models, or from transformers' config.json."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from plait.checked_json import parse_json
from plait.errors import PlaitError
from plait.interop.config_in import shape_of_config
from plait.planner.problem.workload import Workload, workload_of
from plait.regular_file import SMALL_FILE_BYTES, read_regular_text

_WORDS = (
    r"(?:[-_](?:hf|base|instruct|chat|it|pt|bnb-4bit|bnb|4bit|sft|unsloth|fp16|bf16|\d{4}|v0[.][12]|v\d+[.]?\d*|rl|think|"
    r"intermediate-step.*|4k|128k))*"
)
"""Words of a hub id after the model's own name."""


def is_there(path: Path) -> bool:
    """Whether a file has this name; text that is too long to be a name has none."""
    try:
        return path.is_file()
    except OSError:
        return False


def model_numbers(model: str) -> Mapping[str, Any]:
    """Sizes of a named model, by field of `Workload`; raises PlaitError, with what to give, for an unknown one."""
    folder = Path(model) / "config.json"
    for config in (folder, Path(model)):
        if is_there(config):
            return _of_config(config)
    last = model.rstrip("/").rpartition("/")[2].lower()
    known = _models()
    for pattern, numbers in known:
        if re.fullmatch(f"(?:{pattern}){_WORDS}", last):
            return numbers
    plain = [re.sub(r"\(.*?\)[?]?|\[.*?\]|[?*|\\].*", "", pattern) for pattern, _ in known]
    near = difflib.get_close_matches(last, plain, n=2, cutoff=0.5)
    nearest = f"; the nearest that it knows: {', '.join(near)}" if near else ""
    raise PlaitError(
        f"the size of {model} is not in the file, and plait does not know this model{nearest}",
        "give model=PATH with its config.json (the folder that you downloaded, or that file alone)",
    )


_OF_SHAPE = (
    "layers", "width", "heads", "kv_heads", "head_width", "ffn", "gated", "vocabulary", "tied", "experts",
    "experts_per_token", "expert_ffn", "shared_ffn", "dense_layers", "latent", "projection_weights",
)  # fmt: skip


def _of_config(file: Path) -> Mapping[str, Any]:
    try:
        values = parse_json(read_regular_text(file, SMALL_FILE_BYTES))
    except (OSError, ValueError) as error:
        raise PlaitError(f"{file} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise PlaitError(f"{file} is not a config.json of transformers: it is not a JSON object")
    found = workload_of(shape_of_config(values), sequence=1, batch_sequences=1)
    return {name: getattr(found, name) for name in _OF_SHAPE}


@cache
def _models() -> tuple[tuple[str, Mapping[str, Any]], ...]:
    entries = tomllib.loads((Path(__file__).parent / "models.toml").read_text(encoding="utf-8"))["models"]
    return tuple((entry.pop("ids"), entry) for entry in entries)


MOST_MODEL_LAYERS = 10_000


def workload_numbers(shape: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes, completed by those that follow from them: head width, gate, a separate head. Raises PlaitError if they
    contradict each other."""
    numbers = dict(shape)
    missing = [name for name in ("layers", "width", "heads", "vocabulary") if name not in numbers]
    if missing:
        raise PlaitError(f"the model's {', '.join(missing)} are not in the file; give model=NAME or a config.json")
    heads = numbers["heads"]
    if "head_width" not in numbers:
        if numbers["width"] % heads:
            raise PlaitError(f"{heads} heads do not divide a width of {numbers['width']}; change one of them")
        numbers["head_width"] = numbers["width"] // heads
    numbers.setdefault("kv_heads", heads)
    if heads % numbers["kv_heads"]:
        raise PlaitError(f"{numbers['kv_heads']} key heads do not divide {heads} query heads; change one of them")
    numbers.setdefault("ffn", 4 * numbers["width"])
    numbers.setdefault("gated", True)
    numbers.setdefault("tied", False)
    if numbers.get("layers", 1) > MOST_MODEL_LAYERS:
        layers = numbers["layers"]
        raise PlaitError(f"{layers} layers are too many; write {MOST_MODEL_LAYERS:,} or fewer")
    return numbers


def model_size_of(shape: Mapping[str, Any]) -> int:
    """Number of weights of a model of these sizes."""
    return Workload(**workload_numbers(shape), sequence=1, batch_sequences=1).parameters
