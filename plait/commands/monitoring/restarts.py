"""Decides which failures of workers a new start may overcome, and how often to try: for runs of recipes and for users'
own programs."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from plait.launch.values.failure import FailureFacts

if TYPE_CHECKING:  # a program's launcher needs neither before a failure
    from plait.recipe.schema import RecoverSection
    from plait.report.incidents import Decision

LONGEST_PAUSE_S = 5.0
_PASSING_TEXTS = ("CUDA error", "NCCL", "nccl", "Input/output error", "Stale file handle", "Transport endpoint")
"""Error messages of devices, links and network disks that may be gone at a new start."""


def decision_after(asked: RecoverSection, without_progress: int, cause: Literal["may pass", "stays"]) -> Decision:
    """The reaction to a failure, which is number `without_progress` of those without a new checkpoint between them."""
    if asked.mode == "never" or cause == "stays":
        return "ended"
    return "gave up" if without_progress >= asked.give_up_after else "started again"


def may_pass(facts: FailureFacts, *, did_steps: bool) -> bool:
    """Whether a new start may succeed where this one failed, judging by the cause; `did_steps`: whether it had done any
    steps."""
    if facts.cause in ("host lost", "no room"):  # its devices are gone, and the layout needs them
        return False
    if facts.cause == "out of memory":  # in the first step the same happens again
        return did_steps
    if facts.cause == "raised":
        return any(text in facts.what for text in _PASSING_TEXTS)
    return True


def pause_s(without_progress: int) -> float:
    """Seconds to wait before the start that follows this many failures without a new checkpoint between them."""
    return min(LONGEST_PAUSE_S, without_progress - 1)


def true_facts(facts: FailureFacts, kills_before: int) -> FailureFacts:
    """The facts, corrected if the kernel says why it killed a worker of this machine; `kernel_memory_kills` returned
    `kills_before` when the workers were started."""
    if facts.what == "SIGKILL" and facts.host is None and kernel_memory_kills() > kills_before:
        return replace(facts, cause="out of memory", what="SIGKILL by the kernel, which had no memory left")
    return facts


def kernel_memory_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """Number of processes that the kernel has killed on this machine for lack of memory; 0 if it does not say."""
    with suppress(OSError, ValueError):
        for line in vmstat.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
