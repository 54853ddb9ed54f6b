"""Where the rates of matrix products are kept between runs: a file for each machine, its software, and work."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from plait.checked_json import parse_object, sealed_text
from plait.errors import RunFailed
from plait.machines.machine import Machine
from plait.machines.measured import ProductRates
from plait.private_folder import make_private_folder
from plait.regular_file import read_regular_file
from plait.report.atomic import replace_file
from plait.working_folder import WorkingFolder

RATES_FORMAT = 1
"""Raised when other products are measured, so that earlier rates are not used."""


def rates_path(working: WorkingFolder, machine: Machine, measured: Sequence[Any]) -> Path:
    """The file for what was measured (JSON: which products, on how many workers of how many threads) on a machine."""
    given = [RATES_FORMAT, machine.fingerprint(), *measured]
    return working.cache / "products" / f"{sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:32]}.json"


def kept_rates(path: Path) -> Sequence[ProductRates]:
    """The rates of a file, of each worker; nothing where it is missing or no longer what was written."""
    try:
        return [ProductRates.from_values(values) for values in parse_object(read_regular_file(path))["ranks"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def keep_rates(path: Path, rates: Sequence[ProductRates]) -> None:
    """Cache the rates; write errors are ignored."""
    with suppress(OSError, RunFailed):
        make_private_folder(path.parent)
        replace_file(path, sealed_text({"ranks": [one.to_values() for one in rates]}).encode())
