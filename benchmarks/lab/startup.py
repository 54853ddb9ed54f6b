"""While a party only loads programs its hosts have a processor each: how long a small share of one takes for that does
not matter where steps are timed. plait measures the hosts meanwhile, which it must do at their own share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from benchmarks.lab.hosts import Lab
from benchmarks.lab.orders import Party

JOINED, MEASURED = re.compile(r"^joined ", re.MULTILINE), re.compile(r"^probe +\d.* between the hosts", re.MULTILINE)
"""Lines of the first host: one for each host that has joined, whereupon plait measures all of them; and that it has."""
Share = Literal["own", "a processor"]


class Startup:
    """Grants a lab's hosts what a party's start-up calls for, and their own share at the end."""

    def __init__(self, lab: Lab, party: Party, log: Path) -> None:
        self._lab, self._party, self._log = lab, party, log
        self._own = [lab.granted(host) for host in lab.hosts]
        self._now: Share = "own"

    def look(self) -> None:
        """To be called again and again until the first step has ended."""
        party = self._party
        silent = party.begun_file is not None and not party.leads  # measures the hosts with no word of it
        begun = (party.begun_file or party.steps_file).exists()
        told = self._log.read_text(errors="replace") if self._log.exists() else ""
        others = len(party.commands) - 1 if party.leads else None
        self._grant("own" if silent or begun else share_for(told, others=others))

    def end(self) -> None:
        """Every host as it was."""
        self._grant("own")

    def _grant(self, share: Share) -> None:
        if share != self._now:
            self._now = share
            for host, own in zip(self._lab.hosts, self._own, strict=True):
                self._lab.grant(host, own if share == "own" else max(1.0, own))


def share_for(told: str, *, others: int | None) -> Share:
    """What each host gets before anything has begun, by what the first host has printed; `others` are the hosts that
    join it before plait measures them, None where nobody measures."""
    measures = others is not None and len(JOINED.findall(told)) >= others and not MEASURED.search(told)
    return "own" if measures else "a processor"
