"""The layouts in which workers fail."""

from __future__ import annotations

LAYOUTS = {
    "replicate": (3, ("layout.replicate=3",)),
    "shard": (2, ("layout.replicate=1", "layout.shard=2", "layout.shard_what=parameters")),
    "tensor": (2, ("layout.replicate=1", "layout.tensor=2")),
    "pipeline": (2, ("layout.replicate=1", "layout.pipeline=2")),
    "context": (2, ("layout.replicate=1", "layout.context=2")),
    "mixed": (4, ("layout.replicate=2", "layout.tensor=2")),
}
"""Number of workers, and the settings; those of the tiny recipe name two replicas, which these replace."""
