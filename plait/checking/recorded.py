"""Reads the records of all ranks: each optimizer step with its gradients, ready to be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One backward pass of one rank, and how its loss was normalized."""

    rank: int
    number: int
    """Its position among the rank's events."""
    place: int
    """Its index among the rank's passes of the same loss within the step."""
    site: str
    source: str = ""
    """Identifies the loss: the lines that led to backward, which are the same for all iterations of a loop."""
    loss: float
    kind: str
    """How the main part of the loss reduces: "mean", "sum" or "opaque"."""
    coefficient: float
    """The derivative of the loss with respect to its main mean or sum."""
    units: Mapping[str, float]
    """The number of elements of the main mean or sum, by way of counting."""
    is_linear: bool
    divisors: Sequence[float] = ()
    """Each number that the loss divides its main part by."""
    multipliers: Sequence[float] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One optimizer step of one rank."""

    event: Event
    tensors: Mapping[str, Tensor]

    def tensor(self, kind: str, parameter: int) -> Tensor | None:
        found = self.tensors.get(f"{kind}/{parameter}")
        return found.double() if found is not None else None

    def local(self, micro: MicroBatch, parameter: int) -> Tensor | None:
        return self.tensor(f"local/{micro.number}", parameter)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedStep:
    """One optimizer step as all ranks took it."""

    optimizer: int
    step: int
    ranks: Sequence[RankStep]
    micros: Sequence[MicroBatch]
    """The micro-batches that reached a parameter of this optimizer, rank by rank."""

    @property
    def parameters(self) -> Sequence[Event]:
        return self.ranks[0].event["parameters"]

    @property
    def site(self) -> str:
        return str(self.ranks[0].event["site"])

    def name(self, parameter: int) -> str:
        return str(self.parameters[parameter]["name"])


def checked_steps(folder: Path, events: Sequence[Sequence[Event]]) -> list[CheckedStep]:
    """The steps that every rank recorded, in order."""
    by_rank = [{(one["optimizer"], one["step"]): one for one in rank if one["kind"] == "step"} for rank in events]
    common = [key for key in by_rank[0] if all(key in rank for rank in by_rank)] if by_rank else []
    steps = []
    for key in sorted(common, key=lambda one: by_rank[0][one]["number"]):
        ranks = [
            RankStep(event=rank[key], tensors=load_file(str(folder / f"rank-{index}" / rank[key]["file"])))
            for index, rank in enumerate(by_rank)
        ]
        micros = [micro for index, rank in enumerate(ranks) for micro in _micro_batches(rank.event, index)]
        steps.append(CheckedStep(optimizer=key[0], step=key[1], ranks=ranks, micros=micros))
    return steps


def _micro_batches(step: Event, rank: int) -> list[MicroBatch]:
    found: list[MicroBatch] = []
    places: dict[str, int] = {}
    for about in sorted(step["backwards"].values(), key=lambda one: one["backward"]):
        site, loss = about["site"], about["callers"]
        place = places[loss] = places.get(loss, -1) + 1
        term = _main_term(about["terms"])
        units = dict(term["units"])
        if about["rows"]:
            units["rows"] = float(about["rows"])
        found.append(
            MicroBatch(
                rank=rank,
                number=about["backward"],
                place=place,
                site=site,
                source=loss,
                loss=float(about["loss"]),
                kind=term["kind"],
                coefficient=float(term["coefficient"] or 0.0),
                units=units,
                is_linear=all(one["is_linear"] for one in about["terms"]),
                divisors=tuple(term["divisors"]),
                multipliers=tuple(term["multipliers"]),
            )
        )
    return found


def _main_term(terms: Sequence[Event]) -> Event:
    """The term of a loss with the largest factor: cross-entropy rather than a balance loss weighted by 0.01."""
    if not terms:
        return {"kind": "opaque", "units": {}, "coefficient": 1.0, "is_linear": True, "divisors": (), "multipliers": ()}

    def weight(term: Event) -> tuple[bool, float]:
        counts = term["units"].get("valid") or term["units"].get("elements") or 1.0
        return counts > 1, abs(term["coefficient"] or 0.0) * (counts if term["kind"] == "sum" else 1.0)

    return max(terms, key=weight)
