"""The commands that use a model: parse, call, print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console

from plait.cli_arguments import RunName, Temperature, TopP
from plait.errors import PlaitError
from plait.launch.local.output import OptionalOutput
from plait.screen.terminal import TerminalScreen


def screen_on(stream: TextIO) -> TerminalScreen:
    """A command's screen on one of its streams."""
    output: Any = OptionalOutput(stream)
    return TerminalScreen(Console(file=output))


def sample(
    run: RunName,
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
    tokens: Annotated[int, typer.Option(help="Number of tokens to add.", min=1)] = 200,
    temperature: Temperature = 0.8,
    top_p: TopP = 0.95,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 1,
) -> None:
    """Let a trained model continue a text."""
    from plait.commands.sample import sample

    output = OptionalOutput(sys.stdout)
    for piece in sample(run, prompt, tokens=tokens, temperature=temperature, top_p=top_p, seed=seed):
        output.write(piece)
        output.flush()
    output.write("\n")


def evaluate(
    run: RunName,
    files: Annotated[
        list[str] | None, typer.Option("--files", help="Text files to measure instead of the held-out text.")
    ] = None,
    sequence: Annotated[int | None, typer.Option(help="Tokens of a window; as in training if left out.", min=2)] = None,
    choices: Annotated[
        Path | None, typer.Option("--choices", help="Multiple-choice questions to ask instead (JSON lines).")
    ] = None,
) -> None:
    """Measure the loss of a run or a model on its held-out text or on other files. Prints one line of JSON."""
    from plait.commands.answering.choices import ask_choices
    from plait.commands.evaluate import evaluate

    screen = screen_on(sys.stderr)
    if choices and files:
        raise PlaitError("--files and --choices are measured one at a time; leave one of them out")
    if choices:
        found = ask_choices(run, choices, sequence=sequence, screen=screen)
    else:
        found = evaluate(run, files or [], sequence=sequence, screen=screen)
    OptionalOutput(sys.stdout).write(f"{found}\n")


def chat(
    run: RunName,
    tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=1)] = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    seed: Annotated[int, typer.Option(help="The same seed gives the same answers.")] = 1,
) -> None:
    """Talk with a model by its chat template. Each line is a message; /quit ends."""
    from plait.commands.answering.chat import AnswerSettings, open_chat

    settings = AnswerSettings(tokens=tokens, temperature=temperature, top_p=top_p, seed=seed)
    conversation, output, is_terminal = open_chat(run, settings), OptionalOutput(sys.stdout), sys.stdin.isatty()
    if is_terminal:
        output.write("chat     each line is a message; /quit ends\n")
    while True:
        output.write("> " if is_terminal else "")
        output.flush()
        line = sys.stdin.readline()
        if not line or line.strip() == "/quit":
            return
        if not line.strip():
            continue
        for piece in conversation.say(line.strip()):
            output.write(piece)
            output.flush()
        output.write("\n")
