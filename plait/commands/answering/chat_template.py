"""The chat template of a model: a Jinja text that turns messages into the text that the model was trained on.

A template is a program of somebody else. It runs in Jinja's sandbox, which lets it read the messages and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from plait.checked_json import parse_json
from plait.errors import PlaitError

Chat = Sequence[Mapping[str, str]]
"""Messages, each with its "role" ("system", "user", "assistant") and its "content"."""


class ChatTemplate:
    """A template that was read; `render` raises PlaitError where it refuses the messages."""

    def __init__(self, text: str, where: str, special: Mapping[str, str]) -> None:
        self._where, self._special = where, special
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = lambda value, **more: json.dumps(value, ensure_ascii=False, **more)
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
        try:
            self._template = environment.from_string(text)
        except TemplateError as error:
            raise PlaitError(f"the chat template in {where} is not valid ({error}); bring the model's own") from None

    def render(self, messages: Chat) -> str:
        """The messages as one text, up to where the model's answer begins."""
        values: dict[str, Any] = {"messages": list(messages), "add_generation_prompt": True, **self._special}
        try:
            return self._template.render(**values)
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise PlaitError(f"the chat template in {self._where} refuses these messages ({error})") from None


def _refuse(message: str) -> None:
    raise TemplateError(message)


def find_template(folders: Sequence[Path]) -> ChatTemplate | None:
    """The template of the first of these folders that has one: chat_template.jinja, or the "chat_template" of
    tokenizer_config.json. None where none has."""
    for folder in folders:
        settings = tokenizer_settings(folder)
        special = {key: text for key in ("bos_token", "eos_token", "pad_token") if (text := token_text(settings, key))}
        file, inside = folder / "chat_template.jinja", settings.get("chat_template")
        if file.is_file():
            return ChatTemplate(file.read_text(encoding="utf-8"), str(file), special)
        if isinstance(inside, list):
            named = {one.get("name"): one.get("template") for one in inside if isinstance(one, dict)}
            inside = named.get("default")
        if isinstance(inside, str):
            return ChatTemplate(inside, str(folder / "tokenizer_config.json"), special)
    return None


def tokenizer_settings(folder: Path) -> Mapping[str, Any]:
    """What tokenizer_config.json says; empty where there is none."""
    try:
        values = parse_json((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def token_text(settings: Mapping[str, Any], key: str) -> str | None:
    """A special token's text: a string, or an object with its text as "content"."""
    entry = settings.get(key)
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None
