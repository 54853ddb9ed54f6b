"""A command line, or the shell script that builds one: its program, its launcher's options and its own. The script's
variables, arrays and defaults are filled in; conditions are not evaluated."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from plait.errors import PlaitError
from plait.foreign_configs.syntax import Placeholder

_ASSIGNED = re.compile(r"^\s*(?:export\s+|local\s+|readonly\s+|declare\s+(?:-\w+\s+)*)?(\w+)(\+?)=(.*)$", re.DOTALL)
_OPENS = re.compile(r"^\s*(if|case|for|while|until)\b")
_CLOSES = re.compile(r"^\s*(fi|esac|done)\b")
_VARIABLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\}|\$(\w+)")
_SUM = re.compile(r"\$\(\(\s*([\w$+*/ {}()-]+?)\s*\)\)")
_LAUNCHERS = ("torchrun", "torch.distributed.launch", "torch.distributed.run", "accelerate", "deepspeed", "srun")
_DEVICES_OF_A_NODE = ("nproc-per-node", "nproc", "num-gpus", "gpus-per-node", "ntasks-per-node")
_NODES = ("nnodes", "num-nodes", "nodes", "num-machines")
MOST_WORDS = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """A program and its options, with the devices that its launcher requests."""

    program: str
    """The script's file name, the module after `-m`, or a command such as "litgpt"."""
    arguments: tuple[str, ...]
    """Words after the program that are not options."""
    options: dict[str, Any]
    """Values by option without dashes: text, True for an option without a value, a tuple for several words."""
    devices: int | None
    per_node: int | None
    launcher_file: str | None
    """The configuration file of `accelerate launch`."""


def command_line(text: str, where: str) -> CommandLine:
    """The training command of a script or of a single line: if there are several, the one with the most options."""
    found = [_parsed(words, where) for words in _commands(text, where)]
    usable = [one for one in found if one is not None]
    if not usable:
        raise PlaitError(f"{where} starts no program with options, such as: torchrun pretrain_gpt.py --num-layers 24 …")
    return max(usable, key=lambda one: len(one.options))


def _commands(text: str, where: str) -> Iterator[list[str]]:
    variables: dict[str, str] = {}
    depth = 0
    for line in _logical_lines(text):
        depth += bool(_OPENS.match(line)) - bool(_CLOSES.match(line))
        if found := _ASSIGNED.match(line):
            name, adds, value = found.groups()
            value = value.strip()
            value = value[1:-1] if value.startswith("(") and value.endswith(")") else _unquoted(value)
            value = " ".join(value.split())
            value = _expanded(value, variables)
            if depth > 0 and not adds and variables.get(name, value) != value:
                value = f"<{name}:depends-on-a-condition>"
            variables[name] = f"{variables.get(name, '')} {value}".strip() if adds else value
            continue
        words = _words(_expanded(line, variables), where)
        if any(" --" in word for word in words):  # srun sh -c "python … --option"
            words = [part for word in words for part in (_words(word, where) if " --" in word else [word])]
        if len(words) > MOST_WORDS:
            raise PlaitError(
                f"{where} has a command of more than {MOST_WORDS:,} words; no training command is that long"
            )
        if any(word.startswith("--") for word in words):
            yield words


def _logical_lines(text: str) -> Iterator[str]:
    """Logical lines: physical lines joined where a backslash, an array's open bracket or an open quote continues
    them."""
    kept = ""
    for line in text.replace("\\\r\n", "\\\n").splitlines():
        if not kept and line.lstrip().startswith("#"):
            continue
        plain = re.sub(r"(^|\s)#.*$", "", line) if line.count("'") % 2 == line.count('"') % 2 == 0 else line
        if plain.rstrip().endswith("\\"):
            kept += plain.rstrip()[:-1] + " "
            continue
        kept += plain + "\n"
        if _is_open(kept):
            continue
        yield from _statements(kept.strip())
        kept = ""
    if kept.strip():
        yield from _statements(kept.strip())


def _statements(line: str) -> Iterator[str]:
    yield from (part.strip() for part in re.split(r";(?![^'\"]*['\"]\s*$)", line) if part.strip())


def _is_open(text: str) -> bool:
    quoted = re.sub(r"\\.", "", text)
    if re.match(r"^\s*\w+\+?=\(", text):
        return not text.rstrip().endswith(")")
    return quoted.count('"') % 2 == 1 and quoted.count("'") % 2 == 0


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def _expanded(text: str, variables: dict[str, str]) -> str:
    def filled(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        value = variables.get(name)
        return value if value is not None else found[2] if found[2] is not None else found[0]

    for _ in range(10):  # variables of variables
        again = _SUM.sub(lambda found: _result(_VARIABLE.sub(filled, found[1]), variables, found[0]), text)
        again = _VARIABLE.sub(filled, again)
        if again == text or len(again) > 1_000_000:
            break
        text = again
    return text


def _result(text: str, variables: dict[str, str], otherwise: str) -> str:
    """A product or sum of integers and variables."""
    filled = re.sub(r"[A-Za-z_]\w*", lambda found: variables.get(found[0], found[0]), text)
    parts = re.split(r"\s*([*+/-])\s*", filled.strip())
    if not all(part.isdecimal() and len(part) < 20 for part in parts[::2]):
        return otherwise
    value = int(parts[0])
    for sign, digits in zip(parts[1::2], parts[2::2], strict=True):
        number = int(digits)
        if sign == "/" and number == 0:
            return otherwise
        value = {"*": value * number, "+": value + number, "-": value - number, "/": value // (number or 1)}[sign]
    return str(value)


def _words(text: str, where: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise PlaitError(f"{where} is not a valid command: {error}") from None


def _parsed(words: Sequence[str], where: str) -> CommandLine | None:
    at = next((i for i, word in enumerate(words) if _is_program(words, i)), None)
    if at is None:
        return None
    launcher = _options(words[:at], where, keep_last=True)[0]
    own, plain = _options(words[at + 1 :], where, keep_last=False)
    per_node, nodes = _count(launcher, _DEVICES_OF_A_NODE), _count(launcher, _NODES)
    processes = _count(launcher, ("num-processes", "np"))
    devices = processes or (per_node * (nodes or 1) if per_node else None)
    name = words[at].rpartition("/")[2]
    file = launcher.get("config-file")
    return CommandLine(
        program=name,
        arguments=tuple(plain),
        options=own,
        devices=devices,
        per_node=per_node,
        launcher_file=file if isinstance(file, str) else None,
    )


def _is_program(words: Sequence[str], at: int) -> bool:
    word = words[at]
    if word.endswith(".py"):
        return True
    if word in ("litgpt", "axolotl", "trl") or word.endswith("/litgpt"):
        return True
    before = words[at - 1] if at else ""
    return before == "-m" and word not in _LAUNCHERS and not word.startswith(("torch.distributed", "accelerate"))


def _options(words: Sequence[str], where: str, *, keep_last: bool) -> tuple[dict[str, Any], list[str]]:
    found: dict[str, Any] = {}
    plain: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if word in ("|", "&&", "||", "&", ">", ">>", "2>&1"):
            break
        if not word.startswith("--") or word == "--":
            if not word.startswith("-"):
                plain.append(word)
            continue
        name, equals, text = word[2:].partition("=")
        values = [text] if equals else []
        while not equals and at < len(words) and not _begins_option(words[at]):
            values.append(words[at])
            at += 1
        value = _of_words(values)
        name = name.replace("_", "-") if keep_last else name
        if name in found and found[name] != value and not keep_last:
            raise PlaitError(f"{where} gives --{name} twice: {found[name]} and {value}; keep one")
        found[name] = value
    return found, plain


def _begins_option(word: str) -> bool:
    return (
        word.startswith("--")
        or word in ("|", "&&", "||", "&", ">", ">>", "2>&1")
        or bool(re.match(r"^-[A-Za-z]", word))
    )


def _of_words(values: Sequence[str]) -> Any:
    if not values:
        return True
    marked = [Placeholder(one) if re.search(r"\$|^<.*>$", one) else one for one in values]
    return marked[0] if len(marked) == 1 else tuple(marked)


def _count(options: dict[str, Any], names: Sequence[str]) -> int | None:
    value = next((options[name] for name in names if name in options), None)
    return (
        int(value) if isinstance(value, str) and value.isdecimal() and 0 < len(value) < 20 and int(value) > 0 else None
    )
