"""receipt.json: a run's receipt as a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from math import isfinite, isnan, nan
from pathlib import Path
from typing import Any

from plait.checked_json import parse_object, sealed_text, typed_value
from plait.errors import PlaitError
from plait.layout import AXES
from plait.regular_file import read_regular_file
from plait.report.atomic import replace_file
from plait.report.bottleneck import RunBottleneck
from plait.report.receipt import ITEM_NAMES, Receipt

DERIVED = ("step_error", "memory_error", "rss_error", "speedup_vs_one", "efficiency")
"""Keys that are written for people who read the file, and computed again when it is read."""
NULL_IF_NAN = ("train_loss", "step_s_median", "tokens_per_s")
"""Keys that are null in the file where the run has no such number; other keys are null where there is none."""

_ABOVE_ZERO = (
    "step_s_median", "predicted_step_s", "timed_step_s", "untimed_step_s", "one_device_step_s",
    "predicted_peak_bytes_per_device", "predicted_rss_bytes",
)  # fmt: skip
_SMALLEST, _LARGEST = 1e-15, 1e30
"""Beyond these nothing is measured, and ratios of two figures could be more than a float holds."""


def write_receipt(receipt: Receipt, path: Path) -> None:
    """Write receipt.json in one piece; raises RunFailed on a full disk."""
    names = (*(field.name for field in fields(receipt)), *DERIVED)
    replace_file(path, sealed_text({name: _plain(getattr(receipt, name)) for name in names}).encode())


def read_receipt(path: Path) -> Receipt:
    """Read receipt.json; raises PlaitError where it is missing or is not one."""
    try:
        values = parse_object(read_regular_file(path))
        lost = {name: nan for name in NULL_IF_NAN if values.get(name, 0.0) is None}
        kept = {name: value for name, value in values.items() if name not in DERIVED}
        return _checked(replace(typed_value(Receipt, kept | dict.fromkeys(lost, 0.0)), **lost))
    except FileNotFoundError:
        raise PlaitError(f"{path} is missing: the run has not finished; give its command again") from None
    except (OSError, ValueError) as error:
        raise PlaitError(f"{path} is not a receipt ({error}); delete it and give the run's command again") from None


def _checked(receipt: Receipt) -> Receipt:
    """Raise ValueError for keys that no layout or step has, and for a run of no ranks."""
    items = [items.keys() for items in (receipt.predicted_items, receipt.measured_items) if items is not None]
    if receipt.layout.keys() - set(AXES) or any(keys != ITEM_NAMES.keys() for keys in items):
        raise ValueError("its layout or its items have other keys than plait writes")
    if receipt.world_size < 1 or min(receipt.layout.values(), default=1) < 1:
        raise ValueError("its layout has fewer than one rank")
    for field in fields(receipt):
        value, least = getattr(receipt, field.name), _SMALLEST if field.name in _ABOVE_ZERO else 0.0
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, int | float) and not (isnan(one) or least <= one <= _LARGEST):
                raise ValueError(f"{field.name} is {one:g}, which no run comes to")
    return receipt


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, RunBottleneck):
        return asdict(value)
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
