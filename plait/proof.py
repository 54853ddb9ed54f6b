"""Compares what the ranks of a layout saved (gradients, updates) with what one plain process saved, tensor by tensor.

A `Verdict` holds the largest difference relative to the reference's norm, the rank that owns the numbers, and whether
every number has an owner. Gradients are compared in float64 and before the optimizer: Adam hides a wrong scale, and the
loss of a first step has seen no gradient. Nothing is run here: commands/verifying does that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from plait.layout import Layout
from plait.model.names import auxiliary_head_of, depth_of, expert_of, layer_of, pattern_of

Array = np.ndarray[Any, Any]

ERRORS_NAMED = 5

_KINDS = {
    "gradient": "gradient",
    "sgd": "after plain steps",
    "adamw": "after AdamW steps",
    "momentum": "after SGD steps",
    "muon": "after Muon steps",
    "sums": "sum over ranks",
    "counts": "counted exactly over all steps",
    "routing": "experts chosen freely, against those of one process",
    "buffer": "after a forward pass",
    "update": "after an update",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    """The largest errors that pass.

    An error is relative to a tensor's largest absolute value; for gradients, to at least `min_gradient_share` of the
    largest of all gradients. Below that a gradient's own size says nothing: a key bias' true gradient is zero.
    """

    gradient: float
    parameter: float
    min_gradient_share: float


FLOAT64_TOLERANCES = Tolerances(gradient=1e-10, parameter=1e-9, min_gradient_share=1e-6)
"""Tolerances for float64."""
FLOAT32_TOLERANCES = Tolerances(gradient=1e-4, parameter=1e-4, min_gradient_share=1e-2)
"""Tolerances for float32, whose 7 digits leave nothing of a gradient that is far below the others."""
BF16_TRANSFER_TOLERANCES = Tolerances(gradient=2e-2, parameter=2e-2, min_gradient_share=1e-6)
"""Tolerances for gradients that are transferred as bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The largest error of one of the layout's tensors against the reference; `error` is infinite where values are
    missing."""

    name: str
    kind: str
    error: float
    tolerance: float
    remark: str = ""
    label: str = ""
    """Its name; empty if it is one of plait's own weights."""

    @property
    def passes(self) -> bool:
        return self.error <= self.tolerance

    @property
    def excess(self) -> float:
        """The error in tolerances; infinite where there is one and none is allowed."""
        if self.tolerance:
            return self.error / self.tolerance
        return math.inf if self.error else 0.0

    def __str__(self) -> str:
        text = f"{self.label or weight_text(self.name)}, {_KINDS[self.kind]}"
        return f"{text} ({self.remark})" if self.remark else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a layout computes the same as one process."""

    layout: Layout
    findings: tuple[Finding, ...]
    """Sorted by error relative to its tolerance, the worst first."""
    exception: str = ""
    """The limits of the proof, as the end of a sentence: "but for …"; empty if there are none."""
    causes: tuple[str, ...] = ()
    """Why it differs, the likeliest first, where a person's own model was compared."""
    remarks: tuple[str, ...] = ()
    """Remarks on the user's own model, also when nothing differs."""

    @property
    def ok(self) -> bool:
        return bool(self.findings) and all(finding.passes for finding in self.findings)

    @property
    def max_grad_rel_err(self) -> float:
        """The largest relative error of a gradient, of a sum over ranks, or of what a router chose by."""
        return self.largest("gradient", "sums", "routing")

    @property
    def max_param_rel_err(self) -> float:
        """The largest relative error of a parameter after a step of either optimizer; 0 where none was taken."""
        return self.largest("sgd", "adamw", "momentum", "muon", "update")

    @property
    def worst(self) -> tuple[Finding, ...]:
        return self.findings[:ERRORS_NAMED]

    def joined(self, other: Verdict) -> Verdict:
        """Both verdicts on one layout as one."""
        findings = sorted((*self.findings, *other.findings), key=lambda one: one.excess, reverse=True)
        return replace(self, findings=tuple(findings))

    def largest(self, *kinds: str) -> float:
        """The largest error among the findings of these kinds; 0 where there are none."""
        return max((finding.error for finding in self.findings if finding.kind in kinds), default=0.0)

    def to_json(self) -> str:
        """The verdict as JSON for programs; an error that is not finite is null."""
        worst = [
            {"name": one.name, "what": str(one), "error": _finite(one.error), "bar": one.tolerance}
            for one in self.worst
        ]
        values = {
            "ok": self.ok,
            "layout": asdict(self.layout),
            "world_size": self.layout.world_size,
            "max_grad_rel_err": _finite(self.max_grad_rel_err),
            "max_param_rel_err": _finite(self.max_param_rel_err),
            "worst": worst,
        }
        said = {"causes": list(self.causes), "remarks": list(self.remarks)}
        values |= {name: sentences for name, sentences in said.items() if sentences}
        return json.dumps(values, indent=2, allow_nan=False) + "\n"

    def table(self) -> str:
        """The worst findings as aligned lines for people, each with its error and the error that is allowed."""
        rows = [("largest differences", "error", "allowed", "")]
        rows += [
            (str(one), f"{one.error:.1e}", f"{one.tolerance:.0e}", "" if one.passes else "differs")
            for one in self.worst
        ]
        width = max(len(name) for name, *_ in rows)
        lines = [f"{name:{width}}  {error:>7}  {allowed:>7}  {remark}" for name, error, allowed, remark in rows]
        return "\n".join(line.rstrip() for line in lines)

    def __str__(self) -> str:
        """The largest differences, and what they prove, as `plait verify` prints it."""
        if self.ok:
            without = f", {self.exception}" if self.exception else ""
            last = f"proven   the layout computes what one plain process computes{without}"
        elif self.causes:
            last = "differs  " + "\n         ".join(self.causes)
        else:
            last = "differs  this layout does not compute what one plain process computes: a bug, so report it"
        return "\n".join([self.table(), last, *(f"note     {remark}" for remark in self.remarks)])

    def _repr_html_(self) -> str:
        """The proof as a notebook shows it."""
        return f"<pre>{escape(str(self))}</pre>"


def compare_tensor_files(
    reference: Path, ranks: Sequence[Path], layout: Layout, *, lr: float, tolerances: Tolerances
) -> Verdict:
    """Compare the tensor files that a layout's ranks saved with the reference's file; `lr` is the least scale of
    parameter errors."""
    found = list(_findings(load_file(reference), [load_file(rank) for rank in ranks], lr, tolerances))
    return Verdict(layout=layout, findings=tuple(sorted(found, key=lambda one: one.excess, reverse=True)))


def _findings(
    wanted: Mapping[str, Array], ranks: list[dict[str, Array]], lr: float, bars: Tolerances
) -> Iterator[Finding]:
    """Yields each tensor's largest error over all ranks, and each gradient whose elements are not all owned by
    exactly one rank."""
    largest = max(np.abs(values).max() for key, values in wanted.items() if key.startswith("gradient/"))
    pieces = _pieces(ranks)
    for key, values in wanted.items():
        kind, name = key.split("/")[:2]
        bar = {"gradient": bars.gradient, "sums": bars.gradient, "routing": bars.gradient, "counts": 0.0}.get(
            kind, bars.parameter
        )
        least = {"gradient": bars.min_gradient_share * largest, "sums": 1e-30, "routing": 1.0, "counts": 1.0}.get(
            kind, lr
        )
        scale = max(np.abs(values).max(), least)
        apart = [_distance(values, *piece) for piece in pieces.get((kind, name), [])]
        error = float(np.max(apart) / scale) if apart else math.inf
        yield Finding(name=name, kind=kind, error=_number(error), tolerance=bar, remark="" if apart else "missing")
        if kind == "gradient" and (remark := _ownership(values, pieces.get((kind, name), []))):
            yield Finding(name=name, kind=kind, error=math.inf, tolerance=bar, remark=remark)


RankPiece = tuple[tuple[int, ...], str, Array]
"""A rank's slice of a tensor: its offset, "own" or "copy" (whether this rank updates it), and its values."""


def _pieces(ranks: list[dict[str, Array]]) -> dict[tuple[str, str], list[RankPiece]]:
    pieces: dict[tuple[str, str], list[RankPiece]] = {}
    for tensors in ranks:
        for key, values in tensors.items():
            kind, name, *place = key.split("/")
            offset = tuple(int(first) for first in place[0].split(",")) if place else (0,)
            pieces.setdefault((kind, name), []).append((offset, place[1] if place else "copy", values))
    return pieces


def _distance(wanted: Array, offset: tuple[int, ...], who: str, values: Array) -> float:
    if not values.size:
        return 0.0
    return float(np.abs(wanted[_slices(offset, values)].astype(np.float64) - values).max())


def _ownership(wanted: Array, pieces: list[RankPiece]) -> str:
    """An error in the ownership of a gradient's elements; empty if exactly one rank owns each."""
    owners = np.zeros(wanted.shape, dtype=np.int64)
    for offset, who, values in pieces:
        if who == "own":
            owners[_slices(offset, values)] += 1
    if owners.max() > 1:
        return f"{owners.max()} ranks own the same numbers"
    return "no rank owns some numbers" if owners.min() < 1 else ""


def _slices(offset: tuple[int, ...], values: Array) -> tuple[slice, ...]:
    return tuple(slice(first, first + length) for first, length in zip(offset, values.shape, strict=True))


def _number(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _finite(error: float) -> float | None:
    return error if math.isfinite(error) else None


# A weight's name in words, as a verdict tells of it.


_PARTS = {
    "attention": "attention",
    "attention.delta_q": "linear attention query",
    "attention.delta_k": "linear attention key",
    "attention.delta_v": "linear attention value",
    "attention.delta_gate": "linear attention gate",
    "attention.delta_write": "linear attention write strength",
    "attention.delta_decay": "linear attention decay",
    "attention.delta_norm": "linear attention norm",
    "attention.delta_o": "linear attention output",
    "inputs.gate": "own input's gate",
    "inputs.projection": "own input's projection",
    "inputs.norm": "own input's norm",
    "attention_norm": "attention norm",
    "attention.q": "attention query",
    "attention.k": "attention key",
    "attention.v": "attention value",
    "attention.query": "attention query",
    "attention.query_down": "query latent",
    "attention.query_norm": "query latent's norm",
    "attention.query_up": "attention query",
    "attention.key_value_down": "key and value latent",
    "attention.key_value_norm": "key and value latent's norm",
    "attention.key_value_up": "attention key and value",
    "attention.q_norm": "query norm",
    "attention.k_norm": "key norm",
    "attention.o": "attention output",
    "attention_post_norm": "norm after attention",
    "feedforward_norm": "feed-forward norm",
    "feedforward.gate": "feed-forward gate",
    "feedforward.up": "feed-forward input",
    "feedforward.down": "feed-forward output",
    "feedforward_post_norm": "norm after the feed-forward part",
    "attention.queries_norm": "norm of all queries",
    "attention.keys_norm": "norm of all keys",
    "feedforward.router": "router",
    "feedforward.shared.gate": "shared experts' gate",
    "feedforward.shared.up": "shared experts' input",
    "feedforward.shared.down": "shared experts' output",
    "feedforward.experts.*.gate": "expert {}'s gate",
    "feedforward.experts.*.up": "expert {}'s input",
    "feedforward.experts.*.down": "expert {}'s output",
}
_WHOLE = {
    "embed.tokens.weight": "the token embedding",
    "embed.positions.weight": "the position table",
    "embed.layer_tokens.weight": "the table of the layers' own inputs",
    "embed.layer_projection.weight": "the projection of the layers' own inputs",
    "embed.layer_norm.weight": "the norm of the layers' own inputs",
    "norm.weight": "the final norm's weight",
    "norm.bias": "the final norm's bias",
    "head.weight": "the head's weight",
    "norm": "the gradient's norm",
    "loss": "the loss and its tokens",
    "evaluation": "the held-out loss",
    "experts": "the tokens of each expert",
    "auxiliary": "the auxiliary losses and their tokens",
}
_DEPTH_PARTS = {
    "hidden_norm": "norm of the stream",
    "embedding_norm": "norm of the embedding",
    "projection": "projection",
    "norm": "last norm",
}


def weight_text(name: str) -> str:
    """A weight's name in words: "layers.3.attention.o.weight" becomes "layer 3's attention output weight"."""
    layer = layer_of(name)
    last, kind = name.rpartition(".")[0].rpartition(".")[2], name.rpartition(".")[2]
    if (after := auxiliary_head_of(name)) is not None:
        return f"the norm's {kind} of the head after {after} layers"
    if (depth := depth_of(name)) is not None:
        return f"the {_DEPTH_PARTS[last]}'s {kind} of depth {depth} of prediction ahead"
    if layer is None:
        return _WHOLE.get(name, name)
    part, _, kind = pattern_of(name).removeprefix("layers.*.").rpartition(".")
    return f"layer {layer}'s {_PARTS[part].format(expert_of(name))} {kind}" if part else f"layer {layer}'s {kind}"
