"""`plait check`: runs the user's distributed program on CPUs, and says whether it computes what one process would."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from plait.checking.findings import CheckReport, check_report_lines
from plait.checking.launch_command import WatchedProgram, read_launch_command, with_outputs_in
from plait.checking.launching import (
    LIGHT_AT_LEAST_S,
    OnPace,
    StartRank,
    WatchedLaunch,
    ignore_pace,
    log_tail,
    read_events,
    run_watched,
    start_process,
)
from plait.errors import PlaitError
from plait.launch.local.guard import require_linux
from plait.screen.screen import Screen
from plait.units import format_duration

WORKERS_AT_MOST = 64
DEFAULT_WORKERS, DEFAULT_STEPS = 2, 6
_SAID_FROM_S = 10.0
RUNS_OFFLINE = "the program ran offline (WANDB_MODE, HF_HUB_OFFLINE), without GPUs and without torch.compile"


def check(
    command: Sequence[str],
    *,
    workers: int | None = None,
    steps: int = DEFAULT_STEPS,
    silent_s: float = 60,
    limit_s: float = 600,
    screen: Screen,
    start: StartRank = start_process,
) -> CheckReport:
    """Run a program, record what it does and judge it; blocks until the steps are taken.

    Raises PlaitError for a command that starts no Python program. For a program that fails or hangs, the report says
    "cannot judge".
    """
    require_linux()
    program = read_launch_command(command)
    require_same_python(program)
    count = workers if workers is not None else program.workers or DEFAULT_WORKERS
    if not 2 <= count <= WORKERS_AT_MOST:
        raise PlaitError(f"{count} workers: the check compares ranks; choose --workers from 2 to {WORKERS_AT_MOST}")
    if not 1 <= steps <= 1000:
        raise PlaitError(f"--steps {steps}: choose a number from 1 to 1000")
    with TemporaryDirectory(prefix="plait-check-") as name:
        folder = Path(name)
        program, moved = with_outputs_in(program, folder / "outputs")
        screen.print(_introduction(program, count, steps, moved))

        def watched(where: str, workers: int, after_s: float, on_pace: OnPace) -> WatchedLaunch:
            return run_watched(
                program, folder / where, workers=workers, steps=steps, silent_s=silent_s, limit_s=limit_s,
                after_s=after_s, on_pace=on_pace, start=start,
            )  # fmt: skip

        def say_how_long(first_s: float, step_s: float) -> None:
            after_s = max(LIGHT_AT_LEAST_S, first_s + (steps - 1) * step_s)
            print_what_is_left(screen, (steps - 2) * step_s + after_s, first_s, step_s)

        run = watched("run", count, LIGHT_AT_LEAST_S, say_how_long)
        events = [read_events(folder / "run", rank) for rank in range(count)]
        if (unable := why_unusable(run, events, folder / "run", limit_s, silent_s)) is not None:
            report = CheckReport(
                outcome="cannot judge", workers=count, steps=0, parameters=0, largest_error=None, reasons=(unable,),
                changed=tuple(dict.fromkeys(e["what"] for rank in events for e in rank if e["kind"] == "stand_in")),
                wall_s=run.wall_s,
            )  # fmt: skip
        else:
            from plait.checking.judging import judge

            @cache
            def other_workers() -> Mapping[tuple[int, int], Mapping[str, float]] | None:
                for more in (count + 1, 2 * count):  # a batch that three ranks cannot share may divide by four
                    other = watched(f"on-{more}", more, 0.0, ignore_pace)
                    if other.ending in ("enough", "ended") and (weights := _weights_on(folder / f"on-{more}", more)):
                        return weights
                return None

            report = judge(folder / "run", events, wall_s=run.wall_s, other_workers=other_workers)
    outputs = [f"{one} went to a temporary folder" for one in moved]
    return replace(report, changed=(RUNS_OFFLINE, *program.changed, *outputs, *report.changed))


def report_text(report: CheckReport, *, as_json: bool) -> str:
    """The report as text or JSON, for the terminal."""
    if as_json:
        return json.dumps(report.as_json(), indent=2)
    return "\n".join(check_report_lines(report))


def print_what_is_left(screen: Screen, left_s: float, first_s: float, step_s: float) -> None:
    """Say how long a check still takes, by its program's first two steps, where that is worth a line."""
    if left_s >= _SAID_FROM_S:
        screen.print(
            f"expect   about {format_duration(round(left_s))} more: {format_duration(float(f'{first_s:.2g}'))} to the "
            f"first step, {format_duration(float(f'{step_s:.2g}'))} for each step after it"
        )


def _introduction(program: WatchedProgram, workers: int, steps: int, moved: Sequence[str]) -> str:
    where = "" if moved else "; files that it writes without torch.save go to their usual places"
    return f"checks   {program.name}: {steps} steps on {workers} processes of this machine{where}"


def require_same_python(program: WatchedProgram) -> None:
    """Raise PlaitError if the command names another interpreter than the one that runs plait."""
    if program.python and Path(program.python).resolve() != Path(sys.executable).resolve():
        if Path(program.python).parent == Path(sys.executable).parent:
            return
        raise PlaitError(
            f"the program runs in {program.python}, and plait in {sys.executable}",
            f"install plait there, then: {Path(program.python).parent / 'plait'} check -- …",
        )


def why_unusable(
    run: WatchedLaunch, events: Sequence[Sequence[dict[str, object]]], folder: Path, limit_s: float, silent_s: float
) -> str | None:
    """Why a run cannot be judged, or None if it can: a program that fails after the checked steps has shown enough."""
    is_over = all(any(one["kind"] in ("checked", "ended") for one in rank) for rank in events)
    if is_over or run.ending == "ended":  # the end may fail: gloo's threads do when a process ends
        return None
    spawned = next((one for rank in events for one in rank if one["kind"] == "unusable"), None)
    if spawned is not None:
        return (
            f"the program starts {spawned['wanted']} processes itself; give --workers {spawned['wanted']}, "
            "so that each process of the check replaces one of them"
        )
    if run.ending == "failed":
        return _failure(events, folder)
    places = "; ".join(f"rank {rank} {_last_doing(one)}" for rank, one in enumerate(events))
    if run.ending == "silent":
        return (
            f"nothing happened for {silent_s:.0f} s, as when ranks wait for different messages: {places}; make sure "
            "that all ranks call the same collectives, or give more time with --silent"
        )
    taken = min(sum(one["kind"] == "step" for one in rank) for rank in events)
    return (
        f"only {taken} steps were taken in {limit_s:.0f} s: {places}; use a smaller model or batch, or give more "
        "time with --limit"
    )


def _failure(events: Sequence[Sequence[dict[str, object]]], folder: Path) -> str:
    failed = [(rank, one) for rank, own in enumerate(events) for one in own if one["kind"] == "failed"]
    lost = ("Connection closed by peer", "Connection reset", "Broken pipe", "remote worker crashing")
    causes = [pair for pair in failed if not any(text in str(pair[1]["error"]) for text in lost)]
    if failed and not causes:
        doing = "; ".join(f"rank {rank} {_last_doing(_before_failure(one))}" for rank, one in enumerate(events))
        return f"a rank waits for others that never arrive: {doing}; make sure that all ranks call the same collectives"
    if not causes:
        tail = next((text for rank in range(len(events)) if (text := log_tail(folder, rank, 3))), "")
        return f"the program ended early; its last lines are: {tail or 'none'}"
    rank, cause = causes[0]
    where = f" at {cause['site']}" if cause["site"] else ""
    text = f"the program failed on rank {rank}{where}: {cause['error']}"
    if re.search(r"cuda|nvidia", text, re.IGNORECASE):
        text += "; it needs a GPU there: let it use the CPU when torch.cuda.is_available() is false"
    elif "HF_HUB_OFFLINE" in text or "offline" in text.lower():
        text += "; the check runs offline: download its data and models first"
    return text


def _before_failure(events: Sequence[dict[str, object]]) -> Sequence[dict[str, object]]:
    """A rank's events without its failure."""
    return [one for one in events if one["kind"] != "failed"]


def _last_doing(events: Sequence[dict[str, object]]) -> str:
    if not events:
        return "has not begun to compute"
    last = events[-1]
    where = f" at {last['site']}" if last.get("site") else ""
    doing = {
        "message": f"is in {last.get('call')}",
        "backward_begins": "is in backward",
        "forward": "is after a forward pass",
        "ended": "has ended",
        "step": "is after an optimizer step",
        "draw": "has drawn a batch",
    }
    return doing.get(str(last["kind"]), "runs") + where


def _weights_on(folder: Path, workers: int) -> Mapping[tuple[int, int], Mapping[str, float]]:
    """The factor between the gradients of a run on another number of workers and one process's, by step, since the
    weight of a loss may change from step to step."""
    from plait.checking.gradient_findings import tolerance_of
    from plait.checking.recorded import checked_steps
    from plait.checking.reference import weights_of_loss

    events = [read_events(folder, rank) for rank in range(workers)]
    steps = checked_steps(folder, events)
    tolerance = tolerance_of(steps, events)
    return {(step.optimizer, step.step): weights_of_loss(step, tolerance=tolerance) for step in steps}
