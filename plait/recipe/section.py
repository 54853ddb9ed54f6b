"""What all sections of a recipe have in common."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class RecipeSection(BaseModel):
    """Base of all sections of the recipe: frozen; unknown keys are an error."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, hide_input_in_errors=True
    )
