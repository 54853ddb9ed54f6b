"""plait from Python: the functions that the command line calls, with values in and values out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from plait.arguments import check_arguments, texts_of
from plait.commands.python_call import ProgressDisplay, as_command, known_keywords, screen_for
from plait.errors import Interrupted, PlaitError
from plait.working_folder import Place, named_folder

if TYPE_CHECKING:
    from plait.checking.findings import CheckReport
    from plait.commands.planning.plan_report import PlannedRun
    from plait.machines.cluster import Cluster
    from plait.planner.derive.model_size import CorpusFacts
    from plait.probing.measuring_time import Timing
    from plait.proof import Verdict
    from plait.recipe.load import RecipeOverrides
    from plait.recipe.schema import RunConfig
    from plait.report.receipt import Receipt

    AnyRecipe = str | Path | Mapping[str, Any] | RunConfig
    """A recipe's file, its sections as a dict, or what `load_recipe` returned."""


@known_keywords
def load_recipe(recipe: AnyRecipe, overrides: RecipeOverrides = ()) -> RunConfig:
    """Read a recipe, with overrides such as {"train.budget": "60 steps"} or ["train.budget=60 steps"].

    Without `run.name` a run has the name of its recipe's file; that of a dict has the name of its first text. Raises
    PlaitError in one sentence.
    """
    from plait.recipe.load import load_recipe as load
    from plait.recipe.schema import RunConfig as Loaded

    if not isinstance(recipe, str | Path | Mapping | Loaded):
        raise PlaitError(f"recipe = {recipe!r:.80} is not usable; give a path, a dict, or what load_recipe returned")
    if not isinstance(overrides, Mapping | list | tuple | str):
        raise PlaitError(
            f'overrides = {overrides!r:.80} is not usable; give a dict such as {{"train.budget": "1 hour"}}'
        )
    settings = overrides if isinstance(overrides, Mapping) else texts_of("overrides", overrides)
    return load(Path(recipe) if isinstance(recipe, str) else recipe, settings)


@known_keywords
def plan(
    recipe: AnyRecipe,
    overrides: RecipeOverrides = (),
    *,
    cluster: str | Path | Cluster | None = None,
    pool: str | Path | None = None,
    availability: str | Path | None = None,
    folder: Place = None,
) -> PlannedRun:
    """Choose a layout for a cluster ("8xH100", a cluster.json, what `probe` returned), or for this machine.

    With `pool` ("256xA100+512xT4", or a pool.toml) it chooses the machines as well, for the objective and within the
    bounds of the recipe's [plan]; `availability` (a CSV file, or "seed:1") is that of spot machines over time. Raises
    PlaitError where there is no layout, or no machine that meets the bounds.
    """
    from plait.commands.plan import OTHERS_LISTED, plan_report
    from plait.commands.planning.plan_report import planned_run
    from plait.machines.cluster import Cluster as Described
    from plait.machines.cluster import read_cluster

    config, working = load_recipe(recipe, overrides), named_folder(folder)
    if isinstance(cluster, str | Path):
        cluster = read_cluster(cluster)
    if not isinstance(cluster, Described | None):
        raise PlaitError(f'cluster = {cluster!r:.80} is not usable; give a text such as "8xH100", or a Cluster')
    check_arguments(pool=pool, availability=availability)
    if pool is not None:
        if cluster is not None:
            raise PlaitError("pool= and cluster= both name machines; leave one of them out")
        from plait.commands.planning.pool_plan import named_pool, planned_pool_run, pool_report

        with as_command():
            there = None if availability is None else str(availability)
            machines = named_pool(pool)
            return planned_pool_run(
                pool_report(config, machines, top=OTHERS_LISTED, availability=there, working=working)
            )
    if availability is not None:
        raise PlaitError("availability= is about the machines of a pool; name one with pool=")
    with as_command():
        return planned_run(plan_report(config, cluster, top=OTHERS_LISTED, working=working))


@known_keywords
def train(
    recipe: AnyRecipe,
    overrides: RecipeOverrides = (),
    *,
    hosts: int = 1,
    address: str | None = None,
    port: int = 0,
    secret_file: str | Path | None = None,
    timing: Timing = "bounded",
    progress: ProgressDisplay = "auto",
    folder: Place = None,
) -> Receipt:
    """Train a recipe, or continue its run; blocks to the end. A finished run's receipt comes at once. Nothing is
    timed first with timing="none".

    Raises PlaitError before training starts, RunFailed after, and Interrupted where a signal (a notebook's stop button)
    came and the state is saved. With several hosts it first waits until the others have joined. Call it from the main
    thread.
    """
    from plait.commands.train import train as run
    from plait.hosts.joining import HostsRequest

    check_arguments(hosts=hosts, address=address, port=port, secret_file=secret_file, timing=timing, progress=progress)
    config, working = load_recipe(recipe, overrides), named_folder(folder)
    secret = Path(secret_file) if secret_file else None
    requested = HostsRequest(n_hosts=hosts, address=address, port=port, secret_file=secret)
    with as_command():
        end = run(config, hosts=requested, timing=timing, screen=screen_for(progress), working=working)
        if end.stopped_by != "finished":
            raise Interrupted(end.stopped_by, end.sentence)
    assert end.receipt is not None, "only torchrun's other ranks have none"
    return end.receipt


@known_keywords
def join(
    at: str, *, secret_file: str | Path | None = None, progress: ProgressDisplay = "auto", folder: Place = None
) -> None:
    """Lend this host to the run that waits at HOST:PORT, until it is finished; main thread only. Raises Interrupted
    where the run was stopped, RunFailed where it failed."""
    from plait.commands.join import join as lend

    check_arguments(at=at, secret_file=secret_file, progress=progress)
    secret, working = Path(secret_file) if secret_file else None, named_folder(folder)
    with as_command():
        ended_by = lend(at, secret_file=secret, screen=screen_for(progress), working=working)
    if ended_by != "finished":
        raise Interrupted(ended_by)


@known_keywords
def verify(
    recipe: AnyRecipe,
    overrides: RecipeOverrides = (),
    *,
    where: Literal["anywhere", "here"] = "anywhere",
    folder: Place = None,
) -> Verdict:
    """Prove that a recipe's layout computes what one plain process computes: "anywhere" in float64 on the processor,
    "here" on this machine's devices.

    Raises PlaitError for an impossible layout; gradients that differ are a Verdict that is not `ok`.
    """
    from plait.commands.verify import verify as prove

    check_arguments(where=where)
    config, working = load_recipe(recipe, overrides), named_folder(folder)
    with as_command():
        verdict = prove(config, where=where, screen=screen_for("off"), working=working)
    assert verdict is not None, "only torchrun's other ranks have none"
    return verdict


@known_keywords
def probe(
    recipe: AnyRecipe | None = None,
    overrides: RecipeOverrides = (),
    *,
    workers: int | None = None,
    threads: int | None = None,
    again: bool = False,
    folder: Place = None,
) -> Cluster:
    """Measure what a recipe's model, or a typical one, needs of this machine; `again` also what was measured before.
    Raises RunFailed with the name of a dead device or link, PlaitError for what cannot be measured."""
    from plait.commands.probe import probe as measure

    check_arguments(workers=workers, threads=threads, again=again)
    config, working = load_recipe(recipe, overrides) if recipe is not None else None, named_folder(folder)
    options: dict[str, Any] = {"workers": workers, "threads": threads, "fresh": "again" if again else "kept"}
    with as_command():
        cluster = measure(config, **options, out=None, screen=screen_for("off"), working=working)
    assert cluster is not None, "only torchrun's other ranks have none"
    return cluster


@known_keywords
def prepare_data(
    recipe: AnyRecipe, overrides: RecipeOverrides = (), *, progress: ProgressDisplay = "auto", folder: Place = None
) -> CorpusFacts:
    """Turn a recipe's text into tokens on disk, once; returns how many, and where they are."""
    from plait.commands.preparing.corpus import corpus_facts, prepared_corpus

    check_arguments(progress=progress)
    config, working = load_recipe(recipe, overrides), named_folder(folder)
    with as_command():
        return corpus_facts(prepared_corpus(config, working, screen_for(progress)))


@known_keywords
def check(
    command: Sequence[str],
    *,
    workers: int | None = None,
    steps: int = 6,
    silent_s: float = 60,
    limit_s: float = 600,
    resume: Sequence[str] | None = None,
    progress: ProgressDisplay = "off",
) -> CheckReport:
    """Run a distributed training program, such as ["torchrun", "train.py"], in local processes, and compare its
    gradients and updates with one process.

    With `resume`, stop it midway, start it again with these arguments appended ([] for none), and compare it with a run
    without a stop instead. The report's `ok` says whether it is proven; `str(report)` is what `plait check` prints.
    Raises PlaitError for a command that starts no Python program; a program that fails or hangs is a report whose
    outcome is "cannot judge".
    """
    from plait.commands.check import check as prove
    from plait.commands.check_resume import check_resume

    check_arguments(workers=workers, steps=steps, silent_s=silent_s, limit_s=limit_s, progress=progress)
    if isinstance(command, str) or not all(isinstance(word, str) for word in command):
        raise PlaitError(f'command = {command!r:.80} is not usable; give a list such as ["torchrun", "train.py"]')
    if isinstance(resume, str) or not all(isinstance(word, str) for word in resume or ()):
        raise PlaitError(
            f'resume = {resume!r:.80} is not usable; give a list such as ["--resume_from", "last.pt"], or []'
        )
    with as_command():
        if resume is not None:
            return check_resume(
                command, resume, workers=workers, steps=steps, silent_s=silent_s, limit_s=limit_s,
                screen=screen_for(progress),
            )  # fmt: skip
        return prove(
            command, workers=workers, steps=steps, silent_s=silent_s, limit_s=limit_s, screen=screen_for(progress)
        )


@known_keywords
def run(
    function: Callable[[], Any],
    *,
    workers: int | None = None,
    progress: ProgressDisplay = "lines",
    folder: Place = None,
) -> None:
    """Run a function without arguments on `workers` fresh workers of this machine; blocks until all have returned.

    Its source is written to a file, which each worker runs: it sees what it imports and defines itself, and nothing of
    the notebook; what it returns is dropped. Raises PlaitError for a closure, ProgramFailed where it raises.
    """
    from plait.commands.programs.function_source import function_program
    from plait.commands.programs.program_file import ProgramFile
    from plait.commands.programs.run_program import run_program

    check_arguments(workers=workers, progress=progress)
    working = named_folder(folder)
    text = function_program(function)
    with TemporaryDirectory(prefix="plait-function-") as name, as_command():
        path = Path(name) / f"{function.__name__}.py"
        path.write_text(text, encoding="utf-8")
        program = ProgramFile(path=path)
        ended_by = run_program(program, workers=workers, screen=screen_for(progress), working=working)
    if ended_by != "finished":
        raise Interrupted(ended_by)
