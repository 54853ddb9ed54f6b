"""`plait train`: from a recipe to a trained model and a receipt; begins a run, or goes on with one."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console as Screen

from plait.commands.hosts.invitation import ONE_HOST, HostsAsked
from plait.commands.hosts.joined_host import refuse_joined
from plait.commands.hosts.leader_workers import hosts_crew
from plait.commands.monitoring.finish import conclude, is_finished
from plait.commands.monitoring.forecast_monitor import Compared, compare, compared_with
from plait.commands.planning.make_plan import Say, Site, make_plan, replan
from plait.commands.planning.run_folder import RunFolder, alone, check_changes, run_folder
from plait.commands.planning.workers import (
    Crew,
    PlacedCrew,
    crew,
    dismiss_others,
    log_folder,
    refuse_torchrun,
    serve_if_asked,
)
from plait.commands.preparing.corpus import prepare_data, told
from plait.commands.probing.survey import survey
from plait.commands.verify import check_once
from plait.data.shards import Corpus
from plait.errors import Interrupted, PlaitError
from plait.launch.values.job import Job, JobResult, Message
from plait.layout import in_words
from plait.planner.calibration.factors import taught_words
from plait.planner.derive.intervals import longer, with_reports
from plait.planner.derive.model_size import budget_of
from plait.planner.plan import Plan, same_hosts
from plait.planner.rebalancing.batch_rebalance import cannot_help
from plait.planner.resolve.resolve import described
from plait.recipe.load import load_recipe
from plait.recipe.schema import RunConfig
from plait.report.console import Console
from plait.report.metrics import EvalReport, StepReport
from plait.report.receipt import read_receipt
from plait.units import counted, format_bytes, format_duration

Check = Literal["new layouts", "never"]
Outcome = Literal["finished", "SIGINT", "SIGTERM"]
Renew = Literal["all", "plan", "nothing"]
"""What is made anew: what several hosts were found to do and the plan, the plan alone, or nothing that was kept."""


def train(
    recipe: Path,
    overrides: Sequence[str] = (),
    *,
    fresh_plan: bool = False,
    check: Check = "new layouts",
    hosts: HostsAsked = ONE_HOST,
    screen: Screen,
) -> Outcome:
    """Run a recipe to its end, from where it stands; raises PlaitError (before) or RunFailed (during) with the mend.

    A run that is finished prints its receipt. A first SIGINT or SIGTERM saves and returns the signal's name. Over
    several hosts it first waits until the others have joined.
    """
    if serve_if_asked():
        return "finished"
    config = load_recipe(recipe, overrides)
    folder = run_folder(config.run.name)
    refuse_joined(folder)
    with alone(folder):
        changed = check_changes(folder.begun_config(), config) if folder.has_begun else []
        if folder.has_begun and "train.budget" not in changed and is_finished(folder):
            screen.print(f"{folder.path} is finished; a larger train.budget continues it")
            screen.print(read_receipt(folder.receipt).table())
            dismiss_others()
            return "finished"
        layout_changed = any(key.startswith("layout.") for key in changed)
        renew: Renew = "all" if fresh_plan else "plan" if layout_changed else "nothing"
        try:
            with _crew(hosts, config, folder, renew, screen) as workers:
                plan = workers.placed(_plan(config, folder, workers, renew=renew, screen=screen))
                if check == "new layouts":
                    check_once(config, plan, workers, screen)
                return _train(config, folder, workers, plan, screen, afresh=renew != "nothing")
        except Interrupted as interrupted:
            return "SIGINT" if str(interrupted) == "SIGINT" else "SIGTERM"


def _crew(
    hosts: HostsAsked, config: RunConfig, folder: RunFolder, renew: Renew, screen: Screen
) -> AbstractContextManager[PlacedCrew]:
    """The workers of this machine, or those of all hosts once they are in, in the places that they had in this run."""
    if hosts.hosts == 1:
        return crew()
    refuse_torchrun()
    prepare_data(config, screen)  # what is wrong with it is told before anybody was asked to join
    begun = folder.begun_plan().hosts if folder.has_begun and renew != "all" else ()
    order = [(share.mark, share.name) for share in begun]
    return hosts_crew(hosts, config=config, folder=folder.path, screen=screen, order=order)


def _plan(config: RunConfig, folder: RunFolder, workers: PlacedCrew, *, renew: Renew, screen: Screen) -> Plan:
    """Prepare the data, look at the machine, and say what will be done."""
    corpus = prepare_data(config, screen)
    screen.print(told(corpus))
    site, fresh = survey(workers, screen.print, "again" if renew == "all" else "kept"), renew != "nothing"
    if folder.has_begun:
        plan = _plan_of_begun(config, folder.begun_plan(), corpus, site, workers, fresh=fresh, say=screen.print)
    else:
        plan = make_plan(config, corpus, site, workers, fresh=fresh, say=screen.print)
    _introduce(plan, site, () if folder.has_begun else plan.reasons, screen)
    return plan


def _train(config: RunConfig, folder: RunFolder, workers: Crew, plan: Plan, screen: Screen, *, afresh: bool) -> Outcome:
    point = folder.resume_point()
    folder.put(config, plan, afresh=afresh)
    if point:
        for sentence in point.skipped:
            screen.print(f"[yellow]passed over[/yellow] {sentence}", highlight=False)
        screen.print(f"resume   from {point.path.name}")
    done = point.manifest.step if point else 0
    bar = Console(plan.steps, done, screen=screen)
    compared = compared_with(plan, done, bar.note)
    session = _Session(folder, bar, compared, plan.devices)
    result, step = _run(plan, folder, workers, done, point.path.name if point else None, session)
    if step < plan.steps:
        screen.print(f"stopped after step {step} of {plan.steps}, saved; the same command goes on from there")
        return result.stopped_by
    conclude(config, folder, plan, done, screen, compared)
    return "finished"


def _plan_of_begun(
    config: RunConfig, plan: Plan, corpus: Corpus, site: Site, workers: PlacedCrew, *, fresh: bool, say: Say
) -> Plan:
    """The plan to go on with: the run's own, with more steps or another split where that was asked or is needed."""
    if corpus.content_hash != plan.corpus_hash:
        raise PlaitError(
            "the text (or its tokenizer) is not what this run was begun with; bring it back, or choose another run.name"
        )
    plan = replace(plan, corpus=str(corpus.folder))
    before = plan.budget
    if budget_of(config) != before:
        plan = longer(config, plan)
        say(f"budget   {before} → {plan.budget}: {plan.steps} steps in all")
    moved = site.machine.fingerprint() != plan.fingerprint
    if moved or fresh or _other_crew(plan, workers):
        plan = replace(plan, hosts=())
        asked = "as asked" if fresh else "the hosts are not those it was made for"
        why = "this machine is not the one it was made for" if moved else asked
        plan = replan(config, plan, corpus, site, workers)
        say(f"plan     a new one for the remaining steps ({why}); {plan.steps} steps in all, as before")
    return with_reports(config, plan)


def _other_crew(plan: Plan, workers: PlacedCrew) -> bool:
    """Whether a plan is for others than these: for another number of workers, or for hosts of another kind or order."""
    if workers.given is None:
        return bool(plan.hosts)  # it was made for several, and here is one
    return workers.given.workers != plan.world_size or not same_hosts(workers.placed(plan).hosts, plan.hosts)


def _introduce(plan: Plan, site: Site, reasons: Sequence[str], screen: Screen) -> None:
    """What was found and what will be done, in a few lines."""
    machine = site.machine
    found = (
        f"{machine.devices} × {machine.name}"
        if machine.device == "cuda"
        else f"{machine.name}, {counted(machine.cores, 'core')}"
    )
    screen.print(f"machine  {found}, {machine.memory_bytes / 2**30:.0f} GiB")
    screen.print(f"model    {described(plan)}")
    crew_words = f"{plan.world_size} worker{'s' if plan.world_size > 1 else ''}"
    split = in_words(plan.layout)
    screen.print(f"layout   {split}: {crew_words} × {plan.threads} threads, {plan.precision}")
    useless = cannot_help(plan)
    for reason in [*reasons, *([useless] if useless else [])]:
        screen.print(f"         · {reason}", highlight=False, markup=False)
    for line in _time_words(plan):
        screen.print(line, highlight=False)


def _time_words(plan: Plan) -> list[str]:
    """What a step takes by the forecast, and by the clock where one was timed."""
    told = []
    if plan.forecast:
        told.append(
            f"forecast {format_duration(plan.forecast.step_s)} a step, give or take {plan.forecast.error:.0%}, and "
            f"{format_bytes(plan.forecast.bytes_per_device)} a device"
        )
        learnt = taught_words(plan.forecast.calibration, plan.forecast.items, plan.forecast.basis)
        told += [f"         · {learnt}"] if learnt else []
    if plan.step_s:
        whole = format_duration(plan.steps * plan.step_s)
        told.append(f"time     about {whole} at {format_duration(plan.step_s)} a step, as timed here")
    return told


class _Session:
    """One start of the workers: shows what they tell, and keeps account of it in the run's folder."""

    def __init__(self, folder: RunFolder, bar: Console, compared: Compared | None, devices: int) -> None:
        self.step = 0
        self._folder, self._bar, self._compared, self._devices = folder, bar, compared, devices
        self._counted_at = time.monotonic()

    def on_message(self, message: Message) -> None:
        values = dict(message.values)
        if self._compared:
            compare(self._compared, message.kind, values)
        if message.kind == "step":
            self._bar.step(StepReport(**_numbers(values)))
        elif message.kind == "evaluation":
            self._bar.evaluation(EvalReport(**_numbers(values)))
        elif message.kind == "note":
            self._bar.note(values["text"])
        elif message.kind == "memory":
            self.count(**{key: tuple(value) for key, value in values.items()})
        elif message.kind == "saved":
            self.step = values["step"]
            self.count()

    def close(self) -> None:
        """No more messages will come."""
        self._bar.close()
        self.count()

    def count(self, **peaks: Sequence[int]) -> None:
        """Add the time since the last count, and memory peaks where they are news."""
        now, so_far = time.monotonic(), self._folder.so_far
        took_s = now - self._counted_at
        times = {"wall_s": so_far.wall_s + took_s, "device_s": so_far.device_s + took_s * self._devices}
        self._folder.note_so_far(replace(so_far, **times, **peaks))
        self._counted_at = now


def _run(
    plan: Plan, folder: RunFolder, workers: Crew, done: int, resume: str | None, session: _Session
) -> tuple[JobResult, int]:
    """Start the workers and wait for their end; returns also the step that is saved."""
    session.step = done
    job = Job(
        entry="plait.trainer.worker:main",
        argument=json.dumps({"folder": str(folder.path.resolve()), "resume": resume, "parts": "here"}),
        world_size=plan.world_size,
        threads=plan.threads,
        log_dir=log_folder(folder.path),
    )
    try:
        return workers.run(job, session.on_message), session.step
    finally:
        session.close()


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Undo what JSON could not say: "nan" and "inf" came as words."""
    return {key: float(value) if isinstance(value, str) else value for key, value in values.items()}
