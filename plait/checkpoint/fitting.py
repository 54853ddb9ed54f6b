"""Whether a checkpoint is of the model and the optimizer that ask for it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from plait.checkpoint.manifest import Manifest, tensor_names
from plait.errors import PlaitError

_OTHERWISE = "take the recipe that the run began with, or start under another run.name"


def check_model(manifest: Manifest, shape: Mapping[str, object]) -> None:
    """Raise PlaitError, naming the first field that differs, unless the checkpoint is of a model of this shape."""
    requested: dict[str, object] = json.loads(json.dumps(dict(shape)))
    for name in [*requested, *sorted(manifest.model.keys() - requested.keys())]:
        has, wants = manifest.model.get(name), requested.get(name)
        if has != wants:
            raise PlaitError(f"this checkpoint has {name} {has}, the recipe asks {wants}; {_OTHERWISE}")


def check_weights(manifest: Manifest, weights: Mapping[str, tuple[int, ...]]) -> None:
    """Raise PlaitError unless the checkpoint has each of these weights in its whole size: to be asked before anybody
    takes memory for them, as a manifest may tell of a model whose numbers are not there."""
    for name, sizes in weights.items():
        if (has := manifest.parts_of(f"model/{name}")[0].shape) != sizes:
            raise PlaitError(
                f"this checkpoint's {name} has {_times(has)} numbers, the run's has {_times(sizes)}; {_OTHERWISE}"
            )


def check_optimizer(manifest: Manifest, moments: Iterable[str]) -> None:
    """Raise PlaitError unless the checkpoint has these moments of each weight and no others."""
    has = {name.partition("/")[0] for name in tensor_names(manifest) if "/" in name} - {"model", "rng"}
    wants = set(moments)
    if has != wants:
        one, other = (", ".join(sorted(names)) or "no moments" for names in (has, wants))
        raise PlaitError(f"this checkpoint has {one}, the recipe's optimizer keeps {other}; {_OTHERWISE}")


def _times(sizes: tuple[int, ...]) -> str:
    return " × ".join(map(str, sizes))
