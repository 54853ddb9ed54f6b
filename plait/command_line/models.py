"""The commands that use a model: parse, call, print."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console

from plait.checked_json import printable
from plait.command_line.arguments import (
    AdapterName,
    AdapterNames,
    HeldOutRun,
    MoreTexts,
    OtherTexts,
    Questions,
    RunName,
    Temperature,
    TextField,
    TopP,
    WindowTokens,
)
from plait.errors import PlaitError
from plait.launch.local.output import OptionalOutput
from plait.screen.terminal import TerminalScreen


def screen_on(stream: TextIO) -> TerminalScreen:
    """A command's screen on one of its streams."""
    output: Any = OptionalOutput(stream)
    return TerminalScreen(Console(file=output))


def sample(
    run: RunName,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="Text to continue.")] = "",
    tokens: Annotated[int, typer.Option(metavar="NUMBER", help="Number of tokens to add.", min=1)] = 200,
    temperature: Temperature = 0.8,
    top_p: TopP = 0.95,
    seed: Annotated[
        int, typer.Option(metavar="NUMBER", help="The same seed gives the same text.", min=0, max=2**63 - 1)
    ] = 1,
    adapter: AdapterNames = None,
) -> None:
    """Let a trained model continue a text."""
    how = {"tokens": tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    names, output = adapter or [], OptionalOutput(sys.stdout)
    with _moving(_loading(run)):
        from plait.commands.answering.pieces import write_pieces
        from plait.commands.sample import sample, sample_each

        if len(names) > 1:
            others = sample_each(run, names, prompt, **how)
            texts = chain([next(others)], others)
        else:
            texts = [("", sample(run, prompt, **how, adapter=names[0] if names else None))]
    for name, text in texts:
        output.write(f"adapter  {name}\n" if name else "")
        write_pieces(output, text)


def evaluate(
    run: RunName,
    files: OtherTexts = None,
    more: MoreTexts = None,
    sequence: WindowTokens = None,
    choices: Questions = None,
    heldout_of: HeldOutRun = None,
    adapter: AdapterName = None,
    field: TextField = None,
) -> None:
    """Measure the loss of a run or a model on text. Prints one line of JSON, and a sentence to stderr."""
    from plait.commands.answering.choices import ask_choices
    from plait.commands.evaluate import evaluate, texts_of_field

    screen, texts = screen_on(sys.stderr), [*(files or []), *(more or [])]
    if more and not files:
        raise PlaitError(f"{shlex.quote(more[0])} comes after the run; name text files with --files")
    if choices and (texts or heldout_of):
        other = "--files" if texts else "--heldout-of"
        raise PlaitError(f"{other} and --choices are measured one at a time; leave one of them out")
    if field and not texts:
        raise PlaitError("--field is the column of the files; name them with --files")
    if choices:
        found = ask_choices(run, choices, sequence=sequence, adapter=adapter, screen=screen)
    else:
        how = {"heldout_of": heldout_of, "sequence": sequence, "adapter": adapter}
        found = evaluate(run, texts_of_field(texts, field), **how, screen=screen)
    OptionalOutput(sys.stdout).write(f"{found}\n")
    screen.print(f"eval     {found.in_words()}")


def export_command(
    run: RunName,
    to: Annotated[
        Path,
        typer.Option(metavar="FOLDER|NAME.gguf", help="A new folder; NAME.gguf writes one file for llama.cpp instead."),
    ],
    dtype: Annotated[
        str, typer.Option(metavar="TYPE", help="float32 keeps every bit; or bfloat16, float16; of .gguf also q8_0.")
    ] = "float32",
    adapter: Annotated[bool, typer.Option("--adapter", help="Only the adapter, as PEFT's files.")] = False,
    merged: Annotated[
        bool, typer.Option("--merged", help="The whole model, the adapter added to its weights.")
    ] = False,
) -> None:
    """Write a run's model as a folder for transformers, or a .gguf file."""
    from plait.commands.export import write_export

    if adapter and merged:
        raise PlaitError("--adapter and --merged are two folders; export twice, each time with one of them")
    what = "adapter" if adapter else "merged" if merged else "model"
    write_export(run, to, dtype=dtype, what=what, screen=screen_on(sys.stdout))


def chat_command(
    run: RunName,
    tokens: Annotated[int, typer.Option(metavar="NUMBER", help="Most tokens of an answer.", min=1)] = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    seed: Annotated[
        int, typer.Option(metavar="NUMBER", help="The same seed gives the same answers.", min=0, max=2**63 - 1)
    ] = 1,
    adapter: AdapterNames = None,
) -> None:
    """Talk with a model by its chat template. Each line is a message; /adapter NAME takes another one; /quit ends."""
    with _moving(_loading(run)):
        from plait.commands.answering.chat import AnswerSettings, open_chat, talk

        settings = AnswerSettings(tokens=tokens, temperature=temperature, top_p=top_p, seed=seed)
        conversation = open_chat(run, settings, adapters=adapter or [])
    person = "terminal" if sys.stdin.isatty() else "pipe"
    talk(conversation, sys.stdin, OptionalOutput(sys.stdout), person, waiting=lambda: _moving("reading the message"))


def _loading(run: str) -> str:
    return f"loading {printable(Path(run).name)}"


@contextmanager
def _moving(text: str) -> Iterator[None]:
    """While the block lasts, a moving line on stderr, as the model's words alone go to stdout; in a log a line now and
    then."""
    with screen_on(sys.stderr).progress() as show:
        show(0, 0, text)
        yield
