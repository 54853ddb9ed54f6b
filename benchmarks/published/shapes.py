"""Shapes of models that the tables name without telling all: as their makers published them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from benchmarks.published.cells import Row, count, number

Shape = Mapping[str, Any]

# Latent attention (DeepSeek-V2 and V3, Kimi K2) and state-space layers (Nemotron 3) are given by the weights of one
# layer's projections; head_width is the mean of the widths of keys (192) and values (128).
_LATENT = {"heads": 128, "kv_heads": 128, "head_width": 160}
KNOWN: tuple[tuple[str, Shape], ...] = (
    ("deepseek-?_?v?3|deepseekv3", dict(_LATENT, layers=61, width=7168, ffn=18432, vocabulary=129280, experts=256, experts_per_token=8, expert_ffn=2048, shared_ffn=2048, dense_layers=3, projection_weights=187_000_000)),
    ("deepseek-?_?v?2", dict(_LATENT, layers=60, width=5120, ffn=12288, vocabulary=102400, experts=160, experts_per_token=6, expert_ffn=1536, shared_ffn=3072, dense_layers=1, projection_weights=149_000_000)),
    ("deepseek-?_?v?4", dict(layers=43, width=4096, heads=64, kv_heads=1, head_width=256, ffn=2048, vocabulary=129280, experts=256, experts_per_token=6, expert_ffn=2048, shared_ffn=2048, window=1024, local_layers=43)),
    ("kimi", dict(_LATENT, layers=61, width=7168, heads=64, kv_heads=64, ffn=18432, vocabulary=163840, experts=384, experts_per_token=8, expert_ffn=2048, shared_ffn=2048, dense_layers=1, projection_weights=101_000_000)),
    ("qwen3_?-?235", dict(layers=94, width=4096, heads=64, kv_heads=4, head_width=128, ffn=1536, vocabulary=151936, experts=128, experts_per_token=8, expert_ffn=1536)),
    ("qwen3_?-?30", dict(layers=48, width=2048, heads=32, kv_heads=4, head_width=128, ffn=768, vocabulary=151936, experts=128, experts_per_token=8, expert_ffn=768)),
    ("qwen3_?-?next", dict(layers=48, width=2048, heads=16, kv_heads=2, head_width=256, ffn=512, vocabulary=151936, experts=512, experts_per_token=10, expert_ffn=512, shared_ffn=512, attending_layers=12)),
    ("gpt[ _-]oss[ _-]120", dict(layers=36, width=2880, heads=64, kv_heads=8, head_width=64, ffn=2880, vocabulary=201088, experts=128, experts_per_token=4, expert_ffn=2880, window=128, local_layers=18)),
    ("gpt[ _-]oss[ _-]20", dict(layers=24, width=2880, heads=64, kv_heads=8, head_width=64, ffn=2880, vocabulary=201088, experts=32, experts_per_token=4, expert_ffn=2880, window=128, local_layers=12)),
    ("grok", dict(layers=64, width=6144, heads=48, kv_heads=8, head_width=128, ffn=32768, vocabulary=131072, experts=8, experts_per_token=2, expert_ffn=32768)),
    ("mixtral.?8x22", dict(layers=56, width=6144, heads=48, kv_heads=8, head_width=128, ffn=16384, vocabulary=32768, experts=8, experts_per_token=2, expert_ffn=16384)),
    ("mixtral.?8x7", dict(layers=32, width=4096, heads=32, kv_heads=8, head_width=128, ffn=14336, vocabulary=32000, experts=8, experts_per_token=2, expert_ffn=14336)),
    ("llama4.*maverick", dict(layers=48, width=5120, heads=40, kv_heads=8, head_width=128, ffn=16384, vocabulary=202048, experts=128, experts_per_token=1, expert_ffn=8192, shared_ffn=8192, dense_layers=24)),
    ("llama4.*scout", dict(layers=48, width=5120, heads=40, kv_heads=8, head_width=128, ffn=8192, vocabulary=202048, experts=16, experts_per_token=1, expert_ffn=8192, shared_ffn=8192)),
    ("nemotron_3_?5?_?(nano|lightning)", dict(layers=52, width=2688, heads=32, kv_heads=2, head_width=128, ffn=0, vocabulary=131072, experts=128, experts_per_token=6, expert_ffn=1856, shared_ffn=3712, gated=False, dense_layers=29, attending_layers=6, projection_weights=21_000_000)),
    ("nemotron_3_super", dict(layers=88, width=4096, heads=32, kv_heads=2, head_width=128, ffn=0, vocabulary=131072, experts=512, experts_per_token=22, expert_ffn=672, shared_ffn=5376, gated=False, dense_layers=48, attending_layers=8, projection_weights=58_000_000)),
    ("nemotron_3_ultra", dict(layers=108, width=8192, heads=64, kv_heads=2, head_width=128, ffn=0, vocabulary=131072, experts=512, experts_per_token=22, expert_ffn=1344, shared_ffn=10752, gated=False, dense_layers=60, attending_layers=12, projection_weights=230_000_000)),
    ("gemma-?4-?26", dict(layers=30, width=2816, heads=16, kv_heads=8, head_width=256, ffn=2112, vocabulary=262144, experts=128, experts_per_token=8, expert_ffn=704, shared_ffn=2112, tied=True, window=1024, local_layers=25)),
    ("gemma-?4-?31", dict(layers=60, width=5376, heads=32, kv_heads=16, head_width=256, ffn=21504, vocabulary=262144, tied=True, window=1024, local_layers=50)),
    ("gemma3-12", dict(layers=48, width=3840, heads=16, kv_heads=8, head_width=256, ffn=15360, vocabulary=262144, tied=True, window=1024, local_layers=40)),
    ("llama.?3.*405", dict(layers=126, width=16384, heads=128, kv_heads=8, head_width=128, ffn=53248, vocabulary=128256)),
    ("llama.?3.*70", dict(layers=80, width=8192, heads=64, kv_heads=8, head_width=128, ffn=28672, vocabulary=128256)),
    ("llama.?3.*8b", dict(layers=32, width=4096, heads=32, kv_heads=8, head_width=128, ffn=14336, vocabulary=128256)),
    ("gpt-?3.*175", dict(layers=96, width=12288, heads=96, kv_heads=96, head_width=128, ffn=49152, vocabulary=51200, gated=False)),
)  # fmt: skip
"""Patterns of model names, the first match counting."""

PLAIN = r"^(gpt|bloom|mpt|nemotron|megatron|mt-nlg|opt|neox|pythia)"
"""Families whose feedforward has no gate."""


def published_shape(row: Row) -> tuple[dict[str, Any], bool]:
    """The model of a row as the arguments of a workload, and whether a cell had to be filled by a rule.

    The row's own cells count before the published shape; a model that nobody knows gets the depth and width that
    dense models of its size have.
    """
    name = row["model"].lower()
    known = dict(next((shape for pattern, shape in KNOWN if re.search(pattern, name)), {}))
    own = {key: value for key, value in _own_cells(row).items() if value}
    guessed = any(key not in own for key in ("layers", "width", "heads", "ffn", "vocabulary"))
    shape = _of_size(number(row, "params_b") or _size_in(name)) | known | own
    if known.get("experts"):  # the table's ffn is one expert's
        shape["ffn"], shape["expert_ffn"] = known["ffn"], known["expert_ffn"]
        shape["dense_layers"] = min(known.get("dense_layers", 0), max(shape["layers"] // 4, 0)) if shape["layers"] < known["layers"] else known.get("dense_layers", 0)  # fmt: skip
    shape.setdefault("kv_heads", shape["heads"])
    shape["heads"] = _heads_that_divide(shape["width"], shape["heads"]) if "head_width" not in known else shape["heads"]
    shape["kv_heads"] = min(shape["kv_heads"], shape["heads"])
    shape.setdefault("head_width", max(shape["width"] // shape["heads"], 1))
    shape.setdefault("gated", _gated(shape, number(row, "params_b"), name))
    shape.setdefault("tied", bool(re.match(r"(gpt|bloom|mpt|mt-nlg)", name)) and "oss" not in name)
    if shape["window"] if "window" in shape else 0:
        shape["local_layers"] = min(shape["local_layers"], shape["layers"])
    return shape, guessed


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
    layers = max(int(round((billions * 1e9 / 12 / 128**2) ** (1 / 3))), 2)
    width = 128 * layers
    return {"layers": layers, "width": width, "heads": max(width // 128, 1), "ffn": 4 * width, "vocabulary": 51200}
