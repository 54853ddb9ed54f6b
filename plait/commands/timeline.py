"""`plait timeline`: records a few steps of a run, and shows them next to the plan."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from plait.checked_json import printable
from plait.checkpoint.store import FoundCheckpoint, newest_good, published_checkpoints
from plait.commands.planning.output_files import check_output_file, write_output_file
from plait.data.shards import open_corpus
from plait.errors import PlaitError, RunFailed
from plait.launch.local.run import ForkServer
from plait.launch.values.job import Job, Message
from plait.layout import layout_summary
from plait.planner.plan import Plan
from plait.planner.plan_file import write_plan
from plait.planner.report.planned_timeline import planned_timeline
from plait.regular_file import read_regular_file
from plait.report.shares_file import read_shares
from plait.report.step_timeline import StepTimeline, timeline_from_json
from plait.report.timeline_request import TimelineFiles
from plait.report.trace_events import trace_json
from plait.run_files.running_runs import is_at_work, registry_folder
from plait.run_files.timeline_page import TimelinePage, headline, timeline_html
from plait.run_folder import RunFolder, find_run
from plait.screen.screen import Screen, ShowProgress
from plait.trainer.checkpointing.fits import check_fits
from plait.units import counted
from plait.workers import ENTRIES, PROGRESS, RECORDING_ENTRY, modules_needed
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

LOOK_FOR_ANSWER_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSteps:
    """A recorded timeline with the plan that it followed, and a sentence on how it was recorded."""

    timeline: StepTimeline
    plan: Plan
    how: str


def record_run(name: str, *, steps: int, html: Path, trace: Path, screen: Screen) -> None:
    """Record some steps of a run, and write the page and the trace. A run that is training records them itself;
    otherwise workers start here, continue from the newest checkpoint and save nothing.

    Raises PlaitError if that is not possible here, RunFailed if the run ends meanwhile.
    """
    folder = find_run(name, CURRENT_FOLDER)
    for file in (html, trace):
        check_output_file(file)
    with screen.progress() as show:
        if is_at_work(folder.path, registry_folder()):
            recorded = _recorded_by_run(folder, steps, show)
        else:
            recorded = record_from_checkpoint(folder, steps, show, CURRENT_FOLDER)
    page = page_of(folder.path.resolve().name, recorded)
    write_output_file(html, timeline_html(page))
    both = [one for one in (page.planned, page.measured) if one is not None]
    write_output_file(trace, trace_json(both))
    screen.print(printable(f"timeline {headline(page)}"))
    screen.print(printable(f"written  {html}"))
    screen.print(printable(f"written  {trace}, which ui.perfetto.dev opens"))


def page_of(name: str, recorded: RecordedSteps) -> TimelinePage:
    """The page of a recorded timeline."""
    measured, plan = recorded.timeline, recorded.plan
    return TimelinePage(
        run=name,
        layout=layout_summary(plan.placement.layout),
        measured=measured,
        planned=planned_timeline(plan, measured.first_step, len(measured.bounds_s)),
        recorded=recorded.how,
    )


def plan_after(plan: Plan, folder: RunFolder, step: int) -> Plan:
    """The plan with the shares and stages that apply after this step."""
    lines = [line for line in read_shares(folder.shares) if line.step <= step + 1]
    if not lines:
        return plan
    placement, line = plan.placement, lines[-1]
    layers = next((one.stage_layers for one in reversed(lines) if any(one.stage_layers)), ())
    layout = replace(placement.layout, stage_layers=layers) if layers else placement.layout
    return replace(plan, placement=replace(placement, layout=layout, shares=line.shares))


# From a run that is training.


def _recorded_by_run(folder: RunFolder, steps: int, show: ShowProgress) -> RecordedSteps:
    files = TimelineFiles(folder.path)
    files.ask(steps)
    show(0, 0, f"waiting for {counted(steps, 'step')} of the run that trains")
    try:
        while not files.answer.exists():
            if not is_at_work(folder.path, registry_folder()):
                raise RunFailed(
                    "the run ended before its steps were recorded; repeat the command, and it records them from the "
                    "newest checkpoint"
                )
            if not files.request.exists() and not files.answer.exists():
                raise RunFailed(
                    "the recorded steps are gone: another plait timeline took them, or the run could not write them; "
                    "make sure that its disk has room, and repeat the command"
                )
            time.sleep(LOOK_FOR_ANSWER_S)
        try:
            timeline = timeline_from_json(read_regular_file(files.answer))
        except (OSError, ValueError) as error:
            raise RunFailed(f"the recorded steps cannot be read ({error}); repeat the command") from None
    finally:
        with suppress(OSError):
            files.clear()
    plan = plan_after(folder.saved_plan(), folder, timeline.first_step - 1)
    return RecordedSteps(timeline=timeline, plan=plan, how="Recorded by the run itself while it trained.")


# With our own workers.


def record_from_checkpoint(folder: RunFolder, steps: int, show: ShowProgress, working: WorkingFolder) -> RecordedSteps:
    """Record steps after a run's newest checkpoint, or its first steps if it has none; the run itself is not
    changed."""
    found = newest_good(folder.checkpoints) if published_checkpoints(folder.checkpoints) else None
    step = found.manifest.step if found else 0
    plan = plan_after(folder.saved_plan(), folder, step)
    _check_possible(plan, found, working)
    with TemporaryDirectory(prefix="plait-timeline-") as name:
        scratch = Path(name)
        (scratch / "recipe.toml").write_bytes(read_regular_file(folder.recipe))
        write_plan(plan, scratch / "plan.json")
        (scratch / "logs").mkdir()
        _record(plan, scratch, found.path if found else None, steps, show, working)
        timeline = timeline_from_json((scratch / "timeline.json").read_bytes())
    start = f"its checkpoint of step {step}" if found else "its initial weights"
    taken = ", with the samples of its last steps" if timeline.first_step <= step else ""
    how = f"Recorded by workers that continued from {start}{taken}, and saved nothing."
    return RecordedSteps(timeline=timeline, plan=plan, how=how)


def _check_possible(plan: Plan, found: FoundCheckpoint | None, working: WorkingFolder) -> None:
    """Raise PlaitError if this machine cannot take the run's steps."""
    if len(plan.machines.hosts) > 1:
        raise PlaitError(
            "this run uses several machines, so it must record its steps itself; run plait timeline on its "
            "first machine while it trains"
        )
    if plan.machines.have_accelerators:
        from plait.accelerator import accelerator_count  # imports torch, which nothing else here needs

        present = accelerator_count()
        if present < plan.world_size:
            raise PlaitError(
                f"this run takes {counted(plan.world_size, 'GPU')} but torch sees {present} here; run plait timeline "
                "on the machine where it was trained"
            )
    open_corpus(working.path / plan.job.corpus)
    if found is not None:
        check_fits(found.manifest, plan)


def _record(
    plan: Plan, scratch: Path, checkpoint: Path | None, steps: int, show: ShowProgress, working: WorkingFolder
) -> None:
    def on_message(message: Message) -> None:
        if message.kind == PROGRESS:
            show(*(message.values[key] for key in ("done", "total", "stage")))

    argument = {
        "folder": str(scratch),
        "checkpoint": str(checkpoint.resolve()) if checkpoint else "",
        "steps": steps,
    }
    job = Job(
        entry=RECORDING_ENTRY,
        argument=json.dumps(argument),
        world_size=plan.world_size,
        threads=plan.placement.threads,
        log_dir=str(scratch / "logs"),
        at_stop="abandon",
        needs=modules_needed(plan),
    )
    show(0, 0, f"starting {counted(plan.world_size, 'worker')}")
    with ForkServer(ENTRIES, working_folder=working.path) as server:
        server.run(job, on_message=on_message).require_finished()
