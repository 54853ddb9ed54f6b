"""The end of a run on the screen: how well it learned, how fast, where it is, and what to do with it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from plait.report.plausibility import efficiency_doubt, mfu_doubt
from plait.report.receipt import Receipt
from plait.screen.console import sparkline
from plait.units import compared_text, counted, format_count, format_duration

CURVE_COLUMNS = 24


def run_end(receipt: Receipt, folder: Path, losses: Sequence[float], encoding: str) -> str:
    """Six lines, and one more for each figure that cannot be; `losses` are those of all steps, for the curve."""
    name = shlex.quote(folder.name)
    lines = [
        f"done     {counted(receipt.steps, 'step')}, {format_count(receipt.tokens)} tokens "
        f"in {format_duration(receipt.wall_s)}",
        f"loss     {_loss_text(receipt)}  {sparkline(losses, CURVE_COLUMNS, encoding)}".rstrip(),
        f"speed    {_speed_text(receipt)}",
        f"saved    {folder}/checkpoints/step-{receipt.steps}; all figures: receipt.json",
        f"next     plait sample {name}",
        f"         plait eval {name}",
    ]
    return "\n".join([*lines, *doubt_lines(receipt)])


def doubt_lines(receipt: Receipt) -> list[str]:
    """A warning for each figure that is better than is possible."""
    speedup = receipt.efficiency and receipt.world_size > 1 and efficiency_doubt(receipt.efficiency, receipt.world_size)
    doubts = [
        f"MFU {receipt.mfu:.1%}{mfu_doubt(receipt.mfu)}" if mfu_doubt(receipt.mfu) else "",
        f"{receipt.speedup_vs_one:.2f} times one device alone{speedup}" if speedup else "",
    ]
    return [f"warning  {doubt}" for doubt in doubts if doubt]


def _loss_text(receipt: Receipt) -> str:
    if receipt.pair_accuracy is not None:
        held_out = receipt.eval_loss is not None
        text = f"{receipt.eval_loss if held_out else receipt.train_loss:.4f} a pair, {receipt.pair_accuracy:.1%} of "
        return f"{text}{'held-out ' if held_out else ''}pairs ranked right{'' if held_out else ' in the last step'}"
    if receipt.eval_nats_per_byte is None:
        return f"{receipt.train_loss:.4f} nats per token in the last step"
    text = f"{receipt.eval_nats_per_byte:.4f} nats per byte held out"
    return text if receipt.choices_accuracy is None else f"{text}, {receipt.choices_accuracy:.1%} of choices right"


def _speed_text(receipt: Receipt) -> str:
    text = f"{format_count(receipt.tokens_per_s)} tokens/s, {format_duration(receipt.step_s_median)} a step"
    if receipt.predicted_step_s is not None and receipt.step_error is not None:
        text += f" (planned {format_duration(receipt.predicted_step_s)}: {_difference_text(receipt.step_error)})"
    return text if receipt.mfu is None else f"{text}, MFU {receipt.mfu:.0%}"


def _difference_text(step_error: float) -> str:
    """How the measured step compares with the planned one, from planned / measured - 1."""
    ratio = 1 / (1 + step_error)
    return "as planned" if abs(ratio - 1) < 0.005 else compared_text(ratio, "slower", "faster")
