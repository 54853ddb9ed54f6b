"""The answer of `plait.plan`: the values of `plait plan --json`, which show themselves in a terminal and a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from plait.commands.planning.output_files import check_output_file, write_output_file
from plait.commands.planning.plan_report import plan_report_text
from plait.planner.report.page import page_html, plotly_script
from plait.planner.report.report import PlanReport
from plait.planner.report.report_json import report_values
from plait.units import format_bytes, format_duration


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlannedRun:
    """A plan for one cluster. Two are equal where all their values are."""

    values: Mapping[str, Any]
    """All keys of `plait plan --json`."""
    report: PlanReport = field(compare=False)

    @property
    def layout(self) -> Mapping[str, int]:
        """Degree of each axis: {"pipeline": 1, "replicate": 8, …}."""
        return self.values["layout"]

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return self.values["step_s"]

    @property
    def bytes_per_device(self) -> float:
        """Predicted memory on the fullest device."""
        return self.values["bytes_per_device"]

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization as a fraction; None where the peak is unknown."""
        return self.values["mfu"]

    @property
    def why(self) -> Sequence[str]:
        """Sentences: why this layout, what limits it, what would change the choice, how sure the forecast is."""
        return self.values["why"]

    def __str__(self) -> str:
        return plan_report_text(self.report)

    def __repr__(self) -> str:
        return str(self).rstrip("\n")

    def _repr_html_(self) -> str:
        """What a notebook shows: the main figures, the reasons, and the whole report to unfold."""
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in self._facts())
        reasons = "".join(f"<li>{escape(line)}</li>" for line in self.why)
        whole = f"<details><summary>the whole plan</summary><pre>{escape(str(self))}</pre></details>"
        return f"<table>{rows}</table><ul>{reasons}</ul>{whole}"

    def to_html(self, file: str | Path) -> Path:
        """Write a page with figures and return its path; raises PlaitError where it cannot be written or drawn."""
        path = Path(file)
        check_output_file(path)
        write_output_file(path, page_html([self.report], plotly_script()))
        return path

    def _facts(self) -> Sequence[tuple[str, str]]:
        mfu = "unknown" if self.mfu is None else f"{self.mfu:.0%}"
        return (
            ("machines", self.values["cluster"]),
            ("layout", self.report.layout),
            ("a step", f"{format_duration(self.step_s)}, give or take {self.values['error']:.0%}"),
            ("memory", f"{format_bytes(self.bytes_per_device)} a device"),
            ("MFU", mfu),
        )


def planned_run(report: PlanReport) -> PlannedRun:
    """The report as Python is given it."""
    return PlannedRun(values=report_values(report), report=report)
