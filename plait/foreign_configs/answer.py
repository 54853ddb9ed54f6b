"""The answer of `plait check FILE`: a forecast, what would help, and what plait would do, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.errors import PlaitError
from plait.foreign_configs.changes import WORTH_SAYING, ConfigChange
from plait.foreign_configs.forecast import RunForecast
from plait.layout import layout_summary
from plait.planner.search.cost_breakdown import MEMORY_NAMES, TIME_NAMES
from plait.planner.search.found import Search
from plait.units import counted, format_bytes, format_count, format_duration, more_or_less

_TIME_NAMES = {**TIME_NAMES, "dequantize": "dequantizing weights"}
LEAST_SHARE = 0.01
"""Items of time below this share of a step are not printed; items of memory are printed from 50 MB on."""
LEAST_BYTES = 5e7


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedConfig:
    """The whole answer of `plait check` for a configuration."""

    format: str
    found: RunForecast
    change: ConfigChange | None
    """The smallest change that helps."""
    plaits: Search | PlaitError
    """The layout that plait would choose for the same model and batch on these devices, or why there is none."""

    @property
    def exit_code(self) -> int:
        """0 if the run fits, else 1."""
        return 0 if self.found.verdict == "fits" else 1


def checked_config_text(checked: CheckedConfig) -> str:
    """The answer as it is printed."""
    return "\n".join(_lines(checked))


def _lines(checked: CheckedConfig) -> list[str]:
    found = checked.found
    run, workload = found.run, found.workload
    lines = [
        f"reads    {checked.format}: {_what(found)}",
        f"run      {_batch_text(found)}",
        f"         {_layout_text(found)}",
    ]
    lines.append(f"machines {found.cluster.hardware}")
    lines.append(f"memory   {_verdict_text(found)}")
    lines += [f"  {format_bytes(size):>10}  {MEMORY_NAMES[name]}" for name, size in _largest(found.memory, LEAST_BYTES)]
    rate = format_count(workload.batch_tokens / found.step_s)
    lines.append(f"step     {format_duration(found.step_s)}, {rate} tokens a second")
    lines += [
        f"  {seconds / found.step_s:>10.0%}  {_TIME_NAMES[name]}"
        for name, seconds in _largest(found.time, LEAST_SHARE * found.step_s)
    ]
    if run.offloads_optimizer or run.offloads_parameters:
        lines.append("         the host's work for offloading is not included: a step takes longer")
    lines.append(f"whole    {_whole_text(found)}")
    lines.append(f"change   {_change_text(checked)}")
    lines.append(f"plait    {_plait_text(checked)}")
    lines += [f"assumed  {one}" for one in found.assumed]
    lines += [f"unpriced {one}" for one in run.not_priced]
    lines += [f"unknown  {one}: not a key of this format; ignored" for one in run.unknown]
    return lines


def _what(found: RunForecast) -> str:
    run, workload = found.run, found.workload
    name = run.model or "a model"
    size = f"{name} ({format_count(workload.parameters)} parameters)"
    if not run.adapter_rank:
        return f"all weights of {size}"
    base = f", with its base in {run.quantized_bits} bits" if run.quantized_bits else ""
    return f"LoRA of rank {run.adapter_rank} on {size}{base}"


def _batch_text(found: RunForecast) -> str:
    workload, layout = found.workload, found.layout
    ranks = int(layout["replicate"]) * int(layout["shard"])
    return (
        f"{workload.batch_tokens:,} tokens a step: "
        f"{layout['micro_sequences']} × {workload.sequence:,} per micro-batch, "
        f"{found.accumulation} accumulated, {counted(ranks, 'data-parallel rank')}"
    )


def _layout_text(found: RunForecast) -> str:
    layout = found.layout
    axes = [f"{axis} {layout[axis]}" for axis in ("tensor", "pipeline", "context", "expert") if int(layout[axis]) > 1]
    sharded = str(layout["shard_what"])
    states = {"optimizer": "optimizer state", "gradients": "optimizer state and gradients",
              "parameters": "optimizer state, gradients and parameters"}  # fmt: skip
    if sharded in states:
        axes.append(f"{states[sharded]} sharded over {layout['shard']}")
    recompute = {"none": "no recompute", "selective": "selective recompute", "full": "full recompute"}
    weights = "float32" if found.run.weights == "float32" else "16 bits"
    return ", ".join(
        [*axes, f"{found.workload.precision} products, weights in {weights}", recompute[str(layout["recompute"])]]
    )


def _verdict_text(found: RunForecast) -> str:
    need, have = format_bytes(found.needed_bytes), format_bytes(found.device_bytes)
    if found.verdict == "fits":
        return f"fits: {need} of {have} on each device"
    if found.verdict == "does not fit":
        over = format_bytes(found.needed_bytes - found.device_bytes)
        return f"does not fit: {need} needed, {have} on each device, {over} too much"
    return f"too close to say: {need} of {have} on each device, a margin below the forecast's error"


def _whole_text(found: RunForecast) -> str:
    if found.steps is None:
        return "the configuration does not say how long the run is; give steps=NUMBER or samples=NUMBER"
    return f"{format_duration(found.steps * found.step_s)} for {counted(found.steps, 'step', ',')}"


def _change_text(checked: CheckedConfig) -> str:
    found, change = checked.found, checked.change
    if change is None:
        if found.verdict == "fits":
            return f"none that plait tried shortens a step by more than {WORTH_SAYING:.0%}"
        return "none that plait tried is enough; it needs more or larger devices"
    after = change.after
    ratio = after.step_s / found.step_s - 1
    speed = "as long" if abs(ratio) < 0.005 else f"{more_or_less(ratio, 0)} time"
    effect = f"{format_bytes(after.needed_bytes)}, a step takes {speed}"
    kind = "" if change.keeps_mathematics else "; it changes what is computed"
    return f"{change.text}: {effect}{kind}"


def _plait_text(checked: CheckedConfig) -> str:
    plaits = checked.plaits
    if isinstance(plaits, PlaitError):
        return f"cannot run this: {plaits}"
    values = _plait_values(plaits)
    return (
        f"would take {values['layout']}, micro-batches of {values['micro_sequences']}: "
        f"{format_bytes(values['needed_bytes'])}, {format_duration(values['step_s'])} a step"
    )


def _plait_values(plaits: Search) -> dict[str, Any]:
    chosen = plaits.chosen
    row = plaits.candidates.row(chosen)
    layout = plaits.candidates.degrees(chosen)
    text = layout_summary(layout)
    if row["recompute"] != "none" and "recompute" not in text:
        text += f", recompute {row['recompute']}"
    return {
        "layout": text,
        "micro_sequences": int(row["micro_sequences"]),
        "needed_bytes": round(plaits.bytes_per_device(chosen)),
        "step_s": plaits.chosen_step_s,
    }


def _largest(items: Mapping[str, float], least: float) -> Sequence[tuple[str, float]]:
    return sorted(((name, value) for name, value in items.items() if value >= least), key=lambda item: -item[1])


def checked_config_json(checked: CheckedConfig) -> str:
    """The answer as JSON."""
    found, change, plaits = checked.found, checked.change, checked.plaits
    values = {
        "format": checked.format,
        "model": found.run.model,
        "parameters": found.workload.parameters,
        "machines": found.cluster.name,
        "devices": found.cluster.n_devices,
        "layout": dict(found.layout),
        "sequence": found.workload.sequence,
        "batch_sequences": found.workload.batch_sequences,
        "verdict": found.verdict,
        "needed_bytes": round(found.needed_bytes),
        "device_bytes": round(found.device_bytes),
        "memory": {name: round(value) for name, value in found.memory.items()},
        "step_s": found.step_s,
        "time": dict(found.time),
        "steps": found.steps,
        "run_s": None if found.steps is None else found.steps * found.step_s,
        "change": None
        if change is None
        else {
            "text": change.text,
            "keeps_mathematics": change.keeps_mathematics,
            "needed_bytes": round(change.after.needed_bytes),
            "step_s": change.after.step_s,
            "verdict": change.after.verdict,
        },
        "plait": {"refused": str(plaits)} if isinstance(plaits, PlaitError) else _plait_values(plaits),
        "assumed": list(found.assumed),
        "not_priced": list(found.run.not_priced),
        "unknown": list(found.run.unknown),
    }
    return json.dumps(values, indent=2)
