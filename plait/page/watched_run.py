"""One run as the page shows it, read only from the files in its folder; each file is read again only if it changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any, Generic, TypeVar

from plait.checked_json import printable
from plait.commands.monitoring.finish import device_with_price
from plait.commands.planning.introduction import layout_in_words, model_text, planned_devices_text, planned_workers_text
from plait.errors import PlaitError
from plait.page.metrics_history import COLUMNS, MetricsHistory
from plait.planner.plan import Plan
from plait.report.growing_file import GrowingFile
from plait.report.incidents import read_incidents
from plait.report.rank_times_file import RankTimesLine, parse_rank_times
from plait.report.receipt import ITEM_NAMES, Receipt
from plait.report.receipt_file import read_receipt
from plait.report.samples_file import SampleReport, read_samples
from plait.report.shares_file import read_shares
from plait.run_files.bottleneck import bottleneck_if_known
from plait.run_folder import RunFolder, RunTotals

_T = TypeVar("_T")
_RECENT_STEPS = 50
"""Number of steps averaged for a page's present values."""
_MOST_SAMPLES = 20
_RECENT_LINES = 6
"""Number of lines of rank-times.jsonl averaged for a page's present values: half a minute."""
_LEAST_SECONDS_BETWEEN_FINDINGS = 60.0


class KeptFile(Generic[_T]):
    """The contents of a file, read again if it changed; `nothing` if it is missing or cannot be read, which `problem`
    then says."""

    def __init__(self, path: Path, read: Callable[[], _T], nothing: _T) -> None:
        self.problem = ""
        self._path, self._read, self._nothing = path, read, nothing
        self._stamp: tuple[int, ...] | None = None
        self._value = nothing

    def value(self) -> _T:
        """The file's present value."""
        stamp = stamp_of(self._path)
        if stamp != self._stamp:
            self._stamp, self.problem, self._value = stamp, "", self._nothing
            try:
                self._value = self._read() if stamp else self._nothing
            except FileNotFoundError:
                self._stamp = None
            except (PlaitError, OSError) as error:
                self.problem = printable(str(error))
        return self._value


def stamp_of(path: Path) -> tuple[int, ...] | None:
    """A value that changes with a file's contents; None if there is no file."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


class WatchedRun:
    """Follows the files of one run."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._metrics = MetricsHistory(folder.metrics)
        self._rank_times, self._rank_lines = GrowingFile(folder.rank_times), list[RankTimesLine]()
        self._plan = KeptFile[_PlanAsShown](folder.plan, lambda: _plan_as_shown(folder.saved_plan()), _NO_PLAN)
        self._receipt = KeptFile[Receipt | None](folder.receipt, lambda: read_receipt(folder.receipt), None)
        self._incidents = KeptFile(folder.incidents, lambda: read_incidents(folder.incidents)[0], ())
        self._shares = KeptFile(folder.shares, lambda: read_shares(folder.shares), ())
        self._samples = KeptFile(folder.samples, lambda: read_samples(folder.samples), ())
        self._totals = KeptFile(folder.totals_file, lambda: folder.totals, RunTotals())
        self._bottleneck = _KeptBottleneck(folder)

    def close(self) -> None:
        """Close all open files."""
        self._metrics.close()
        self._rank_times.close()

    def view(self, after: int = 0) -> Mapping[str, Any]:
        """Everything that the page shows of the run, as JSON, with the metrics of the steps after `after`; None stands
        for unknown values."""
        problems: list[str] = []
        try:
            self._metrics.update()
        except OSError as error:
            problems.append(f"{self._folder.metrics} cannot be read ({error.strerror})")
        self._read_rank_times()
        plan, receipt, incidents = self._plan.value(), self._receipt.value(), self._incidents.value()
        shares, totals = self._shares.value(), self._totals.value()
        samples = self._samples.value()
        files = (self._plan, self._receipt, self._incidents, self._shares, self._samples, self._totals)
        problems += [kept.problem for kept in files if kept.problem]
        if self._metrics.damaged_lines:
            problems.append(f"{self._metrics.damaged_lines} damaged lines of metrics.jsonl are left out")
        begins_after, rows = self._metrics.rows(after)
        ranks = _mean_of_lines(self._rank_lines[-_RECENT_LINES:])
        step = self._metrics.last_step
        step_s = self._metrics.mean("step_s", first=step - _RECENT_STEPS + 1, last=step)
        return {
            "name": self._folder.path.name,
            "problems": problems,
            "plan": plan.plan,
            "forecast": plan.forecast,
            "metrics": {
                "version": self._metrics.version,
                "after": begins_after,
                "columns": COLUMNS,
                "rows": rows,
                # The step's own line may be newer: an evaluation follows its step's line.
                "evaluations": [one for one in self._metrics.evaluations if one["step"] >= begins_after],
            },
            "step": step,
            "step_s": step_s,
            "eta_s": (plan.steps - step) * step_s if plan.steps and step_s is not None else None,
            "trained_s": max(totals.wall_s, self._metrics.stepping_s),
            "items": self._measured_items(ranks, receipt),
            "ranks": ranks and asdict(ranks),
            "memory": {"tensor_bytes": totals.peak_tensor_bytes, "process_bytes": totals.peak_rss_bytes},
            "shares": [asdict(one) for one in shares],
            "incidents": [_incident_view(one) for one in incidents],
            "samples": [asdict(one) for one in _few(samples)],
            "receipt": receipt and {key: getattr(receipt, key) for key in ("wall_s", "cost_usd", "energy_wh")},
            "bottleneck": self._bottleneck.value(),
        }

    def _measured_items(self, ranks: RankTimesLine | None, receipt: Receipt | None) -> Mapping[str, float] | None:
        """A step's time by item on the rank that computes most, for which the others wait: at present, or from the
        receipt if the ranks' times were not kept."""
        step_s = self._metrics.mean("step_s", first=ranks.step - ranks.steps + 1, last=ranks.step) if ranks else None
        if ranks is None or step_s is None:
            return receipt and receipt.measured_items
        busiest = max(range(ranks.ranks), key=lambda rank: ranks.compute_s[rank] + ranks.inside_s[rank])
        compute_s = ranks.compute_s[busiest] + ranks.inside_s[busiest]
        wait_s, data_s = ranks.wait_s[busiest], ranks.data_s[busiest]
        seconds = (compute_s, wait_s, max(0.0, step_s - compute_s - wait_s - data_s), data_s)
        return dict(zip(ITEM_NAMES, seconds, strict=True))

    def _read_rank_times(self) -> None:
        version = self._rank_times.version
        try:
            for block in self._rank_times.blocks():
                for line in block.splitlines():
                    if found := parse_rank_times(line):
                        # Steps after the checkpoint that the run went back to do not count.
                        kept = [one for one in self._rank_lines if one.step < found.step]
                        self._rank_lines = [*kept[1 - _RECENT_LINES :], found]
        except OSError:
            self._rank_lines = []
        if self._rank_times.version != version and stamp_of(self._folder.rank_times) is None:
            self._rank_lines = []


class _KeptBottleneck:
    """The bottleneck of a run, as JSON: recomputed when its ranks' times have grown, but at most once a minute, since
    that prices its layout dozens of times."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._stamp: tuple[object, ...] | None = None
        self._found_at_s = -inf
        self._value: Mapping[str, Any] | None = None

    def value(self) -> Mapping[str, Any] | None:
        """The bottleneck; None if unknown."""
        stamp = (stamp_of(self._folder.rank_times), stamp_of(self._folder.plan))
        now_s = time.monotonic()
        if stamp != self._stamp and (
            self._value is None or now_s - self._found_at_s >= _LEAST_SECONDS_BETWEEN_FINDINGS
        ):
            self._stamp, self._found_at_s = stamp, now_s
            found = bottleneck_if_known(self._folder)
            self._value = found and asdict(found)
        return self._value


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlanAsShown:
    """A plan and its forecast as the page shows them, as JSON; made once per plan."""

    steps: int = 0
    plan: Mapping[str, Any] | None = None
    forecast: Mapping[str, Any] | None = None


_NO_PLAN = _PlanAsShown()


def _plan_as_shown(plan: Plan) -> _PlanAsShown:
    return _PlanAsShown(steps=plan.job.steps, plan=_plan_view(plan), forecast=_forecast_view(plan))


def _plan_view(plan: Plan) -> Mapping[str, Any]:
    device, machines = device_with_price(plan), plan.machines
    hosts = [host.name for host in machines.hosts for _ in range(host.workers)]
    on_host = max((host.workers for host in machines.hosts), default=plan.world_size)
    return {
        "model": model_text(plan.job.shape),
        "devices": planned_devices_text(plan),
        "layout": layout_in_words(plan.placement.layout),
        "workers": planned_workers_text(plan),
        "device": machines.device,
        "steps": plan.job.steps,
        "budget": str(plan.job.budget),
        "batch_tokens": plan.batch_tokens,
        "sequences_per_replica": plan.sequences_per_replica,
        "stage_layers": plan.placement.layout.stage_layers,
        "hosts": hosts,
        "memory_bytes": machines.fingerprint.get("memory_bytes"),
        "workers_per_host": on_host,
        "price_per_hour": device and device.price_per_hour and device.price_per_hour * plan.devices,
        "warnings": plan.warnings,
        "reasons": plan.reasons,
    }


def _forecast_view(plan: Plan) -> Mapping[str, Any] | None:
    forecast = plan.forecast
    if forecast is None:
        return None
    return {
        "step_s": forecast.step_s,
        "is_timed": forecast.calibration.is_measured,
        "error": forecast.error,
        "tokens_per_s": plan.batch_tokens / forecast.step_s,
        "tensor_bytes": forecast.tensor_bytes,
        "bytes_per_device": forecast.bytes_per_device,
        "items": forecast.items and forecast.items.measurable_items(),
    }


def _few(samples: Sequence[SampleReport]) -> Sequence[SampleReport]:
    """The first sample, and the newest ones."""
    return samples if len(samples) <= _MOST_SAMPLES else [samples[0], *samples[1 - _MOST_SAMPLES :]]


def _mean_of_lines(lines: Sequence[RankTimesLine]) -> RankTimesLine | None:
    """The mean of several lines; those with a different number of ranks than the last are ignored."""
    lines = [one for one in lines if one.ranks == lines[-1].ranks]
    if not lines:
        return None
    steps = sum(one.steps for one in lines)

    def mean(lists: Sequence[Sequence[float]]) -> tuple[float, ...]:
        weighted = [[one.steps * seconds for seconds in values] for one, values in zip(lines, lists, strict=True)]
        return tuple(sum(values) / steps for values in zip(*weighted, strict=True))

    return RankTimesLine(
        step=lines[-1].step,
        steps=steps,
        compute_s=mean([one.compute_s for one in lines]),
        wait_s=mean([one.wait_s for one in lines]),
        inside_s=mean([one.inside_s for one in lines]),
        data_s=mean([one.data_s for one in lines]),
    )


def _incident_view(incident: Any) -> Mapping[str, Any]:
    keys = ("at", "step", "resumed_from", "sentence", "decision", "cause", "lost_s", "steps_lost")
    return {key: getattr(incident, key) for key in keys}
