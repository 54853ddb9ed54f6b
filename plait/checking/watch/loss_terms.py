"""How a loss is normalized, read from its autograd graph: each mean or sum in it, and how many elements went in.

One process would divide the sum over all ranks' elements by their number. The node of a mean or sum saves the sizes of
its input, which give that number (valid tokens, examples, elements); the gradient that arrives at the node shows by how
much the rank really divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

TermKind = Literal["mean", "sum", "opaque"]

_SCALAR_ARITHMETIC = {"Add", "Sub", "Rsub", "Mul", "Div", "Neg", "View", "UnsafeView", "Reshape", "Squeeze",
                      "Unsqueeze", "ToCopy", "Clone", "Alias", "Expand", "Stack", "Cat", "Select", "Slice", "Unbind",
                      "Permute", "ReshapeAlias", "Transpose", "T", "NanToNum", "Where"}  # fmt: skip
"""Nodes that only scale or add their inputs, by name without "Backward0", as in "Mul" and "Add"."""
_POINTWISE_LOSSES = ("MseLoss", "SmoothL1Loss", "HuberLoss", "SoftMarginLoss", "BinaryCrossEntropy",
                     "BinaryCrossEntropyWithLogits")  # fmt: skip
_MEAN = 1
"""ATen's number for reduction="mean"; 0 is "none" and 2 is "sum"."""
_NODES_AT_MOST = 3000
_Scales = tuple[tuple[float, ...], tuple[float, ...]]
"""The numbers by which a loss divides, and by which it multiplies, one of its terms."""


@dataclass(slots=True, kw_only=True)
class LossTerm:
    """One mean or sum that a loss is made of."""

    kind: TermKind
    units: dict[str, float]
    """The number of elements, by way of counting: "valid" (not masked) or "elements", as a divisor may count them."""
    is_linear: bool
    """Whether the loss only scales and adds it; the logarithm or root of a mean, for example, is not a mean."""
    node: Any = field(repr=False)
    divisors: tuple[float, ...] = ()
    """Each number by which the loss divides it, separately: `loss / 4 / 2` gives 4 and 2, which a coefficient does not
    show."""
    multipliers: tuple[float, ...] = ()
    """Each number by which the loss multiplies it."""
    coefficient: float | None = None
    """The derivative of the loss with respect to it; known after the backward pass."""

    def described(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "units": self.units,
            "is_linear": self.is_linear,
            "coefficient": self.coefficient,
            "divisors": self.divisors,
            "multipliers": self.multipliers,
        }


def find_terms(root: Tensor) -> list[LossTerm]:
    """The outermost means and sums of a loss; a loss without any is one opaque term."""
    if root.grad_fn is None:
        return []
    terms = list(_terms_below(root.grad_fn, root.output_nr, linear=True, seen=set()))
    if root.numel() > 1 and not terms:
        terms = [LossTerm(kind="sum", units={"elements": float(root.numel())}, is_linear=True, node=root.grad_fn)]
    return terms or [LossTerm(kind="opaque", units={}, is_linear=True, node=root.grad_fn)]


def record_coefficients(terms: Sequence[LossTerm]) -> Callable[[], None]:
    """Let the next backward pass fill in the terms' coefficients; calling the result removes the hooks."""
    handles = [term.node.register_prehook(_coefficient_hook(term)) for term in terms if term.node is not None]

    def remove() -> None:
        for handle in handles:
            handle.remove()
        for term in terms:
            term.node = None

    return remove


def _coefficient_hook(term: LossTerm) -> Callable[[Any], None]:
    def hook(gradients: Any) -> None:
        found = [one for one in gradients if isinstance(one, Tensor) and one.numel() > 0]
        if found:
            first = found[0].detach().reshape(-1)
            if first.numel() == 1 or bool((first == first[0]).all()):
                term.coefficient = float(first[0])

    return hook


def compares_samples(root: Tensor, outputs: Sequence[Any], rows: int) -> bool:
    """Whether the loss multiplies a batch's outputs with each other, as contrastive losses do: an n x n product of two
    tensors with gradients, computed from the models' outputs."""
    stops = set(outputs)
    if not stops or rows < 2:
        return False
    waiting, seen = [root.grad_fn], set()
    while waiting and len(seen) < _NODES_AT_MOST:
        node = waiting.pop()
        if node is None or node in seen or node in stops:
            continue
        seen.add(node)
        inputs = [after for after, _ in node.next_functions if after is not None]
        if node.name().startswith(("MmBackward", "BmmBackward")) and len(inputs) == 2:
            left, right = _sizes(node, "self"), _sizes(node, "mat2")
            if left and right and left[-2] == right[-1] == rows:
                return True
        waiting.extend(inputs)
    return False


def gathers_in_graph(root: Tensor) -> bool:
    """Whether a message between ranks is part of the loss's graph (torch.distributed.nn), above any module's layers."""
    waiting, seen = [root.grad_fn], set()
    while waiting and len(seen) < _NODES_AT_MOST:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().startswith(
            ("_AllGather", "_AllReduce", "_Reduce_Scatter", "_AlltoAll", "_Broadcast", "_Gather")
        ):
            return True
        waiting.extend(after for after, _ in node.next_functions if after is not None)
    return False


def joins_constants(root: Tensor, outputs: Sequence[Any]) -> bool:
    """Whether the loss combines a model's outputs with tensors that have no gradient, such as other ranks' outputs that
    were gathered without one."""
    stops = set(outputs)
    waiting, seen = [root.grad_fn], set()
    while waiting and len(seen) < _NODES_AT_MOST:
        node = waiting.pop()
        if node is None or node in seen or node in stops:
            continue
        seen.add(node)
        edges = [after for after, _ in node.next_functions]
        if node.name().startswith(("CatBackward", "StackBackward")) and None in edges and any(edges):
            return True
        waiting.extend(after for after in edges if after is not None)
    return False


def _terms_below(node: Any, output: int, *, linear: bool, seen: set[Any], by: _Scales = ((), ())) -> Iterator[LossTerm]:
    if node is None or (node, output) in seen or len(seen) > _NODES_AT_MOST:
        return
    seen.add((node, output))
    name = node.name()
    if (reduction := _reduction(node, name)) is not None:
        kind, units = reduction
        yield LossTerm(kind=kind, units=units, is_linear=linear, node=node, divisors=by[0], multipliers=by[1])
        return
    if name.startswith("_DDPSink"):  # all outputs of a DDP module pass through it, in their order
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        if output < len(edges):
            yield from _terms_below(*edges[output], linear=linear, seen=seen, by=by)
        return
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    scales = _operation(name) in _SCALAR_ARITHMETIC
    if name.startswith(("Mul", "Div")) and len(edges) > 1:  # a product of two things that both have gradients
        scales = False
    if not scales and not edges:
        return
    by = ((*by[0], *_number(node, name, "Div")), (*by[1], *_number(node, name, "Mul")))
    below = [term for edge in edges for term in _terms_below(*edge, linear=linear and scales, seen=seen, by=by)]
    if not scales and not below:
        yield LossTerm(kind="opaque", units={}, is_linear=linear, node=node, divisors=by[0], multipliers=by[1])
        return
    yield from below


def _number(node: Any, name: str, operation: str) -> tuple[float, ...]:
    """The numbers by which a node divides or multiplies; empty for other nodes."""
    other = getattr(node, "_saved_other", None) if _operation(name) == operation else None
    return (float(other),) if isinstance(other, Tensor) and other.numel() == 1 else ()


def _operation(name: str) -> str:
    """ "Div" of "DivBackward0"."""
    return name.partition("Backward")[0]


def _reduction(node: Any, name: str) -> tuple[TermKind, dict[str, float]] | None:
    """The kind and counts of a node that reduces elements to one number; None for all others."""
    if name.startswith("MeanBackward"):
        numel = _numel(_sizes(node, "self"))
        whole = name == "MeanBackward0" or _reduces_all(node)
        return ("mean", {"elements": numel}) if whole and numel else None
    if name.startswith("SumBackward"):
        sizes = _sizes(node, "self")
        if sizes is None or not (name == "SumBackward0" or _reduces_all(node)):
            return None
        units = {"elements": _numel(sizes)}
        valid = _valid_below(node)
        return "sum", {"valid": valid, **units} if valid is not None else units
    if name.startswith(("NllLossBackward", "NllLoss2DBackward", "NllLoss2dBackward")):
        if node._saved_reduction == 0:
            return None
        targets = node._saved_target
        kept = float((targets != node._saved_ignore_index).sum())
        weight = node._saved_total_weight
        valid = float(weight) if weight is not None and weight.numel() else kept
        kind: TermKind = "mean" if node._saved_reduction == _MEAN else "sum"
        # A sum leaves the total weight at zero in some versions.
        return kind, {"valid": valid if kind == "mean" else kept, "elements": float(targets.numel())}
    if name.startswith(_POINTWISE_LOSSES) and getattr(node, "_saved_reduction", 0) != 0:
        numel = float(node._saved_self.numel())
        return ("mean" if node._saved_reduction == _MEAN else "sum"), {"elements": numel}
    return None


def _reduces_all(node: Any) -> bool:
    sizes = _sizes(node, "self")
    if sizes is None:
        return False
    dims = getattr(node, "_saved_dim", None)
    if dims is None or len(dims) == 0:
        return True
    kept = set(range(len(sizes))) - {d % 2**64 if d >= 0 else d + len(sizes) for d in map(_signed, dims)}
    return all(sizes[d] == 1 for d in kept)


def _signed(dim: int) -> int:
    """ATen saves dims as unsigned 64-bit numbers in some nodes."""
    return dim - 2**64 if dim >= 2**63 else dim


def _valid_below(node: Any) -> float | None:
    """The number of elements in a sum after a mask, an index or ignored targets; None if the graph does not say."""
    for _ in range(12):
        edges = [after for after, _ in node.next_functions if after is not None]
        if len(edges) != 1:
            return None
        node, name = edges[0], edges[0].name()
        if name.startswith("NllLoss"):
            return float((node._saved_target != node._saved_ignore_index).sum())
        if name.startswith("MulBackward"):
            saved = [getattr(node, one, None) for one in ("_saved_other", "_saved_self")]
            masks = [one for one in saved if isinstance(one, Tensor) and one.numel() > 1 and not one.requires_grad]
            if masks:
                return float(torch.count_nonzero(masks[0]))
        elif _operation(name) not in _SCALAR_ARITHMETIC | {"Sum", "MaskedFill"}:
            return None
    return None


def _sizes(node: Any, what: str) -> tuple[int, ...] | None:
    for attribute in (f"_saved_{what}_sym_sizes", f"_saved_{what}_sizes"):
        found = getattr(node, attribute, None)
        if found is not None:
            return tuple(int(one) for one in found)
    saved = getattr(node, f"_saved_{what}", None)
    if isinstance(saved, Tensor):
        return tuple(saved.shape)
    numel = getattr(node, f"_saved_{what}_sym_numel", getattr(node, f"_saved_{what}_numel", None))
    return (int(numel),) if numel is not None else None


def _numel(sizes: Sequence[int] | None) -> float:
    result = 1.0
    for one in sizes or (0,):
        result *= one
    return result
