"""plait from Python: the same functions that the command line calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from plait.errors import StopSignal

if TYPE_CHECKING:
    from plait.recipe.schema import RunConfig

Ending = Literal["finished"] | StopSignal


def load_recipe(recipe: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe, with `section.key=value` overrides; raises PlaitError in one sentence."""
    from plait.recipe.load import load_recipe as load

    return load(Path(recipe), overrides)


def train_recipe(
    recipe: str | Path,
    overrides: Sequence[str] = (),
    *,
    hosts: int = 1,
    address: str | None = None,
    port: int = 0,
    secret_file: str | Path | None = None,
) -> Ending:
    """Train a recipe, or continue its run; blocks to the end.

    Raises PlaitError before training starts, RunFailed after. With several hosts it first waits until the others
    have called `join_run`. Call it from the main thread.
    """
    from rich.console import Console

    from plait.commands.hosts.invitation import HostsRequest
    from plait.commands.train import train as run
    from plait.screen.terminal import TerminalScreen

    secret = Path(secret_file) if secret_file else None
    requested = HostsRequest(n_hosts=hosts, address=address, port=port, secret_file=secret)
    return run(Path(recipe), overrides, hosts=requested, screen=TerminalScreen(Console()))


def join_run(at: str, *, secret_file: str | Path | None = None) -> Ending:
    """Lend this host to the run that waits at HOST:PORT, until it ends; main thread only."""
    from rich.console import Console

    from plait.commands.join import join
    from plait.screen.terminal import TerminalScreen

    secret = Path(secret_file) if secret_file else None
    return join(at, secret_file=secret, screen=TerminalScreen(Console()))


def sample(
    run: str, prompt: str = "", *, tokens: int = 200, temperature: float = 0.8, top_p: float = 0.95, seed: int = 1
) -> Iterator[str]:
    """Yield the prompt and then the run's model's continuation of it, piece by piece."""
    from plait.commands.sample import sample as go_on

    return go_on(run, prompt, tokens=tokens, temperature=temperature, top_p=top_p, seed=seed)


def evaluate(run: str, files: Sequence[str] = ()) -> dict[str, Any]:
    """The run's exact loss on its held-out text or on other files, as `plait eval` prints it."""
    import json

    from plait.commands.evaluate import evaluate as measure
    from plait.screen.screen import SilentScreen

    return json.loads(measure(run, files, screen=SilentScreen()))
