"""Kinds of layouts and layouts in words: what is split, apart from how many ways."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from plait.layout import ABBREVIATIONS, AXES, SHARDED_TEXTS, shard_abbreviation
from plait.planner.problem.candidates import SHARDED_STATES, Candidates, Counts, Reals
from plait.units import counted

CandidateRow = Mapping[str, int | str]
"""One candidate as `Candidates.row` gives it."""

AXIS_ABBREVIATIONS = {**ABBREVIATIONS, "expert": "EP"}
_DATA = {
    "alone": "one copy of the model",
    "nothing": "plain copies of the model",
    "optimizer": "copies that split the optimizer state (ZeRO-1)",
    "gradients": "copies that split gradients and optimizer state (ZeRO-2)",
    "parameters": "parameters split and gathered layer by layer (FSDP)",
    "master-weights": "copies that split master weights and optimizer state (ZeRO-1)",
}
_CUTS = {
    "tensor": "matrices cut across devices (tensor)",
    "context": "sequences cut across devices (context)",
    "pipeline": "layers in stages, one device after the other (pipeline)",
    "expert": "experts divided among devices (expert)",
}


def kinds_of(candidates: Candidates) -> Counts:
    """A number for each candidate's kind: which axes cut the model, and what its copies split."""
    c = candidates
    data = np.where(c.data_parallel_degree > 1, 1 + c.shard_what, 0)
    cuts = (c.tensor > 1) + 2 * (c.context > 1) + 4 * (c.pipeline > 1) + 8 * (c.expert > 1)
    return data + 8 * cuts


def kind_text(row: CandidateRow) -> str:
    """The kind of a layout: "plain copies of the model + matrices cut across devices (tensor)"."""
    data = _DATA[str(row["shard_what"])] if int(row["replicate"]) * int(row["shard"]) > 1 else _DATA["alone"]
    cuts = [words for axis, words in _CUTS.items() if int(row[axis]) > 1]
    return " + ".join(cuts if cuts and data == _DATA["alone"] else [data, *cuts])


def layout_text(row: CandidateRow) -> str:
    """Axes and degrees, and what is not as usual: "pipeline (PP) 4 × tensor (TP) 8, recompute full"."""
    what = str(row["shard_what"])
    names = {**AXIS_ABBREVIATIONS, "shard": shard_abbreviation(what)}
    degrees = [f"{axis} ({names[axis]}) {row[axis]}" for axis in (*AXES, "expert") if int(row[axis]) > 1]
    parts = [" × ".join(degrees) or "one device"]
    if int(row["shard"]) > 1:
        parts.append(f"splitting {SHARDED_TEXTS.get(what, what)}")
    if int(row["pipeline"]) > 1:
        parts.append(
            f"schedule {row['schedule']}" + (f" of {row['virtual']} chunks" if int(row["virtual"]) > 1 else "")
        )
    if row["recompute"] != "none":
        parts.append(f"recompute {row['recompute']}")
    parts.append(f"{counted(int(row['micro_sequences']), 'sequence')} at a time")
    return ", ".join(parts)


def layout_sentences(row: CandidateRow, layers: int) -> list[str]:
    """The effect of each axis of a layout, one sentence each, for a newcomer."""
    lines = []
    replicate, shard, pipeline = int(row["replicate"]), int(row["shard"]), int(row["pipeline"])
    if replicate > 1:
        lines.append(
            f"replicate (DP, data parallel) {replicate}: {replicate} copies of the model learn from different "
            "sequences and add up their gradients at the end of each step"
        )
    if shard > 1:
        cuts = pipeline * int(row["tensor"]) * int(row["expert"])
        lines.append(_shard_sentence(shard, str(row["shard_what"]), cuts))
    if pipeline > 1:
        lines.append(
            f"pipeline (PP) {pipeline}: the {counted(layers, 'layer')} are divided among {pipeline} groups of devices, "
            f"and micro-batches pass from one group to the next (schedule {row['schedule']})"
        )
    if int(row["context"]) > 1:
        lines.append(
            f"context (CP) {row['context']}: each sequence is cut in {row['context']} parts that exchange keys"
        )
    if int(row["tensor"]) > 1:
        lines.append(f"tensor (TP) {row['tensor']}: {row['tensor']} devices compute each matrix product together")
    if int(row["expert"]) > 1:
        lines.append(f"expert (EP) {row['expert']}: each of {row['expert']} devices holds other experts of every layer")
    if row["recompute"] != "none":
        what = "every layer's forward pass is" if row["recompute"] == "full" else "a part of every layer is"
        lines.append(f"recompute {row['recompute']}: {what} computed again in the backward pass, to save memory")
    return lines or ["one device does everything"]


def _shard_sentence(shard: int, what: str, cuts: int) -> str:
    """The effect of `shard` if the other axes cut the model into this many parts, of which a device has one."""
    model = "the model" if cuts == 1 else f"their part (1/{cuts}) of the model"
    if what == SHARDED_STATES[3]:
        return (
            f"shard (FSDP, fully sharded data parallel) {shard}: each of {shard} devices keeps 1/{shard} of the "
            f"parameters, gradients and optimizer state of {model}, and gathers a layer when it computes it"
        )
    if what in ("gradients", "master-weights"):
        states = "parameters, gradients and" if what == "gradients" else "master weights and"
        return (
            f"shard ({shard_abbreviation(what)}) {shard}: each of {shard} devices keeps 1/{shard} of the {states} "
            f"optimizer state of {model}, and gathers its weights once a step"
        )
    kept = "the whole model" if cuts == 1 else f"the same part of the model (1/{cuts} of it)"
    return (
        f"shard ({shard_abbreviation(what)}) {shard}: each of {shard} devices keeps {kept}, but updates only 1/{shard} "
        f"of it, and so keeps only 1/{shard} of its optimizer state"
    )


def leanest_of_kinds(candidates: Candidates, needed: Reals) -> dict[int, float]:
    """Bytes of the leanest candidate of every kind."""
    names, place = np.unique(kinds_of(candidates), return_inverse=True)
    least = np.full(len(names), np.inf)
    np.minimum.at(least, place, needed)
    return {int(name): float(value) for name, value in zip(names, least, strict=True)}


def kinds_that_never_fit(candidates: Candidates, fits: NDArray[np.bool_]) -> frozenset[int]:
    """The kinds of which no candidate is one of these."""
    own = kinds_of(candidates)
    return frozenset(own.tolist()) - frozenset(own[fits].tolist())
