"""plait from Python: the same functions that the command line calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from plait.recipe.schema import RunConfig


def load_recipe(recipe: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe, with `section.key=value` overrides; raises PlaitError in one sentence."""
    from plait.recipe.load import load_recipe as load

    return load(Path(recipe), overrides)


def train_recipe(recipe: str | Path, overrides: Sequence[str] = ()) -> Literal["finished", "SIGINT", "SIGTERM"]:
    """Train what a recipe asks for, or go on with it; blocks to the end. Raises PlaitError, or RunFailed on the way."""
    from rich.console import Console

    from plait.run.train import train as run

    return run(Path(recipe), overrides, screen=Console(highlight=False, soft_wrap=True))


def sample(
    run: str, prompt: str = "", *, tokens: int = 200, temperature: float = 0.8, top_p: float = 0.95, seed: int = 1
) -> Iterator[str]:
    """The prompt and what the run's model goes on with, piece by piece."""
    from plait.run.sample import sample as go_on

    return go_on(run, prompt, tokens=tokens, temperature=temperature, top_p=top_p, seed=seed)


def evaluate(run: str, files: Sequence[str] = ()) -> dict[str, Any]:
    """The run's exact loss on its held-out text or on other files, as `plait eval` prints it."""
    import json

    from plait.run.evaluate import evaluate as measure

    return json.loads(measure(run, files))
