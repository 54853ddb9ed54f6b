"""The chat template of a model: a Jinja text that turns messages into the text that the model was trained on.

A template is a program of somebody else. It runs in Jinja's sandbox, which lets it read the messages and nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from plait.checked_json import parse_json
from plait.errors import PlaitError
from plait.regular_file import read_regular_file

Chat = Sequence[Mapping[str, str]]
"""Messages, each with its "role" ("system", "user", "assistant") and its "content"."""
_EXTRA_TOKENS = ("model_specific_special_tokens", "extra_special_tokens")
_NAMED_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))

PLAIN_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == "assistant" -%}
{{ "Assistant:\\n" }}{% generation %}{{ message.content + eos_token }}{% endgeneration %}{{ "\\n\\n" }}
{%- else -%}
{{ message.role | capitalize + ":\\n" + message.content + "\\n\\n" }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ "Assistant:\\n" }}
{%- endif -%}
"""
"""The template of models whose tokenizer has none: the role, a colon, and the message on lines of its own."""
PLAIN_NAME = "plait's plain one"

# Two code points that Unicode keeps out of all text stand for the edges of what a template marks as the answer.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_EDGES = re.compile(f"[{_BEGIN}{_END}]")
_ANSWER = "an answer that no template has"


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateText:
    """A template as it was found: its text, where, and the special tokens that it may write."""

    text: str
    where: str
    special: Mapping[str, str] = field(default_factory=dict[str, str])


class ChatTemplate:
    """A template that was read; `render` raises PlaitError where it refuses the messages.

    Without a `clock` it is told no date, so that the same messages always give the same text.
    """

    def __init__(self, found: TemplateText, clock: Literal["today", "none"] = "none") -> None:
        self._where, self._special = found.where, found.special
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationMarks]
        )
        environment.filters["tojson"] = lambda value, **more: json.dumps(value, ensure_ascii=False, **more)
        environment.globals["raise_exception"] = _refuse
        if clock == "today":
            environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
        try:
            self._template = environment.from_string(found.text)
            self.marks_answers = re.search(r"{%[-+]?\s*generation\b", found.text) is not None
            """Whether it says itself which parts are the assistant's."""
        except (TemplateError, RecursionError) as error:
            raise PlaitError(
                f"the chat template in {self._where} is not valid ({error}); bring the model's own"
            ) from None

    def render(self, messages: Chat) -> str:
        """The messages as one text, up to where the model's answer begins."""
        return _EDGES.sub("", self._render(messages, add_generation_prompt=True))

    def after_answer(self) -> str:
        """What the template puts behind an answer: a model that speaks by it ends its own so, whatever else its
        tokenizer calls the end of a text. Empty where the template refuses a question and an answer."""
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        try:
            return self.render_marked(messages)[0].rpartition(_ANSWER)[2]
        except PlaitError:
            return ""

    def render_marked(self, messages: Chat) -> tuple[str, tuple[tuple[int, int], ...]]:
        """The messages as one text that ends with the last of them, and the ranges of characters that the template
        marks as the assistant's."""
        return _without_edges(self._render(messages, add_generation_prompt=False))

    def _render(self, messages: Chat, *, add_generation_prompt: bool) -> str:
        if any(_EDGES.search(text) for message in messages for text in message.values()):
            raise PlaitError("a message holds U+FDD0 or U+FDD1, which are no characters; take them out")
        values: dict[str, Any] = {
            **self._special,
            "messages": [dict(message) for message in messages],
            "tools": None,  # as transformers gives them: a template may ask "is not none"
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(**values)
        except (
            TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            RecursionError,
            MemoryError,
        ) as error:
            raise PlaitError(f"the chat template in {self._where} refuses these messages ({error})") from None


class _GenerationMarks(Extension):
    """{% generation %} … {% endgeneration %}: around what the assistant says."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

    def parse(self, parser: Parser) -> nodes.Node:
        """The block as a call that puts edges around it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def _without_edges(text: str) -> tuple[str, tuple[tuple[int, int], ...]]:
    pieces, spans, length, begin = list[str](), list[tuple[int, int]](), 0, 0
    for piece in re.split(f"([{_BEGIN}{_END}])", text):
        if piece == _BEGIN:
            begin = length
        elif piece == _END:
            spans.append((begin, length))
        else:
            pieces.append(piece)
            length += len(piece)
    return "".join(pieces), tuple(spans)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def find_template(folders: Sequence[Path]) -> TemplateText | None:
    """The template of the first of these folders that has one: chat_template.jinja, or the "chat_template" of
    tokenizer_config.json. None where none has; raises PlaitError for a file that is there and cannot be used."""
    for folder in folders:
        settings = tokenizer_settings(folder)
        special = special_tokens(settings)
        file, inside = folder / "chat_template.jinja", settings.get("chat_template")
        if file.is_file() or file.is_symlink():
            return TemplateText(text=_read(file), where=str(file), special=special)
        if isinstance(inside, list):
            inside = {one["name"]: one["template"] for one in inside}
        if isinstance(inside, dict):
            inside = inside.get("default")
        if isinstance(inside, str):
            return TemplateText(text=inside, where=str(folder / "tokenizer_config.json"), special=special)
    return None


def _read(file: Path) -> str:
    try:
        return read_regular_file(file).decode("utf-8")
    except (OSError, ValueError) as error:
        raise PlaitError(f"the chat template {file} cannot be read ({error}); bring the model's own") from None


def special_settings(special: Mapping[str, str]) -> dict[str, Any]:
    """Special tokens as tokenizer_config.json names them."""
    named = {key: text for key, text in special.items() if key.endswith("_token")}
    others = {key: text for key, text in special.items() if key not in named}
    return {**named, "extra_special_tokens": others} if others else named


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The texts of all special tokens that have a name: the usual ones, and those of this model alone."""
    extra = [entry for key in _EXTRA_TOKENS if isinstance(entry := settings.get(key), dict)]
    named = {key: value for key, value in settings.items() if key.endswith("_token")}
    found = ((key, token_text(each, key)) for each in (named, *extra) for key in each)
    return {key: text for key, text in found if text}


def tokenizer_settings(folder: Path) -> Mapping[str, Any]:
    """tokenizer_config.json, with special tokens of special_tokens_map.json where it has none; empty where there are no
    such files. Raises PlaitError for a file that is there and cannot be used: without it another template or another
    end of text would be taken."""
    names = ("tokenizer_config.json", "special_tokens_map.json")
    settings, older = (_checked_settings(folder / name) for name in names)
    return settings | {key: value for key, value in older.items() if settings.get(key) is None}


def _checked_settings(file: Path) -> dict[str, Any]:
    """The object in one of a tokenizer's settings files, with special tokens and chat template of the right types."""
    try:
        values = parse_json(read_regular_file(file))
        _check_types(values)
    except FileNotFoundError:
        if file.is_symlink():
            raise PlaitError(f"{file} is not usable (it links to a file that is missing); download it again") from None
        return {}
    except (OSError, ValueError) as error:
        raise PlaitError(f"{file} is not usable ({error}); download it again") from None
    return values


def _check_types(values: object) -> None:
    """Raises ValueError, in words, for what transformers could not read either."""
    if not isinstance(values, dict):
        raise ValueError("it is not a table of keys and values")
    for key in _NAMED_TOKENS:
        if values.get(key) is not None and token_text(values, key) is None:
            raise ValueError(f'"{key}" is not the text of a token')
    template = values.get("chat_template")
    if isinstance(template, list):
        is_template = all(_is_named_template(one) for one in template)
    elif isinstance(template, dict):
        is_template = all(isinstance(text, str) for text in template.values())
    else:
        is_template = template is None or isinstance(template, str)
    if not is_template:
        raise ValueError('"chat_template" is neither a text nor named texts')
    for key in _EXTRA_TOKENS:
        entry = values.get(key)
        named = entry if isinstance(entry, dict) else {}
        if any(text is not None and token_text(named, name) is None for name, text in named.items()):
            raise ValueError(f'"{key}" holds what is not the text of a token')
        if entry is not None and not isinstance(entry, dict | list):
            raise ValueError(f'"{key}" is neither a list nor a table of tokens')


def _is_named_template(one: object) -> bool:
    return isinstance(one, dict) and isinstance(one.get("name"), str) and isinstance(one.get("template"), str)


def token_text(settings: Mapping[str, Any], key: str) -> str | None:
    """A special token's text: a string, or an object with its text as "content"."""
    entry = settings.get(key)
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None
