"""What the planner is asked for a run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from plait.model.shape import ModelShape
from plait.partition.execution import Precision
from plait.planner.calibration.factors import Basis
from plait.planner.derive.resources import Grounds
from plait.planner.problem.software_profile import PLAIT, Stack
from plait.planner.problem.workload import Workload, workload_of
from plait.planner.step_time.device_time import clocked
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
