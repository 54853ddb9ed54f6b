"""A checkpoint as a run saves its end."""

from __future__ import annotations

from pathlib import Path

from plait.checkpoint.store import checkpoint_for
from plait.trainer.assemble import Assembly
from plait.trainer.checkpointing.background import CheckpointSaver
from plait.trainer.checkpointing.carrier import PartsCarrier
from plait.trainer.state import TrainState


def save(assembly: Assembly, state: TrainState, folder: Path, carrier: PartsCarrier | None = None) -> Path:
    """Save a state to a folder of checkpoints, or raise at once where a disk is full; returns where it is. Every rank
    must call it, those whose folder is not on rank 0's host with a carrier."""
    CheckpointSaver(assembly, folder, assembly.sums, lambda: None, carrier, try_for_s=0.0).save_now(state)
    return checkpoint_for(folder, state.step)
