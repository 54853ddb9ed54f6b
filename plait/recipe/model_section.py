"""The section [model]: a trained model's folder, or the shape of a new one, with experts or without."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from plait.model.parts.objectives import OBJECTIVE_KEYS
from plait.recipe.section import RecipeSection
from plait.recipe.values import Auto, BalanceChoice, CountFromZero, Factor, Layers, LossWeight, SizeText, Width


class ModelSection(RecipeSection):
    """[model]: a model to go on from, or the shape of the decoder: a size by name, or its numbers."""

    from_: Annotated[str, Field(min_length=1)] | None = Field(default=None, alias="from")
    """A model to go on from: a folder in Hugging Face's format, a .gguf file, or "hub:OWNER/NAME"."""
    size: SizeText | Auto = "auto"
    """Parameters, embeddings included: "5M", "2.6B"; "auto" takes the size that learns most within the budget."""
    layers: Layers | Auto = "auto"
    width: Width | Auto = "auto"
    heads: Width | Auto = "auto"
    kv_heads: Width | Auto = "auto"
    """Fewer than `heads` is grouped-query attention."""
    head_width: Width | Auto = "auto"
    """Width of one head; "auto" is width / heads."""
    key_value_rank: Width | Auto = "auto"
    """Latent attention (MLA, DeepSeek-V3): width of the vector that keys and values of all heads are made from."""
    query_rank: Width | Auto = "auto"
    """Width of the vector that latent attention's queries are made from; "auto": they come from the stream itself."""
    rope_head_width: Width | Auto = "auto"
    """Numbers of a head with position, beside `head_width` without; "auto" is half of that."""
    value_head_width: Width | Auto = "auto"
    """Width of one head's values in latent attention; "auto" is `head_width`."""
    ffn: Width | Auto = "auto"
    """Inner width of the feed-forward part."""
    vocabulary: Width | Auto = "auto"
    """Rows of the embedding; also the size of a tokenizer trained on first use."""
    norm: Literal["layernorm", "rmsnorm"] | Auto = "auto"
    activation: Literal["gelu", "swiglu", "relu2"] | Auto = "auto"
    positions: Literal["learned", "rope"] | Auto = "auto"
    rope_theta: Annotated[float, Field(gt=1, allow_inf_nan=False)] | Auto = "auto"
    bias: Literal["none", "qkv", "attention", "feedforward", "all"] | Auto = "auto"
    """Which linear layers (with "all" also LayerNorms) have a bias."""
    qk_norm: bool | Auto = "auto"
    tied: bool | Auto = "auto"
    """Whether the head shares the embedding's weight."""
    experts: Width | Auto = "auto"
    """Experts in place of a layer's feed-forward part: a mixture of experts."""
    experts_per_token: Width | Auto = "auto"
    shared_experts: CountFromZero | Auto = "auto"
    """Experts that every token passes."""
    expert_ffn: Width | Auto = "auto"
    """Inner width of one expert; "auto" makes a token's experts together as wide as `ffn`."""
    expert_every: Layers | Auto = "auto"
    """Every how many layers one has experts."""
    dense_layers: CountFromZero | Auto = "auto"
    """First layers without experts."""
    expert_groups: Width | Auto = "auto"
    expert_groups_chosen: Width | Auto = "auto"
    """Groups of experts that are open to a token, of `expert_groups` equal ones."""
    router: Literal["sigmoid", "softmax"] | Auto = "auto"
    router_scale: Factor | Auto = "auto"
    """Factor of the weights by which experts' results are added."""
    router_normalize: bool | Auto = "auto"
    """Whether the weights of a token's experts add up to 1, before the factor."""
    expert_balance: BalanceChoice | tuple[BalanceChoice, ...] | Auto = "auto"
    """What keeps experts equally busy: a bias of choices ("auto"), losses, or several of them."""
    expert_balance_rate: Factor | Auto = "auto"
    """By which a bias moves in a step."""
    expert_balance_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] | tuple[float, ...] | Auto = "auto"
    """Of the balance losses: one number, or one for each."""
    router_z_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] | Auto = "auto"
    """Of the loss that keeps the router's scores small."""
    expert_capacity: Factor | Auto = "auto"
    """How much more than its even share of a sequence an expert takes, the rest of which is dropped; "auto": all."""
    auxiliary_heads: tuple[Layers, ...] | Auto = "auto"
    """Heads with losses of their own after this many layers: [4, 8]; "auto" is none."""
    auxiliary_head_weight: LossWeight | tuple[LossWeight, ...] | Auto = "auto"
    """Of each such loss, or one for each; "auto" is 0.3."""
    predict_ahead: CountFromZero | Auto = "auto"
    """How many tokens beyond the next are predicted, by DeepSeek-V3's modules; "auto" is none."""
    predict_ahead_weight: LossWeight | Auto = "auto"
    """Of the mean of their losses; "auto" is 0.3."""

    @model_validator(mode="after")
    def _check_from(self) -> Self:
        named = [key for key in type(self).model_fields if key != "from_" and getattr(self, key) != "auto"]
        if self.from_ is not None and named and named[0] in OBJECTIVE_KEYS:
            raise ValueError(
                f"{named[0]} is of a model that starts from nothing, and the one in model.from has no weights for it; "
                f"take {named[0]} out, or model.from"
            )
        if self.from_ is not None and named:
            raise ValueError(f"{named[0]} comes from the model in model.from; take {named[0]} out, or model.from")
        return self
