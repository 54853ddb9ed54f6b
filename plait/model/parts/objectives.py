"""Training objectives in addition to the next token: heads on layers in the middle, and tokens further ahead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from plait.errors import PlaitError

USUAL_HEAD_WEIGHT = 0.3
"""Weight of each head's loss, as in GoogLeNet (Szegedy et al. 2014, 1409.4842), the first network with such heads."""
USUAL_AHEAD_WEIGHT = 0.3
"""DeepSeek-V3's (2412.19437, section 4.2) for its first 10 T tokens; 0.1 after them."""
MOST_AHEAD = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectivesShape:
    """Losses beside that of the next token from the last layer; each is a mean over its own tokens, times its weight.

    A head in the middle predicts the next token from the stream after this many layers: a norm of its own, then the
    model's own output matrix (LayerSkip: Elhoushi et al. 2024, 2404.16710). Prediction ahead is DeepSeek-V3's: depth k
    takes the stream of depth k - 1 (of depth 0: of the last layer) and the embedding of the token k further, each
    normed, joined by a projection, through one more layer, a norm and the model's own output matrix, and predicts the
    token k + 1 further. Raises PlaitError.
    """

    heads: tuple[int, ...] = ()
    """After how many layers heads stand, ascending."""
    head_weights: tuple[float, ...] = ()
    """One for each head."""
    ahead: int = 0
    """Depths of prediction beyond the next token."""
    ahead_weight: float = USUAL_AHEAD_WEIGHT
    """Weight of the mean of all depths' losses."""

    def __post_init__(self) -> None:
        if any(type(after) is not int for after in self.heads):
            raise PlaitError(f"model.auxiliary_heads is {list(self.heads)}; write numbers of layers, such as [4, 8]")
        if tuple(sorted(set(self.heads))) != self.heads:
            raise PlaitError(f"model.auxiliary_heads = {list(self.heads)} names a layer twice; name each once")
        if len(self.head_weights) != len(self.heads):
            raise PlaitError(
                f"model.auxiliary_head_weight has {len(self.head_weights)} numbers, and there are {len(self.heads)} "
                "heads; give one number, or one for each head"
            )
        named = [("auxiliary_head_weight", weight) for weight in self.head_weights]
        for key, weight in [*named, ("predict_ahead_weight", self.ahead_weight)]:
            if not 0 <= weight < 1e6:
                raise PlaitError(f"model.{key} is {weight}; choose a number of at least 0")
        if type(self.ahead) is not int or not 0 <= self.ahead <= MOST_AHEAD:
            raise PlaitError(f"model.predict_ahead is {self.ahead!r}; choose a whole number from 0 to {MOST_AHEAD}")

    @property
    def weights(self) -> Mapping[str, float]:
        """Every objective's name with the weight of its mean loss: first the heads, then the depths."""
        heads = {f"layer_{after}": weight for after, weight in zip(self.heads, self.head_weights, strict=True)}
        return heads | {f"ahead_{depth}": self.ahead_weight / self.ahead for depth in self.depths}

    @property
    def depths(self) -> range:
        """1 to `ahead`."""
        return range(1, self.ahead + 1)


NO_OBJECTIVES = ObjectivesShape()
OBJECTIVE_KEYS: Mapping[str, str] = {
    "auxiliary_heads": "heads",
    "auxiliary_head_weight": "head_weights",
    "predict_ahead": "ahead",
    "predict_ahead_weight": "ahead_weight",
}
"""Keys of a recipe's [model], each with the field of ObjectivesShape that it sets."""


def objectives_of_keys(named: Mapping[str, Any]) -> ObjectivesShape:
    """The objectives that the keys of a recipe name; a value of "auto" names nothing.

    Raises PlaitError.
    """
    named = {key: value for key, value in named.items() if value != "auto"}
    values = {field: named[key] for key, field in OBJECTIVE_KEYS.items() if key in named}
    heads, ahead = tuple(values.get("heads", ())), values.get("ahead", 0)
    weighed = {"auxiliary_head_weight": ("auxiliary_heads", heads), "predict_ahead_weight": ("predict_ahead", ahead)}
    for key, (of, present) in weighed.items():
        if key in named and not present:
            raise PlaitError(f"model.{key} is of losses, and model.{of} names none; take it out")
    weights = values.get("head_weights", USUAL_HEAD_WEIGHT)
    each = tuple(weights) if isinstance(weights, Sequence) else (float(weights),) * len(heads)
    if len(each) == len(heads):  # else refused below, with both numbers
        pairs = sorted(zip(heads, each, strict=True), key=lambda pair: pair[0])
        heads, each = tuple(after for after, _ in pairs), tuple(weight for _, weight in pairs)
    ahead_weight = values.get("ahead_weight", USUAL_AHEAD_WEIGHT)
    return ObjectivesShape(heads=heads, head_weights=each, ahead=ahead, ahead_weight=ahead_weight)


def objectives_from(values: Mapping[str, Any]) -> ObjectivesShape:
    """The objectives that JSON tells of; raises PlaitError for a field that there is not."""
    known = {field.name for field in fields(ObjectivesShape)}
    if unknown := sorted(set(values) - known):
        raise PlaitError(f"objectives have no field {unknown[0]!r}; take it out, the fields are {sorted(known)}")
    lists = {name: tuple(values[name]) for name in ("heads", "head_weights") if name in values}
    return ObjectivesShape(**{**values, **lists})


def objective_weights(objectives: ObjectivesShape, norm_weights: Callable[[str], list[str]]) -> list[str]:
    """Names of the weights that objectives add to a model, its additional layers' own aside; `norm_weights` names those
    of a norm."""
    names = [name for after in objectives.heads for name in norm_weights(f"auxiliary.{after}.norm")]
    for depth in objectives.depths:
        own = f"ahead.{depth}"
        names += [*norm_weights(f"{own}.hidden_norm"), *norm_weights(f"{own}.embedding_norm")]
        names += [f"{own}.projection.weight", *norm_weights(f"{own}.norm")]
    return names


def check_objectives_in(objectives: ObjectivesShape, layers: int, sequence: int, adapter: object) -> None:
    """Refuse objectives in a model that cannot have them."""
    beyond = [after for after in objectives.heads if not 1 <= after < layers]
    if beyond and layers > 1:
        raise PlaitError(
            f"model.auxiliary_heads names {beyond[0]}, and a model of {layers} layers has its own head after the last; "
            f"choose numbers from 1 to {layers - 1}"
        )
    if beyond:
        raise PlaitError("a model of one layer has no layer in the middle; take model.auxiliary_heads out")
    if objectives.ahead >= sequence:
        raise PlaitError(
            f"model.predict_ahead = {objectives.ahead} looks beyond a sequence of {sequence} tokens; choose at most "
            f"{sequence - 1}, or a longer train.sequence"
        )
    if adapter is not None and objectives != NO_OBJECTIVES:
        raise PlaitError("adapters with auxiliary heads or prediction ahead are not supported yet; remove one of them")
