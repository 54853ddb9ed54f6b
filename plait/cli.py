"""The command line: parse, call, print."""

from __future__ import annotations

import atexit
import io
import os
import stat
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from plait.checked_json import printable
from plait.command_line.arguments import (
    Address,
    HostCount,
    LayoutsToProve,
    MeasuredStep,
    Overrides,
    Port,
    Recipe,
    RecipeIfAny,
    SecretFile,
    ShownSamples,
    Version,
)
from plait.command_line.checking import check_program_command
from plait.command_line.clusters import fetch_command, logs_command, node_command, stop_command, submit_command
from plait.command_line.help_text import GroupedCommands, PlainCommand
from plait.command_line.models import chat_command, evaluate, export_command, sample, screen_on
from plait.command_line.programs import join_command, run_command
from plait.command_line.run_files import (
    compare_command,
    remove_command,
    report_command,
    runs_command,
    timeline_command,
)
from plait.command_line.runs import drill_command, new_command, status_command
from plait.command_line.watch import page_beside, watch_command
from plait.errors import PlaitError
from plait.launch.local.output import OptionalOutput
from plait.launch.local.signals import ignore_stop_signals, interrupting_signals
from plait.process_exit import exit_code_of, exit_with_sentence
from plait.screen.terminal import TerminalScreen

app = typer.Typer(
    cls=GroupedCommands,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
command = partial(app.command, cls=PlainCommand)


@app.callback()
def options(version: Version = False) -> None:
    """Plan, prove and run the training of language models on the machines that you have."""


command(name="new")(new_command)


@command()
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    replan: Annotated[bool, typer.Option("--replan", help="Measure again and make a new plan.")] = False,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Skip the gradient check (it runs once for each new layout).")
    ] = False,
    no_timing: Annotated[
        bool, typer.Option("--no-timing", help="Skip timing: plan from forecasts and earlier measurements.")
    ] = False,
    hosts: HostCount = 1,
    address: Address = None,
    port: Port = 0,
    secret_file: SecretFile = None,
    why: Annotated[bool, typer.Option("--why", help="Also print the reason of each automatic choice.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="At the end, also print the whole receipt.")] = False,
    page: Annotated[bool, typer.Option("--page", help="Also serve a live page about the run.")] = False,
) -> None:
    """Train a model as a recipe says. The same command continues a run that was stopped."""
    from plait.commands.early_start import early_server

    screen = _screen()  # a log's silence counts from here
    with ExitStack() as opened:
        started = opened.enter_context(early_server(recipe, overrides or [], hosts))
        if page:
            opened.enter_context(page_beside(recipe, overrides or []))
        from plait.commands.train import continuing_command, train
        from plait.hosts.joining import HostsRequest

        check = "never" if no_check else "new layouts"
        timing = "none" if no_timing else "bounded"
        requested = HostsRequest(n_hosts=hosts, address=address, port=port, secret_file=secret_file)
        details = [name for name, asked in (("reasons", why), ("receipt", verbose)) if asked]
        shown: Any = {"details": details, "screen": screen, "started": started}
        end = train(recipe, overrides or [], fresh_plan=replan, check=check, hosts=requested, timing=timing, **shown)
    if end.stopped_by != "finished":  # not wrapped, so that it can be copied
        again = printable(continuing_command(recipe, overrides or [], requested, check, timing))
        OptionalOutput(sys.stdout).write(f"next     {again}\n")
    raise typer.Exit(exit_code_of(end.stopped_by))


command(name="join")(join_command)
command(name="check", context_settings={"allow_interspersed_args": False})(check_program_command)


@command()
def plan(
    recipe: RecipeIfAny = None,
    overrides: Overrides = None,
    cluster: Annotated[
        list[str] | None,
        typer.Option(
            "--cluster",
            metavar="MACHINES",
            help='Machines: 8xH100, "2x(8xA100)+400G", "macbook+4090@1G", a cluster.json.',
        ),
    ] = None,
    top: Annotated[
        int, typer.Option("--top", metavar="NUMBER", help="Number of other layouts for --why and --json.", min=0)
    ] = 10,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the result to this file, as JSON.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with figures to this file.")
    ] = None,
    measured: MeasuredStep = None,
    pool: Annotated[
        Path | None,
        typer.Option("--pool", metavar="FILE", help="Choose machines from the pool that this pool.toml describes."),
    ] = None,
    from_: Annotated[
        str | None,
        typer.Option("--from", metavar="MACHINES", help='Choose among machines: "128xA100+384xV100".'),
    ] = None,
    availability: Annotated[
        str | None,
        typer.Option(
            "--availability", metavar="FILE", help='When the pool has which spot machines: a CSV file, or "seed:1".'
        ),
    ] = None,
    prices: Annotated[bool, typer.Option("--prices", help="Print the catalogue's prices, with their sources.")] = False,
    prove: LayoutsToProve = None,
    why: Annotated[
        bool, typer.Option("--why", help="Also print the reasons, other layouts, and what would change the choice.")
    ] = False,
    terms: Annotated[bool, typer.Option("--terms", help="Explain the technical terms.")] = False,
) -> None:
    """Say what a run takes: time, memory, money, and the best layout. Machines of --cluster need not exist."""
    from plait.commands import plan as planning

    if prove and recipe:
        elsewhere = bool(cluster or html or measured or pool or from_)
        _prove(recipe, overrides or [], prove, json, elsewhere=elsewhere)
        return
    if terms:
        _screen().print(planning.terms())
    if prices:
        _screen().print(planning.prices())
    if recipe:
        options: Any = {"json_file": json, "html_file": html, "measured": measured}
        options |= {"pool_file": pool, "pool_text": from_, "availability": availability}
        detail = "reasons" if why else "summary"
        planning.plan(
            recipe, overrides or [], clusters=cluster or [], top=top, detail=detail, **options, screen=_screen()
        )
    elif not terms and not prices:
        raise PlaitError("plait plan needs a recipe; name a .toml file, or write plait plan --terms")


def _prove(recipe: Path, overrides: list[str], count: int, json_file: Path | None, *, elsewhere: bool) -> None:
    from plait.commands.prove import prove

    if elsewhere:
        raise PlaitError(
            "--prove runs layouts on this machine; leave --cluster, --pool, --from, --html and --measured out"
        )
    prove(recipe, overrides, count=count, json_file=json_file, screen=_screen())


@command()
def data(
    recipe: Recipe,
    overrides: Overrides = None,
    show: ShownSamples = None,
) -> None:
    """Turn a recipe's text into tokens on disk, once."""
    from plait.commands.data import prepare_text

    prepare_text(recipe, overrides or [], show=show or 0, screen=_screen())


@command()
def verify(
    recipe: Recipe,
    overrides: Overrides = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the result to this file, as JSON.")
    ] = None,
    here: Annotated[
        bool, typer.Option("--here", help="Use this machine's devices, and the run's own precision and kernels.")
    ] = False,
) -> None:
    """Prove that a layout computes what one plain process computes. Settings name it: layout.tensor=2."""
    from plait.commands.verify import verify

    verdict = verify(recipe, overrides or [], where="here" if here else "anywhere", json_file=json, screen=_screen())
    raise typer.Exit(0 if verdict is None or verdict.ok else 1)


@command()
def probe(
    recipe: RecipeIfAny = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Also write the figures to this file, as JSON.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER", help="Workers that run at the same time; one for each GPU or core if left out.", min=1
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(metavar="NUMBER", help="Threads of each worker.", min=1)] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure again what was measured before.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Only say within a minute whether training can run.")] = False,
    hosts: HostCount = 1,
    address: Address = None,
    port: Port = 0,
    secret_file: SecretFile = None,
) -> None:
    """Measure this machine: arithmetic, memory and links. Also how much communication overlaps with arithmetic."""
    from plait.commands.probe import probe
    from plait.hosts.joining import HostsRequest

    requested = HostsRequest(n_hosts=hosts, address=address, port=port, secret_file=secret_file)
    if check:
        if workers or threads or again or out:
            raise PlaitError("--check uses all workers and keeps no figures; leave the other options out")
        _check_machines(recipe, overrides or [], requested)
    if hosts > 1:
        from plait.commands.probe import probe_hosts

        if recipe is None:
            raise PlaitError("over several hosts a probe measures what one model needs; name its recipe")
        if workers or threads or again:
            raise PlaitError("over several hosts every probe is new and uses all workers; leave the other options out")
        probe_hosts(recipe, overrides or [], hosts=requested, out=out, screen=_screen())
        return
    from plait.recipe.load import load_recipe

    config = load_recipe(recipe, overrides or []) if recipe else None
    fresh = "again" if again else "kept"
    probe(config, workers=workers, threads=threads, fresh=fresh, out=out, screen=_screen())


def _check_machines(recipe: Path | None, overrides: list[str], hosts: Any) -> NoReturn:
    from plait.commands.probe import check_machines
    from plait.recipe.load import load_recipe

    config = load_recipe(recipe, overrides) if recipe else None
    raise typer.Exit(0 if check_machines(config, hosts=hosts, screen=_screen()) == "ready" else 1)


command()(sample)
command(name="eval")(evaluate)
command(name="chat")(chat_command)
command(name="export")(export_command)
command(name="run")(run_command)
command(name="runs")(runs_command)
command(name="status")(status_command)
command(name="compare")(compare_command)
command(name="report")(report_command)
command(name="timeline")(timeline_command)
command(name="remove")(remove_command)
command(name="watch")(watch_command)
command(name="submit")(submit_command)
command(name="logs")(logs_command)
command(name="stop")(stop_command)
command(name="fetch")(fetch_command)
command(name="node")(node_command)
command(name="drill")(drill_command)


def _screen() -> TerminalScreen:
    return screen_on(sys.stdout)


def _print_any_character() -> None:
    """A terminal or a pipe that cannot encode a character gets a question mark in its place, never an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None, or a program's own, where Python is embedded
            stream.reconfigure(errors="replace")


def main() -> None:
    """The `plait` command: one sentence and an exit code for what the user can fix; a traceback only for our bugs."""
    os.umask(os.umask(0) | stat.S_IWOTH)  # what plait makes is never everybody's to change
    atexit.register(ignore_stop_signals)  # of two in a row, the second may come when this process has all but ended
    with interrupting_signals() as command_is_over:  # jobs have their own way with them

        def carry_out() -> int:
            try:
                return app(sys.argv[1:] or ["--help"], prog_name="plait", standalone_mode=False) or 0
            finally:
                command_is_over()

        _print_any_character()
        exit_with_sentence(carry_out)
