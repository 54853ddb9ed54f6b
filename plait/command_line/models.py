"""The commands that use a model: parse, call, print."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console

from plait.checked_json import printable
from plait.command_line.arguments import MoreTexts, OtherTexts, Questions, RunName, Temperature, TopP, WindowTokens
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
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.", min=0, max=2**63 - 1)] = 1,
) -> None:
    """Let a trained model continue a text."""
    from plait.commands.sample import sample

    output = OptionalOutput(sys.stdout)
    _write_pieces(output, sample(run, prompt, tokens=tokens, temperature=temperature, top_p=top_p, seed=seed))


def evaluate(
    run: RunName,
    files: OtherTexts = None,
    more: MoreTexts = None,
    sequence: WindowTokens = None,
    choices: Questions = None,
) -> None:
    """Measure the loss of a run or a model on text. Prints one line of JSON."""
    from plait.commands.answering.choices import ask_choices
    from plait.commands.evaluate import evaluate

    screen, texts = screen_on(sys.stderr), [*(files or []), *(more or [])]
    if more and not files:
        raise PlaitError(f"{shlex.quote(more[0])} comes after the run; name text files with --files")
    if choices and texts:
        raise PlaitError("--files and --choices are measured one at a time; leave one of them out")
    if choices:
        found = ask_choices(run, choices, sequence=sequence, screen=screen)
    else:
        found = evaluate(run, texts, sequence=sequence, screen=screen)
    OptionalOutput(sys.stdout).write(f"{found}\n")


def export_command(
    run: RunName,
    to: Annotated[Path, typer.Option(help="The folder to make.")],
    dtype: Annotated[str, typer.Option(help="float32 keeps every bit; or bfloat16, float16.")] = "float32",
) -> None:
    """Write a run's model as a folder that transformers and others load."""
    from plait.commands.export import write_export

    write_export(run, to, dtype=dtype, screen=screen_on(sys.stdout))


def chat_command(
    run: RunName,
    tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=1)] = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    seed: Annotated[int, typer.Option(help="The same seed gives the same answers.", min=0, max=2**63 - 1)] = 1,
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
        _write_pieces(output, conversation.say(line.strip()))


def _write_pieces(output: OptionalOutput, pieces: Iterable[str]) -> None:
    """A model's words as they come; on a terminal without signs that it would obey, which a model may have learned."""
    is_terminal = output.isatty()
    for piece in pieces:
        output.write(printable(piece) if is_terminal else piece)
        output.flush()
    output.write("\n")
