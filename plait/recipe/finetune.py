"""The section [finetune]: which weights of a trained model learn."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from plait.recipe.section import RecipeSection
from plait.recipe.values import Auto, Width

FinetuneMethod = Literal["full", "lora", "qlora"]
ADAPTER_METHODS: tuple[FinetuneMethod, ...] = ("lora", "qlora")
"""The methods that train adapters alone."""
FinetuneObjective = Literal["sft", "dpo"]
_LORA_KEYS = ("rank", "alpha", "targets", "variant")


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

    objective: FinetuneObjective = "sft"
    """"sft": from examples; "dpo": from pairs of an answer that is preferred and one that is not (Rafailov 2023)."""
    beta: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    """DPO's: how strongly the model is held to what it was; 0.1 is the paper's, 0.01 lets it go further."""

    @model_validator(mode="after")
    def _check_objective(self) -> Self:
        if self.objective == "dpo" and self.method == "auto":
            raise ValueError('objective = "dpo" tunes a model; write method = "lora" or method = "full" beside it')
        if self.objective != "dpo" and self.beta != type(self).model_fields["beta"].default:
            raise ValueError('beta is DPO\'s; write objective = "dpo", or take beta out')
        return self

    @model_validator(mode="after")
    def _check_method(self) -> Self:
        named = [key for key in _LORA_KEYS if getattr(self, key) != type(self).model_fields[key].default]
        if named and self.method not in ADAPTER_METHODS:
            raise ValueError(f'{named[0]} is LoRA\'s; write method = "lora", or take {named[0]} out')
        if self.quantization != type(self).model_fields["quantization"].default and self.method != "qlora":
            raise ValueError('quantization is QLoRA\'s; write method = "qlora", or take quantization out')
        return self
