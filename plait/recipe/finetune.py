"""The section [finetune]: which weights of a trained model learn."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from plait.recipe.section import RecipeSection
from plait.recipe.values import Auto, Width

FinetuneMethod = Literal["full", "lora", "qlora"]
ADAPTER_METHODS: tuple[FinetuneMethod, ...] = ("lora", "qlora")
"""The methods that train adapters alone."""
FinetuneObjective = Literal["sft", "dpo", "orpo", "simpo"]
_LORA_KEYS = ("rank", "alpha", "targets", "variant", "modules_to_save", "dropout")
_OBJECTIVES_OF_KEYS: dict[str, tuple[FinetuneObjective, ...]] = {
    "label_smoothing": ("dpo", "simpo"),
    "reference": ("dpo",),
    "margin": ("simpo",),
}


class FinetuneSection(RecipeSection):
    """[finetune]: tune the model in `model.from`: all of its weights, or small adapters beside them."""

    method: FinetuneMethod | Auto = "auto"
    """Which weights learn: all ("full", "auto"), or adapters ("lora"), beside matrices of 4 or 8 bits ("qlora")."""
    quantization: Literal["nf4", "int8"] = "nf4"
    """QLoRA's: what the frozen matrices of layers are kept in, blocks of 4.1 or of 8.5 bits a number."""
    rank: Width | Auto = "auto"
    """LoRA's r: the inner width of an adapter."""
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Auto = "auto"
    """LoRA's alpha: an adapter's output is multiplied by alpha / rank, or alpha / √rank in "rslora"."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] | Auto = "auto"
    """The linear layers that get adapters: ["q_proj", "v_proj"], ["attention"]; "auto": all."""
    variant: Literal["lora", "rslora"] = "lora"
    """"rslora" divides by the root of the rank (Kalajdzievski 2023)."""
    modules_to_save: tuple[str, ...] = ()
    """Vocabulary tables that are trained whole beside the adapters: ["embed_tokens", "lm_head"]; for new tokens."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """LoRA's lora_dropout: the probability with which each number that an adapter reads is zero in training."""

    objective: FinetuneObjective = "sft"
    """"sft": from examples; "dpo", "orpo" or "simpo": from pairs of a preferred and a rejected answer."""
    beta: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Auto = "auto"
    """DPO's hold on what the model was, SimPO's scale of rewards, ORPO's weight of the odds; "auto": their papers'."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """DPO's and SimPO's: the share of pairs that are taken to be the wrong way round (Mitchell 2023)."""
    reference: Literal["base", "none"] = "base"
    """DPO's: compare with what the first weights give, or with nothing (reference-free)."""
    margin: Annotated[float, Field(ge=0, allow_inf_nan=False)] | Auto = "auto"
    """SimPO's gamma: how much larger the reward of the preferred answer is to be; "auto": half of beta."""

    @property
    def learns_pairs(self) -> bool:
        return self.objective != "sft"

    @model_validator(mode="after")
    def _check_objective(self) -> Self:
        if self.learns_pairs and self.method == "auto":
            raise ValueError(f'objective = "{self.objective}" tunes a model; add method = "lora", "qlora" or "full"')
        # 0.2.0 wrote beta = 0.1 into the saved recipe of every run.
        if not self.learns_pairs and self.beta not in ("auto", 0.1):
            raise ValueError('beta is for pairs of answers; write objective = "dpo", or take beta out')
        for key, objectives in _OBJECTIVES_OF_KEYS.items():
            if self.objective not in objectives and getattr(self, key) != type(self).model_fields[key].default:
                named = " or ".join(f'"{one}"' for one in objectives)
                raise ValueError(f"{key} goes with objective = {named}; write that, or take {key} out")
        return self

    @model_validator(mode="after")
    def _check_method(self) -> Self:
        named = [key for key in _LORA_KEYS if getattr(self, key) != type(self).model_fields[key].default]
        if named and self.method not in ADAPTER_METHODS:
            raise ValueError(f'{named[0]} is LoRA\'s; write method = "lora", or take {named[0]} out')
        if self.quantization != type(self).model_fields["quantization"].default and self.method != "qlora":
            raise ValueError('quantization is QLoRA\'s; write method = "qlora", or take quantization out')
        return self
