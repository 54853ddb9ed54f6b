"""Shapes of models that the tables name without telling all: as their makers published them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.published.cells import Row, count, number
from plait.planner.problem.other_programs import OtherLayers

Shape = Mapping[str, Any]

PLAIN = r"^(gpt|bloom|mpt|nemotron|megatron|mt-nlg|opt|neox|pythia)"
"""Families whose feedforward has no gate."""


def published_shape(row: Row) -> tuple[dict[str, Any], bool]:
    """The model of a row as the arguments of a workload, and whether a cell had to be filled by a rule.

    The row's own cells count before the published shape; a model that nobody knows gets the depth and width that
    dense models of its size have.
    """
    name = row["model"].lower()
    known = dict(next((shape for pattern, shape in known_shapes() if re.search(pattern, name)), {}))
    own = {key: value for key, value in _own_cells(row).items() if value}
    guessed = any(key not in own for key in ("layers", "width", "heads", "ffn", "vocabulary"))
    shape = _of_size(number(row, "params_b") or _size_in(name)) | known | own
    if known.get("experts"):  # the table's ffn is one expert's
        shape |= {"ffn": known["ffn"], "expert_ffn": known["expert_ffn"]}
        # A model cut to its first layers for a test keeps at most a quarter of them dense.
        if shape["layers"] < known["layers"]:
            shape["dense_layers"] = min(known.get("dense_layers", 0), shape["layers"] // 4)
    shape.setdefault("kv_heads", shape["heads"])
    if "head_width" not in known:
        shape["heads"] = _heads_that_divide(shape["width"], shape["heads"])
        shape["head_width"] = shape["width"] // shape["heads"]
    shape["kv_heads"] = min(shape["kv_heads"], shape["heads"])
    shape.setdefault("gated", _gated(shape, number(row, "params_b"), name))
    shape.setdefault("tied", bool(re.match(r"(gpt|bloom|mpt|mt-nlg)", name)) and "oss" not in name)
    others = {field.name: shape.pop(field.name) for field in fields(OtherLayers) if field.name in shape}
    others["local_layers"] = min(others.get("local_layers", 0), shape["layers"])
    return shape | {"other_layers": OtherLayers(**others)}, guessed


@cache
def known_shapes() -> tuple[tuple[str, Shape], ...]:
    """Patterns of model names with their shapes."""
    entries = tomllib.loads((Path(__file__).parent / "shapes.toml").read_text(encoding="utf-8"))["shape"]
    return tuple((entry.pop("model"), entry) for entry in entries)


def _own_cells(row: Row) -> dict[str, int | None]:
    columns = {"width": "hidden", "vocabulary": "vocab"}
    return {
        key: count(row, columns.get(key, key)) for key in ("layers", "width", "heads", "kv_heads", "ffn", "vocabulary")
    }


def _heads_that_divide(width: int, heads: int) -> int:
    """Heads as told, or where they do not divide the width (some were inferred from a size), the next fewer that do."""
    while width % heads or (width // heads) % 2:
        heads -= 1
    return max(heads, 1)


def _gated(shape: Shape, billions: float | None, name: str) -> bool:
    """The feedforward whose weights come nearer to the published size; without a size, by the family."""
    if not billions or shape.get("experts"):
        return not re.match(PLAIN, name) or "oss" in name
    width = shape["width"]
    attention = width * shape["head_width"] * 2 * (shape["heads"] + shape["kv_heads"])

    def size(matrices: int) -> float:
        layers = shape["layers"] * (attention + matrices * width * shape["ffn"])
        return layers + shape["vocabulary"] * width

    return abs(size(3) / billions / 1e9 - 1) < abs(size(2) / billions / 1e9 - 1)


def _size_in(name: str) -> float:
    found = re.search(r"([\d.]+)\s*b\b", name) or re.search(r"([\d.]+)\s*b", name)
    return float(found[1]) if found and found[1] != "." else 7.0


def _of_size(billions: float) -> dict[str, Any]:
    """Depth and width that dense models of this size have: width about 128 × layers, heads of 128."""
    layers = max(round((billions * 1e9 / 12 / 128**2) ** (1 / 3)), 2)
    width = 128 * layers
    return {"layers": layers, "width": width, "heads": max(width // 128, 1), "ffn": 4 * width, "vocabulary": 51200}
