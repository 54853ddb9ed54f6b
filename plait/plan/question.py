"""What the planner is asked for a run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from plait.model.shape import ModelShape
from plait.plan.arithmetic import clocked
from plait.plan.calibrate import Basis
from plait.plan.grounds import Grounds
from plait.plan.plan import Precision
from plait.plan.stack import PLAIT, Stack
from plait.plan.workload import Workload, workload_of
from plait.recipe.schema import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A run that is settled but for its layout, and what to lay it out on."""

    config: RunConfig
    grounds: Grounds
    shape: ModelShape
    batch_sequences: int
    precision: Precision

    @property
    def workload(self) -> Workload:
        return workload_of(
            self.shape,
            sequence=self.shape.sequence,
            batch_sequences=self.batch_sequences,
            # What computes in float64 is priced as float32: nobody trains so for speed.
            precision="float32" if self.precision == "float64" else self.precision,
        )

    @property
    def basis(self) -> Basis:
        seen = self.grounds.described
        return "clock" if seen and clocked(self.workload, seen) else "formulas"

    @property
    def stack(self) -> Stack:
        """plait's own, with what earlier runs taught of these machines."""
        recalled = self.grounds.recall(self.precision, self.basis)
        return replace(PLAIT, calibration=recalled, gradient_transfer=self.config.train.gradient_transfer)
