"""The command line: parse, call, print."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from plait.errors import Interrupted, PlaitError
from plait.launch.local.output import OptionalOutput
from plait.launch.local.signals import interrupting_signals

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

Recipe = Annotated[Path, typer.Argument(help="A recipe file (.toml).")]
Overrides = Annotated[list[str] | None, typer.Argument(help='Changes, as section.key=value: train.budget="60 steps".')]
Run = Annotated[str, typer.Argument(help="A run: its folder or its name.")]
HostCount = Annotated[int, typer.Option("--hosts", help="Over so many machines, this one included.", min=1)]
Address = Annotated[str | None, typer.Option("--address", help="This machine's address that the other hosts reach.")]
Port = Annotated[int, typer.Option("--port", help="Where they join; any free one else.", min=0, max=65535)]
SecretFile = Annotated[
    Path | None, typer.Option("--secret-file", help="A file, private to you, that holds the hosts' secret.")
]
USAGE_ERROR: Any = typer.BadParameter.__mro__[1]  # click's UsageError, wherever this version of typer keeps its click
EXIT_OF_SIGNAL = {"finished": 0, "SIGHUP": 129, "SIGINT": 130, "SIGTERM": 143}


@app.command()
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    replan: Annotated[bool, typer.Option("--replan", help="Measure again and make a new plan.")] = False,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Do not prove a layout's gradients that is new to this machine.")
    ] = False,
    hosts: HostCount = 1,
    address: Address = None,
    port: Port = 0,
    secret_file: SecretFile = None,
) -> None:
    """Train what a recipe asks for; the same command goes on with a run that was stopped."""
    from plait.commands.hosts.invitation import HostsRequest
    from plait.commands.train import train

    check = "never" if no_check else "new layouts"
    requested = HostsRequest(n_hosts=hosts, address=address, port=port, secret_file=secret_file)
    outcome = train(recipe, overrides or [], fresh_plan=replan, check=check, hosts=requested, screen=_screen())
    raise typer.Exit(EXIT_OF_SIGNAL[outcome])


@app.command()
def join(
    at: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where plait train --hosts waits.")],
    secret_file: SecretFile = None,
) -> None:
    """Lend this machine to a run that another one leads; the secret is asked for, or read from PLAIT_SECRET."""
    from plait.commands.join import join

    raise typer.Exit(EXIT_OF_SIGNAL[join(at, secret_file=secret_file, screen=_screen())])


@app.command()
def plan(
    recipe: Annotated[Path | None, typer.Argument(help="A recipe file (.toml).")] = None,
    overrides: Overrides = None,
    cluster: Annotated[
        list[str] | None,
        typer.Option("--cluster", help='Machines: 8xH100, "2x(8xA100)+400G", "macbook+4090@1G", a cluster.json.'),
    ] = None,
    top: Annotated[int, typer.Option("--top", help="How many other layouts to tell of.", min=0)] = 10,
    json: Annotated[Path | None, typer.Option("--json", help="Also write the result here, as JSON.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a page with pictures here.")] = None,
    measured: Annotated[
        str | None, typer.Option("--measured", help="What a step really takes (412ms); says what can explain it.")
    ] = None,
    prove: Annotated[
        int | None, typer.Option("--prove", help="Run so many of the best layouts here for a few steps each.", min=1)
    ] = None,
    terms: Annotated[bool, typer.Option("--terms", help="Explain the words, for someone new.")] = False,
) -> None:
    """Choose the simplest fast layout for machines that need not be there, and say why."""
    from plait.commands import plan as command

    if prove and recipe:
        _prove(recipe, overrides or [], prove, json, elsewhere=bool(cluster or html or measured))
        return
    if terms:
        _screen().print(command.terms(), markup=False)
    if recipe:
        options = {"json_file": json, "html_file": html, "measured": measured}
        command.plan(recipe, overrides or [], clusters=cluster or [], top=top, **options, screen=_screen())
    elif not terms:
        raise PlaitError("plait plan needs a recipe; name a .toml file, or write plait plan --terms")


def _prove(recipe: Path, overrides: list[str], count: int, json_file: Path | None, *, elsewhere: bool) -> None:
    from plait.commands.prove import prove

    if elsewhere:
        raise PlaitError("--prove runs layouts on this machine; leave --cluster, --html and --measured out")
    prove(recipe, overrides, count=count, json_file=json_file, screen=_screen())


@app.command()
def data(
    recipe: Recipe,
    overrides: Overrides = None,
    balance: Annotated[
        int | None, typer.Option("--balance", help="Also show how a step's documents fall to so many parts.", min=2)
    ] = None,
) -> None:
    """Prepare a recipe's text: tokens on disk, once."""
    from plait.commands.preparing.corpus import corpus_summary, prepare_data
    from plait.recipe.load import load_recipe

    config = load_recipe(recipe, overrides or [])
    corpus = prepare_data(config, _screen())
    _screen().print(corpus_summary(corpus))
    _screen().print(f"ready    {corpus.folder}", soft_wrap=True)
    if balance:
        from plait.commands.preparing.balance_table import balance_report

        _screen().print(balance_report(config, corpus, balance).table(), markup=False)


@app.command()
def verify(
    recipe: Recipe,
    overrides: Overrides = None,
    json: Annotated[Path | None, typer.Option("--json", help="Also write the result here, as JSON.")] = None,
    here: Annotated[
        bool, typer.Option("--here", help="On this machine's devices, in the run's own precision and kernels.")
    ] = False,
) -> None:
    """Prove that a layout (layout.tensor=2 …) computes what one plain process computes."""
    from plait.commands.verify import verify

    proven = verify(recipe, overrides or [], where="here" if here else "anywhere", json_file=json, screen=_screen())
    raise typer.Exit(0 if proven else 1)


@app.command()
def probe(
    recipe: Annotated[Path | None, typer.Argument(help="A recipe file (.toml): measure what its model needs.")] = None,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option("--out", help="Also write a cluster.json with the figures here.")] = None,
    workers: Annotated[
        int | None, typer.Option(help="Workers side by side; one a GPU or core if left out.", min=1)
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of each worker.", min=1)] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure anew, also what was measured before.")] = False,
    hosts: HostCount = 1,
    address: Address = None,
    port: Port = 0,
    secret_file: SecretFile = None,
) -> None:
    """Measure this machine: arithmetic, memory, links, and how much communication hides behind arithmetic."""
    from plait.commands.hosts.invitation import HostsRequest
    from plait.commands.probe import probe

    requested = HostsRequest(n_hosts=hosts, address=address, port=port, secret_file=secret_file)
    if hosts > 1:
        from plait.commands.probe import probe_hosts

        if recipe is None:
            raise PlaitError("over several hosts a probe measures what one model needs; name its recipe")
        if workers or threads or again:
            raise PlaitError("over several hosts every probe is new and uses all workers; leave the other options out")
        probe_hosts(recipe, overrides or [], hosts=requested, out=out, screen=_screen())
        return
    fresh = "again" if again else "kept"
    probe(recipe, overrides or [], workers=workers, threads=threads, fresh=fresh, out=out, screen=_screen())


@app.command()
def sample(
    run: Run,
    prompt: Annotated[str, typer.Option(help="The text to go on from.")] = "",
    tokens: Annotated[int, typer.Option(help="How many tokens to add.", min=1)] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.", min=0)] = 0.8,
    top_p: Annotated[float, typer.Option(help="Choose among the likeliest tokens of this much probability.")] = 0.95,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 1,
) -> None:
    """Let a trained run go on with a text."""
    from plait.commands.sample import sample

    output = OptionalOutput(sys.stdout)
    for piece in sample(run, prompt, tokens=tokens, temperature=temperature, top_p=top_p, seed=seed):
        output.write(piece)
        output.flush()
    output.write("\n")


@app.command(name="eval")
def evaluate(
    run: Run,
    files: Annotated[
        list[str] | None, typer.Option("--files", help="Text to measure instead of the held-out part.")
    ] = None,
) -> None:
    """Measure a run's loss on its held-out text, or on other files; prints one line of JSON."""
    from plait.commands.evaluate import evaluate

    OptionalOutput(sys.stdout).write(evaluate(run, files or []) + "\n")


def _screen() -> Console:
    output: Any = OptionalOutput(sys.stdout)
    return Console(file=output, highlight=False, soft_wrap=True)


def main() -> None:
    """The `plait` command: one sentence and an exit code for what the user can mend; a traceback only for our bugs."""
    with interrupting_signals():  # jobs have their own way with them
        _run_command()


def _run_command() -> None:
    errors = OptionalOutput(sys.stderr)
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], standalone_mode=False) or 0)
    except PlaitError as error:
        errors.write(f"plait: {error}\n")
        sys.exit(error.exit_code)
    except USAGE_ERROR as error:
        errors.write(f"plait: {error.format_message().rstrip('.')}; plait --help tells what there is\n")
        sys.exit(PlaitError.exit_code)
    except Interrupted as stopped:
        errors.write(f"plait: stopped by {stopped.signal}\n")
        sys.exit(EXIT_OF_SIGNAL[stopped.signal])
    except (KeyboardInterrupt, typer.Abort):  # click turns the first into the second
        sys.exit(EXIT_OF_SIGNAL["SIGINT"])
    except Exception:
        traceback.print_exc()
        errors.write("plait: this is a bug in plait, not in what you asked; please report it with the lines above\n")
        sys.exit(1)
