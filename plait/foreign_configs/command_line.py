"""A command line, or the shell script that builds one: its program, its launcher's options and its own. The script's
variables, arrays and defaults are filled in; conditions are not evaluated."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.errors import PlaitError
from plait.foreign_configs.syntax import Placeholder

_DECLARES = re.compile(r"^\s*(?:export|local|readonly|declare|typeset)(?:\s+-\w+)*\s+")
_ASSIGNED = re.compile(
    r"""\s*(\w+)(\+?)=(\(.*\)\s*$|(?:"(?:\\.|[^"\\])*"|'[^']*'|`[^`]*`|\\.|\$\{[^}]{0,1000}\}|"""
    r"""\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|[^\s"'`])*+)(?=\s|$)""",
    re.DOTALL,
)
"""One variable assignment; more of them, or the command that they are set for, may follow."""
_BRANCH = re.compile(r"^(?:then|do|else|[^\s()]+\))\s+")
"""What precedes the first command of a branch on its line."""
_UP_TO_NEXT = re.compile(
    r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|\\.|\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|(?!&&|\|\|).)*+(&&|\|\|)""",
    re.DOTALL,
)
"""A command, and what joins the next one to it."""
_OPENS = re.compile(r"^\s*(if|case|for|while|until)\b")
_CLOSES = re.compile(r"^\s*(fi|esac|done)\b")
_VARIABLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?-([^}]{0,1000}))?\}|\$(\w+)")
_SUM = re.compile(r"\$\(\(([\w$+*/ {}()-]{1,200}?)\)\)")
_LAUNCHERS = ("torchrun", "torch.distributed.launch", "torch.distributed.run", "accelerate", "deepspeed", "srun")
_DEVICES_OF_A_NODE = ("nproc-per-node", "nproc", "num-gpus", "gpus-per-node", "ntasks-per-node")
_NODES = ("nnodes", "num-nodes", "nodes", "num-machines")
MOST_WORDS, MOST_CHARACTERS = 5_000, 1_000_000


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
    launcher: dict[str, Any]
    """The launcher's options, with - instead of _."""


def command_line(text: str, where: str) -> CommandLine:
    """The training command of a script or of a single line: if there are several, the one with the most options."""
    found = [_parsed(words, where) for words in _commands(text, where)]
    usable = [one for one in found if one is not None]
    if not usable:
        raise PlaitError(f"{where} starts no program with options, such as: torchrun pretrain_gpt.py --num-layers 24 …")
    return max(usable, key=lambda one: len(one.options))


def _commands(text: str, where: str) -> Iterator[list[str]]:
    variables: dict[str, str] = {}
    for line, is_conditional in _simple_commands(text):
        line = _DECLARES.sub("", line)
        while found := _ASSIGNED.match(line):
            name, adds, value = found.groups()
            value = value.strip()
            value = value[1:-1] if value.startswith("(") and value.endswith(")") else _unquoted(value)
            value = " ".join(value.split())
            value = _expanded(value, variables)
            if is_conditional and not adds and variables.get(name, value) != value:
                value = f"<{name}:depends-on-a-condition>"
            variables[name] = f"{variables.get(name, '')} {value}".strip() if adds else value
            line = line[found.end() :]
        words = _words(_expanded(line, variables), where)
        if any(" --" in word for word in words):  # srun sh -c "python … --option"
            words = [part for word in words for part in (_words(word, where) if " --" in word else [word])]
        if len(words) > MOST_WORDS:
            raise PlaitError(
                f"{where} has a command of more than {MOST_WORDS:,} words; no training command is that long"
            )
        if any(word.startswith("--") for word in words):
            yield words


def _simple_commands(text: str) -> Iterator[tuple[str, bool]]:
    """Commands and assignments one by one, each with whether it depends on a condition: in a branch or a loop, after a
    command that may fail and `&&`, or after `||`."""
    branches = groups = 0
    for line in _logical_lines(text):
        branches += bool(_OPENS.match(line)) - bool(_CLOSES.match(line))
        groups -= bool(groups) and line.startswith("}")
        is_conditional, line, first = branches > 0 or groups > 0, _BRANCH.sub("", line), 0
        while first <= len(line):
            found = _UP_TO_NEXT.match(line, first)
            end, joint = (found.end(), found[1]) if found else (len(line) + 1, "")
            command = line[first : end - len(joint)].strip()
            groups += is_conditional and command.startswith("{ ")
            yield command.removeprefix("{ "), is_conditional
            is_conditional = is_conditional or joint == "||" or not _ASSIGNED.fullmatch(_DECLARES.sub("", command))
            first = end


def _logical_lines(text: str) -> Iterator[str]:
    """Logical lines: physical lines joined where a backslash, `&&`, `||`, an array's open bracket or an open quote
    continues them."""
    kept: list[str] = []
    quotes = {"'": 0, '"': 0}
    for line in text.splitlines():
        if not kept and line.lstrip().startswith("#"):
            continue
        plain = re.sub(r"(^|\s)#.*$", "", line) if line.count("'") % 2 == line.count('"') % 2 == 0 else line
        plain = plain.rstrip()
        is_cut = plain.endswith("\\")
        goes_on = is_cut or plain.endswith(("&&", "||"))
        kept.append(plain[:-1] + " " if is_cut else plain + "\n")
        unescaped = re.sub(r"\\.", "", kept[-1])
        quotes = {sign: count + unescaped.count(sign) for sign, count in quotes.items()}
        is_array = re.match(r"\s*\w+\+?=\(", _DECLARES.sub("", kept[0]))
        is_open = not plain.endswith(")") if is_array else quotes['"'] % 2 == 1 and quotes["'"] % 2 == 0
        if goes_on or is_open:
            continue
        yield from _statements("".join(kept))
        kept, quotes = [], dict.fromkeys(quotes, 0)
    yield from _statements("".join(kept))


_STATEMENT = re.compile(r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|\\.|[^;])+""", re.DOTALL)


def _statements(line: str) -> Iterator[str]:
    yield from (part.strip() for part in _STATEMENT.findall(line) if part.strip())


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
        if again == text:
            break
        if len(again) > MOST_CHARACTERS:
            raise PlaitError(f"the script's variables stand for more than {MOST_CHARACTERS:,} characters; shorten them")
        text = again
    return text


def _result(text: str, variables: dict[str, str], otherwise: str) -> str:
    """The shell's result for an expression of integers and variables; `otherwise` if it is not known."""
    filled = re.sub(r"[A-Za-z_]\w*", lambda found: variables.get(found[0], found[0]), text)
    if len(filled) > _LONGEST_SUM:
        return otherwise
    try:
        return str(_calculated(ast.parse(filled.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return otherwise


_SIGNS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
}  # fmt: skip
_LONGEST_SUM, _LARGEST_NUMBER = 1_000, 1 << 63


def _calculated(node: ast.expr) -> int:
    """Raises ValueError for anything but an integer that the shell can hold."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        value = _SIGNS[type(node.op)](_calculated(node.left), _calculated(node.right))
    else:
        raise ValueError
    if abs(value) >= _LARGEST_NUMBER:
        raise ValueError
    return value


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
    per_node = _count(launcher, _DEVICES_OF_A_NODE)
    nodes = _count(launcher, _NODES) if any(name in launcher for name in _NODES) else 1
    processes = _count(launcher, ("num-processes", "np"))
    devices = processes or (per_node * nodes if per_node and nodes else None)
    name = words[at].rpartition("/")[2]
    return CommandLine(
        program=name,
        arguments=tuple(plain),
        options=own,
        devices=devices,
        per_node=per_node,
        launcher=launcher,
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
