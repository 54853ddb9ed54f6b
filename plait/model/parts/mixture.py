"""The shape of a mixture of experts: how many, which layers have them, how tokens find them, what keeps them equally
busy."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from plait.errors import PlaitError

RouterScore = Literal["sigmoid", "softmax"]
BalanceRule = Literal["bias", "sequence", "global", "switch"]
GroupScore = Literal["two best", "best"]
MOST_EXPERTS = 100_000
"""Most experts of a layer; the largest published models have some thousands."""
USUAL_EXPERTS_PER_TOKEN = 2
USUAL_BIAS_RATE = 0.001
"""DeepSeek-V3's (2412.19437, section 4.2), over millions of steps."""
USUAL_BALANCE_WEIGHTS: Mapping[BalanceRule, float] = {"sequence": 1e-4, "global": 0.01, "switch": 0.01}
"""DeepSeek-V3's of the sequence-wise loss; of the others that of Switch (Fedus et al. 2021) and OLMoE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureShape:
    """Experts in place of a layer's feed-forward part, of which a router chooses a few for each token.

    Layer l has experts where l is at least `dense_layers`, (l - dense_layers + 1) is a multiple of `every`, and l is
    none of `plain_layers`; all others have a plain feed-forward part. Raises PlaitError.
    """

    experts: int
    experts_per_token: int
    expert_ffn: int
    """Inner width of one expert."""
    shared_experts: int = 0
    """Experts that every token passes, as one of `shared_experts` × `expert_ffn`."""
    every: int = 1
    dense_layers: int = 0
    """First layers without experts."""
    plain_layers: tuple[int, ...] = ()
    """Further layers without experts, in order (Qwen3-MoE's mlp_only_layers); no recipe has a key for them."""
    groups: int = 1
    """Equal groups of experts, of which `groups_chosen` are open to a token (DeepSeek's node limit)."""
    groups_chosen: int = 1
    group_score: GroupScore = "two best"
    """What groups are chosen by: the sum of their two best scores, or the best one (DeepSeek-V2); no recipe has a key
    for it."""
    router: RouterScore = "softmax"
    bias: bool = False
    """Whether the router and the experts' matrices add biases (gpt-oss); no recipe has a key for it."""
    scale: float = 1.0
    """Factor of the weights by which experts' results are added."""
    normalize: bool = True
    """Whether the chosen experts' weights add up to 1, before the factor."""
    balance: tuple[BalanceRule, ...] = ()
    """What keeps experts equally busy: "bias" is added to scores where experts are chosen, and to nothing else
    (Wang et al. 2024, 2408.15664); the others are losses, Note [balance losses] in router.py."""
    balance_rate: float = USUAL_BIAS_RATE
    """By which a bias moves in a step."""
    balance_weights: tuple[float, ...] = ()
    """One for each loss in `balance`, in its order."""
    z_weight: float = 0.0
    """Weight of the router's z-loss (Zoph et al. 2022); 0: none."""
    capacity: float | None = None
    """How much more than its even share of a sequence's choices an expert takes, the rest of which are dropped; None:
    all of them (model/mixture.py)."""

    def __post_init__(self) -> None:
        _check_counts(self)
        _check_groups(self)
        _check_balance(self)
        _check_among("router", self.router, get_args(RouterScore))
        _check_among("group_score", self.group_score, get_args(GroupScore))
        for name, value in (("router_scale", self.scale), ("expert_balance_rate", self.balance_rate)):
            if not 0 < value < 1e6:
                raise PlaitError(f"model.{name} is {value}; choose a number above 0")
        if not 0 <= self.z_weight < 1e6:
            raise PlaitError(f"model.router_z_weight is {self.z_weight}; choose a number of at least 0")
        if self.capacity is not None and not 0 < self.capacity < 1e6:
            raise PlaitError(
                f"model.expert_capacity is {self.capacity}; choose a number above 0, such as 1.25, or take it out: "
                "then no token is dropped"
            )

    @property
    def has_bias(self) -> bool:
        """Whether a bias keeps the experts equally busy."""
        return "bias" in self.balance

    @property
    def loss_weights(self) -> Mapping[BalanceRule, float]:
        """The balance losses, each with its weight."""
        return dict(zip((rule for rule in self.balance if rule != "bias"), self.balance_weights, strict=True))

    @property
    def counts_first(self) -> bool:
        """Whether a loss needs the counts of the whole step before the first backward pass."""
        return "global" in self.balance or "switch" in self.balance

    def holds(self, layer: int) -> bool:
        """Whether a layer has experts."""
        is_regular = layer >= self.dense_layers and (layer - self.dense_layers + 1) % self.every == 0
        return is_regular and layer not in self.plain_layers


LATER_MIXTURE_FIELDS: Mapping[str, object] = {
    "plain_layers": (),
    "group_score": "two best",
    "bias": False,
}
"""Fields that checkpoints of earlier versions lack, written only where they have another value than this."""
RECIPE_NAMES: Mapping[str, str] = {
    "experts": "experts",
    "experts_per_token": "experts_per_token",
    "expert_ffn": "expert_ffn",
    "shared_experts": "shared_experts",
    "expert_every": "every",
    "dense_layers": "dense_layers",
    "expert_groups": "groups",
    "expert_groups_chosen": "groups_chosen",
    "router": "router",
    "router_scale": "scale",
    "router_normalize": "normalize",
    "expert_balance": "balance",
    "expert_balance_rate": "balance_rate",
    "expert_balance_weight": "balance_weights",
    "router_z_weight": "z_weight",
    "expert_capacity": "capacity",
}
"""Keys of a recipe's [model], each with the field of MixtureShape that it sets."""


def mixture_of_keys(named: Mapping[str, Any], ffn: int) -> MixtureShape | None:
    """The mixture that the keys of a recipe name, those of them that are not "auto"; None where they name no experts.

    Left open, the router is DeepSeek-V3's (sigmoid, balanced by the bias), and an expert as wide as makes a token's
    experts together as wide as a plain feed-forward part of `ffn`. Raises PlaitError.
    """
    values = {RECIPE_NAMES[key]: value for key, value in named.items() if key in RECIPE_NAMES}
    if "experts" not in values:
        if values:
            key = next(key for key in named if key in RECIPE_NAMES)
            raise PlaitError(f"model.{key} is of a mixture of experts; name model.experts, too, or take {key} out")
        return None
    values.setdefault("experts_per_token", min(USUAL_EXPERTS_PER_TOKEN, values["experts"]))
    values.setdefault("router", "sigmoid")
    values.setdefault("groups_chosen", values.get("groups", 1))
    used = values["experts_per_token"] + values.get("shared_experts", 0)
    values.setdefault("expert_ffn", max(8, round(ffn / used / 8) * 8))
    balance = _balance_of(values.pop("balance", "bias"), values.pop("balance_weights", None))
    return MixtureShape(**values, **balance)


def mixture_from(values: Mapping[str, Any]) -> MixtureShape:
    """The mixture that JSON tells of; raises PlaitError for a field that there is not."""
    known = {field.name for field in fields(MixtureShape)}
    if unknown := sorted(set(values) - known):
        raise PlaitError(f"a mixture has no field {unknown[0]!r}; take it out, the fields are {sorted(known)}")
    lists = {name: tuple(values[name]) for name in ("balance", "balance_weights", "plain_layers") if name in values}
    return MixtureShape(**{**values, **lists})


def mixture_weights(mixture: MixtureShape, matrices: Sequence[str]) -> list[str]:
    """Names of a layer's weights in place of those of a plain feed-forward part with these matrices."""
    experts = [f"experts.{number}" for number in range(mixture.experts)] + ["shared"] * (mixture.shared_experts > 0)
    kinds = ("weight", "bias") if mixture.bias else ("weight",)
    return [
        *(f"feedforward.router.{kind}" for kind in kinds),
        *(f"feedforward.{expert}.{matrix}.{kind}" for expert in experts for matrix in matrices for kind in kinds),
    ]


def check_mixture_in(mixture: MixtureShape, layers: int, biased: Collection[str], adapter: object) -> None:
    """Refuse a mixture in a model that cannot have it: of this many layers, whose `biased` parts have biases."""
    if not any(mixture.holds(layer) for layer in range(layers)):
        raise PlaitError(
            f"model.dense_layers = {mixture.dense_layers} and model.expert_every = {mixture.every} leave none of "
            f"{layers} layers with experts; lower one of them"
        )
    if "feedforward" in biased:
        raise PlaitError('experts have no biases; choose model.bias = "none", "qkv" or "attention"')
    if mixture.bias and mixture.shared_experts:
        raise PlaitError("experts with biases go with no shared experts; take out either")
    if adapter is not None:
        raise PlaitError("adapters beside experts are not there yet; tune the whole model, or one without experts")


def _balance_of(requested: str | Sequence[str], weights: float | Sequence[float] | None) -> dict[str, Any]:
    """The fields of the balance from the recipe's two keys."""
    rules = (requested,) if isinstance(requested, str) else tuple(requested)
    if "none" in rules and len(rules) > 1:
        raise PlaitError('model.expert_balance names "none" beside others; take one of them out')
    rules = () if rules == ("none",) else rules
    losses = [rule for rule in rules if rule != "bias"]
    for rule in rules:
        _check_among("expert_balance", rule, (*get_args(BalanceRule), "none"))
    if weights is None:
        given = tuple(USUAL_BALANCE_WEIGHTS[rule] for rule in losses)  # type: ignore[index]
    else:
        given = tuple(weights) if isinstance(weights, Sequence) else (float(weights),) * len(losses)
    if weights is not None and not losses:
        raise PlaitError("model.expert_balance_weight is of losses, and model.expert_balance names none; take it out")
    return {"balance": rules, "balance_weights": given}


def _check_counts(mixture: MixtureShape) -> None:
    least = {"experts": 2, "experts_per_token": 1, "expert_ffn": 1, "shared_experts": 0, "every": 1, "dense_layers": 0}
    named = {field: key for key, field in RECIPE_NAMES.items()}
    for name, smallest in least.items():
        value = getattr(mixture, name)
        if type(value) is not int or not smallest <= value <= 10_000_000:
            raise PlaitError(f"model.{named[name]} is {value!r}; choose a whole number of at least {smallest}")
    if mixture.experts > MOST_EXPERTS:
        raise PlaitError(f"model.experts is {mixture.experts:,}; choose at most {MOST_EXPERTS:,}")
    if mixture.experts_per_token > mixture.experts:
        raise PlaitError(
            f"model.experts_per_token = {mixture.experts_per_token} is more than the {mixture.experts} experts; choose "
            f"at most {mixture.experts}"
        )


def _check_groups(mixture: MixtureShape) -> None:
    for name in ("groups", "groups_chosen"):
        if type(getattr(mixture, name)) is not int or getattr(mixture, name) < 1:
            raise PlaitError(f"model.expert_{name} is {getattr(mixture, name)!r}; choose a whole number of at least 1")
    if mixture.experts % mixture.groups:
        fitting = ", ".join(str(n) for n in range(1, mixture.experts // 2 + 1) if mixture.experts % n == 0)
        raise PlaitError(
            f"model.expert_groups = {mixture.groups} does not divide {mixture.experts} experts; choose one of {fitting}"
        )
    each = mixture.experts // mixture.groups
    if mixture.groups > 1 and each < 2 and mixture.group_score == "two best":
        raise PlaitError(
            f"model.expert_groups = {mixture.groups} leaves one expert to a group, and a group is chosen by its two "
            f"best; choose at most {mixture.experts // 2}"
        )
    if mixture.groups_chosen > mixture.groups:
        raise PlaitError(
            f"model.expert_groups_chosen = {mixture.groups_chosen} is more than the {mixture.groups} groups; choose at "
            f"most {mixture.groups}"
        )
    if mixture.experts_per_token > mixture.groups_chosen * each:
        raise PlaitError(
            f"{mixture.groups_chosen} groups of {each} experts are fewer than model.experts_per_token = "
            f"{mixture.experts_per_token}; raise model.expert_groups_chosen"
        )


def _check_balance(mixture: MixtureShape) -> None:
    for rule in mixture.balance:
        _check_among("expert_balance", rule, (*get_args(BalanceRule), "none"))
    if len(set(mixture.balance)) < len(mixture.balance):
        raise PlaitError("model.expert_balance names something twice; name each once")
    losses = [rule for rule in mixture.balance if rule != "bias"]
    if len(mixture.balance_weights) != len(losses):
        raise PlaitError(
            f"model.expert_balance_weight has {len(mixture.balance_weights)} numbers, and model.expert_balance "
            f"{len(losses)} losses; give one number, or one for each loss"
        )
    if any(not 0 <= weight < 1e6 for weight in mixture.balance_weights):
        raise PlaitError("model.expert_balance_weight should be a number of at least 0, or one for each loss")


def _check_among(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise PlaitError(f"model.{name} is {value!r}; choose " + " or ".join(f'"{choice}"' for choice in choices))
