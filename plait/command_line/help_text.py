"""The text of `--help`: commands in groups, and for each command its arguments and options in plain words, with
examples.

Typer's own help names Python's types (`<list[str]>`, `<int range>`, `x>=1`). Its two command classes are made to be
extended like this (`cls=`). Formatter and parameters are click's, which versions of typer keep in different places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

COMMAND_GROUPS: Mapping[str, Sequence[str]] = {
    "Train a model": ("new", "data", "plan", "train"),
    "Look at runs": ("runs", "watch", "status", "compare", "report", "timeline", "remove"),
    "Use a model": ("sample", "eval", "chat", "export"),
    "Check layouts, machines and recovery": ("verify", "probe", "drill"),
    "Own programs, several machines": ("run", "join", "check"),
    "Clusters": ("submit", "logs", "stop", "fetch", "node"),
}
"""The commands in the order in which a newcomer meets them."""
COMMAND_EXAMPLES: Mapping[str, tuple[str, str]] = {
    "new": ("plait new first", "plait new first --text my-text.txt more.jsonl"),
    "data": ("plait data first.toml", "plait data my-chats.toml --show 2"),
    "plan": ("plait plan first.toml --why", 'plait plan first.toml --cluster 8xH100 --cluster "2x(8xA100)+400G"'),
    "train": ("plait train first.toml", 'plait train first.toml train.budget="1 hour" model.size=10M'),
    "runs": ("plait runs", "plait runs --json"),
    "status": ("plait status first", "plait status first --json"),
    "compare": ("plait compare first second", "plait compare first second --json"),
    "report": ("plait report first --html first.html", "plait report first second --md runs.md"),
    "timeline": ("plait timeline first", "plait timeline first --steps 1 --html step.html --trace step.json"),
    "remove": ("plait remove first", "plait remove first --yes"),
    "watch": ("plait watch", "plait watch first second --no-browser"),
    "sample": ('plait sample first --prompt "KING HENRY."', "plait sample first --tokens 50 --temperature 0"),
    "eval": ("plait eval first", "plait eval first --files my-text.txt"),
    "chat": ("plait chat my-chats", "plait chat my-chats --temperature 0"),
    "export": ("plait export first --to exported", "plait export my-chats --to adapter --adapter"),
    "verify": ("plait verify first.toml layout.tensor=2", "plait verify first.toml layout.pipeline=2 layout.shard=2"),
    "probe": ("plait probe --check", "plait probe first.toml --out cluster.json"),
    "drill": ("plait drill first.toml --kill 1@20", 'plait drill first.toml train.budget="60 steps" --random 5'),
    "run": ("plait run program.py", "plait run program.py --workers 2 -- --epochs 3"),
    "join": ("plait join 10.0.0.1:24717", "plait join 10.0.0.1:24717 --secret-file secret.txt"),
    "check": (
        "plait check -- torchrun --nproc-per-node 2 train.py",
        "plait check qlora.yaml --cluster 1x4090 samples=2000",
    ),
    "node": (
        "plait node --nodes 2 --rank 0 --leader ann --secret-file s -- first.toml",
        "plait node --nodes 2 --rank 1 --leader ann --secret-file s -- first.toml",
    ),
    "submit": ("plait submit first.toml --on slurm --dry-run", "plait submit first.toml --on ssh --machines ada,bob"),
    "logs": ("plait logs first", "plait logs first | tail -n 20"),
    "stop": ("plait stop first", "plait stop first && plait fetch first"),
    "fetch": ("plait fetch first", "plait fetch first && plait sample first"),
}
"""Two example lines for each command."""


class PlainCommand(TyperCommand):
    """A command whose help is in plain words."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", *(_usage(one) for one in _shown(self.params, "argument"))]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_parameters(self.get_params(ctx), formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if examples := COMMAND_EXAMPLES.get(self.name or ""):
            formatter.write(f"\nExamples:\n  {examples[0]}\n  {examples[1]}\n")


class GroupedCommands(TyperGroup):
    """All commands, listed in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.commands))
        for title, names in COMMAND_GROUPS.items():
            with formatter.section(title):
                for name in names:
                    formatter.write(f"  {name:{width}}  {self.commands[name].get_short_help_str(78 - width)}\n")
        _write_parameters(self.get_params(ctx), formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        formatter.write("\nplait COMMAND --help shows a command's options, and two examples.\n")


def _shown(parameters: Sequence[Any], kind: str) -> list[Any]:
    return [one for one in parameters if one.param_type_name == kind and not getattr(one, "hidden", False)]


def _write_parameters(parameters: Sequence[Any], formatter: Any) -> None:
    arguments, options = _shown(parameters, "argument"), _shown(parameters, "option")
    for title, rows in (
        ("Arguments", [(_value_name(one), one.help or "") for one in arguments]),
        ("Options", [(_option_names(one), _option_help(one)) for one in options]),
    ):
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)


def _value_name(parameter: Any) -> str:
    return parameter.metavar or parameter.name.upper()


def _usage(argument: Any) -> str:
    name = _value_name(argument)
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _option_names(option: Any) -> str:
    names = ", ".join(sorted(option.opts, key=len))
    return names if option.is_flag or option.count else f"{names} {_value_name(option)}"


def _option_help(option: Any) -> str:
    """The help, and the default."""
    words = option.help or ""
    if option.required:
        return f"{words}  [required]"
    if option.is_flag or option.default in (None, "", ()) or not option.show_default:
        return words
    return f"{words}  [default: {option.default}]"
