"""While a party only loads programs its hosts have a processor each: how long a small share of one takes for that is
nobody's matter where the steps are timed. plait measures the hosts meanwhile, which it must do at their own share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from benchmarks.lab.hosts import Lab
from benchmarks.lab.orders import Party

MEASURES, MEASURED = re.compile(r"^hosts .* worker", re.MULTILINE), re.compile(r"^probe ", re.MULTILINE)
"""Lines of the first host right before and right after plait measures."""
Share = Literal["own", "a processor"]


class Startup:
    """Grants a lab's hosts what a party's start-up calls for, and their own share in the end."""

    def __init__(self, lab: Lab, party: Party, log: Path) -> None:
        self._lab, self._party, self._log = lab, party, log
        self._own = [lab.granted(host) for host in lab.hosts]
        self._now: Share = "own"

    def look(self, steps: int) -> None:
        """To be called again and again; `steps` have ended."""
        begun = self._party.begun_file is not None and self._party.begun_file.exists()
        told = self._log.read_text(errors="replace") if self._log.exists() else ""
        self._grant("own" if steps or begun else share_for(told))

    def end(self) -> None:
        """Every host as it was."""
        self._grant("own")

    def _grant(self, share: Share) -> None:
        if share != self._now:
            self._now = share
            for host, own in zip(self._lab.hosts, self._own, strict=True):
                self._lab.grant(host, own if share == "own" else max(1.0, own))


def share_for(told: str) -> Share:
    """What hosts get of a processor each before anything has begun, by what the first host has printed."""
    return "own" if MEASURES.search(told) and not MEASURED.search(told) else "a processor"
