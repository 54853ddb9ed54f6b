"""A chat template as a program: compiled and run by Jinja in its sandbox. Only the child of render_process.py imports
this, as compiling alone may take all memory and time that there is."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Messages = Sequence[Mapping[str, Any]]
Spans = tuple[tuple[int, int], ...]

# Two code points that Unicode keeps out of all text stand for the edges of what a template marks as the answer.
BEGIN, END = "\ufdd0", "\ufdd1"
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


def holds_edges(value: Any) -> bool:
    """Whether a text among these values, or inside them, would read as an edge of an answer."""
    if isinstance(value, str):
        return BEGIN in value or END in value
    if isinstance(value, Mapping):
        return any(map(holds_edges, value.values()))
    return isinstance(value, list | tuple) and any(map(holds_edges, value))


def as_transformers_gives(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message without keys whose value is None, and with its reasoning under the names that templates know."""
    if message.keys() == {"role", "content"}:
        return message
    own = {key: value for key, value in message.items() if value is not None}
    reasoning = next((own[key] for key in REASONING_KEYS if key in own), None)
    return own if reasoning is None else {"thinking": reasoning, **own, "reasoning_content": reasoning}


class JinjaTemplate:
    """A compiled template, with what transformers gives one: special tokens, tools, `raise_exception`, `strftime_now`.

    Any exception may come out of compiling and rendering. Messages are as `as_transformers_gives` makes them. `date` is
    in ISO's form; empty for today.
    """

    def __init__(self, text: str, special: Mapping[str, str], date: str) -> None:
        self._special = special
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationMarks]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: _day(date).strftime(form)
        self._template = environment.from_string(text)
        self.marks_answers = re.search(r"{%[-+]?\s*generation\b", text) is not None
        """Whether it says itself which parts are the assistant's."""

    def text(self, messages: Messages, tools: Any, *, add_generation_prompt: bool) -> str:
        """The messages as one text."""
        return self.marked(messages, tools, add_generation_prompt=add_generation_prompt)[0]

    def marked(self, messages: Messages, tools: Any, *, add_generation_prompt: bool = False) -> tuple[str, Spans]:
        """The messages as one text, and the ranges of characters that the template marks as the assistant's."""
        values: dict[str, Any] = {
            **self._special,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return _without_edges(self._template.render(**values))


class _GenerationMarks(Extension):
    """{% generation %} … {% endgeneration %}: around what the assistant says."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

    def parse(self, parser: Parser) -> nodes.Node:
        """The block as a call that puts edges around it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{BEGIN}{caller()}{END}"


def _without_edges(text: str) -> tuple[str, Spans]:
    if BEGIN not in text:
        return text, ()
    pieces, spans, length, begin = list[str](), list[tuple[int, int]](), 0, 0
    for piece in re.split(f"([{BEGIN}{END}])", text):
        if piece == BEGIN:
            begin = length
        elif piece == END:
            spans.append((begin, length))
        else:
            pieces.append(piece)
            length += len(piece)
    return "".join(pieces), tuple(spans)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without escapes of HTML, with the options that transformers knows."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _day(date: str) -> datetime:
    return datetime.fromisoformat(date) if date else datetime.now().astimezone()
