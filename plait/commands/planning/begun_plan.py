"""The plan with which a begun run continues, also with a raised budget or on other machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from plait.checked_json import one_line
from plait.commands.planning.make_plan import replan
from plait.data.index import SourceEntry, read_index
from plait.data.shards import Corpus
from plait.errors import PlaitError
from plait.machines.requested_workers import PeakNeed
from plait.planner.derive.intervals import with_evaluations_left, with_new_intervals, with_raised_budget
from plait.planner.derive.model_size import budget_of
from plait.planner.memory.state_copies import with_copies
from plait.planner.plan import Plan, same_hosts
from plait.planner.resolve.named import constraints_of
from plait.probing.measuring_time import Timing
from plait.probing.processor_arithmetic import RatesFreshness
from plait.probing.survey import MachineSurvey
from plait.recipe.schema import RunConfig
from plait.screen.screen import Log, ShowProgress, ignore_progress
from plait.workers import HostWorkers


def resumed_plan(
    config: RunConfig,
    plan: Plan,
    corpus: Corpus,
    survey: Callable[[PeakNeed], MachineSurvey],
    workers: HostWorkers,
    *,
    evaluated: Sequence[int] = (),
    fresh: bool,
    log: Log,
    show: ShowProgress = ignore_progress,
    timing: Timing = "bounded",
) -> Plan:
    """The plan with which a begun run continues: its own, with a raised budget or another layout where that was
    requested or is necessary; only then is `survey` asked for peaks that are
    measured. `evaluated` are the steps after which the held-out loss was measured so far."""
    refuse_other_text(corpus, plan)
    plan = replace(plan, job=replace(plan.job, corpus=str(corpus.folder)))
    before = plan.job.budget
    if budget_of(config) != before:
        plan = with_evaluations_left(config, with_raised_budget(config, plan), evaluated)
        log(f"budget   {before} → {plan.job.budget}: {plan.job.steps} steps in all")
    moved = survey("as known").machine.fingerprint() != plan.machines.fingerprint
    if moved or fresh or _has_other_workers(plan, workers):
        requested = "as asked" if fresh else "the hosts are not those it was made for"
        why = "this machine is not the one it was made for" if moved else requested
        rates: RatesFreshness = "again" if fresh else "kept"
        plan = replan(config, plan, corpus, survey("measured"), workers, log, show, timing, rates)
        log(f"plan     a new one for the remaining steps ({why}); {plan.job.steps} steps in all, as before")
    return with_copies(config.recover, with_new_intervals(config, plan), max(1, len(plan.machines.hosts)))[0]


def refuse_lowered_budget(config: RunConfig, plan: Plan) -> None:
    """Raise PlaitError where a begun run's budget would become smaller: known before text and machine are looked at."""
    if budget_of(config) != plan.job.budget:
        with_raised_budget(config, plan)


def refuse_impossible_layout(config: RunConfig, plan: Plan) -> None:
    """Raise PlaitError where a begun run's model and batch cannot be split as the recipe now names."""
    constraints_of(config, plan.job.shape, plan.job.batch_sequences)


def refuse_other_text(corpus: Corpus, plan: Plan) -> None:
    """Raise PlaitError where the text, or its tokenizer, is not that of the run's plan; `data.files` may have moved."""
    if corpus.content_hash == plan.job.corpus_hash:
        return
    try:
        begun = read_index(Path(plan.job.corpus))
    except PlaitError:  # what was prepared for the run is not here any more
        begun = None
    changed = _changed_files(begun.sources, corpus.sources) if begun else ""
    what = f"the text is not what this run was begun with: {changed}" if changed else _OTHER_TEXT
    raise PlaitError(f"{what}; restore the files as they were, or choose another run.name")


_OTHER_TEXT = "the text (or its tokenizer) is not what this run was begun with"
_NAMED_FILES = 4


def _changed_files(before: Sequence[SourceEntry], after: Sequence[SourceEntry]) -> str:
    """Which files are new, gone or different, in words; empty where all are the same, and where an index of an earlier
    version does not say. Names have no folders, so several files may have the same one."""
    old, new = _hashes_by_name(before), _hashes_by_name(after)
    if not old or not new:
        return ""
    kinds = (
        ("new", [name for name, hashes in new.items() if len(hashes) > len(old.get(name, []))]),
        ("gone", [name for name, hashes in old.items() if len(hashes) > len(new.get(name, []))]),
        (
            "different",
            [
                name
                for name, hashes in new.items()
                if len(hashes) == len(old.get(name, [])) and sorted(hashes) != sorted(old[name])
            ],
        ),
    )
    return ", ".join(f"{_named(names)} {'is' if len(names) == 1 else 'are'} {what}" for what, names in kinds if names)


def _hashes_by_name(sources: Sequence[SourceEntry]) -> dict[str, list[str]]:
    found = dict[str, list[str]]()
    for source in sources:
        for file in source.files:
            found.setdefault(file.name, []).append(file.sha256)
    return found


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(one_line(name) for name in names[:_NAMED_FILES])
    return f"{shown} and {len(names) - _NAMED_FILES} more" if len(names) > _NAMED_FILES else shown


def _has_other_workers(plan: Plan, workers: HostWorkers) -> bool:
    """Whether a plan was made for another number of workers, or for hosts of another kind or order."""
    if workers.fixed_workers is None:
        return len(plan.machines.hosts) > 1  # it was made for several, and here is one
    hosts = workers.with_hosts(plan).machines.hosts  # from now on without those that the plan leaves out
    return workers.fixed_workers.workers != plan.world_size or not same_hosts(hosts, plan.machines.hosts)
