"""The chat template of a model: a Jinja text that turns messages into the text that the model was trained on.

A template is a program of somebody else. It runs in Jinja's sandbox, which lets it read the messages and nothing else,
and in a child process with limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from plait.checked_json import parse_json
from plait.data.conversations.examples import ChatExample
from plait.data.conversations.render_process import RenderProcess
from plait.errors import PlaitError
from plait.regular_file import SMALL_FILE_BYTES, read_regular_file, read_regular_text

_Messages = Sequence[Mapping[str, Any]]
"""Messages, each with its "role" ("system", "user", "assistant", "tool") and mostly its "content"."""
FIXED_DATE = "2024-07-26"
"""The result of strftime_now while a corpus is made: the date in Llama's templates when none is given."""
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
"""The template of models whose tokenizer has none: the role, a colon, and the message on separate lines."""
PLAIN_NAME = "plait's plain one"


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateText:
    """A template as it was found: its text, where, and the special tokens that it may write."""

    text: str
    where: str
    special: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedText:
    """A conversation's text, and the ranges of its characters that are learned, in order and apart from each other."""

    text: str
    learned: tuple[tuple[int, int], ...]
    remarks: tuple[str, ...] = ()
    """Remarks on how it was made: keys of the counts in index.json."""


class ChatTemplate:
    """A template that was compiled; raises PlaitError where it is not valid, or refuses messages.

    It runs in a child process (render_process.py). Without a `clock` it is given a fixed date, so that the same
    messages always give the same text.
    """

    def __init__(self, found: TemplateText, clock: Literal["today", "none"] = "none") -> None:
        begin = {"text": found.text, "special": dict(found.special), "date": "" if clock == "today" else FIXED_DATE}
        self._process = RenderProcess(begin, found.where)
        self._process.start()

    def close(self) -> None:
        """End the child process; the next call starts another."""
        self._process.close()

    def render(self, messages: _Messages, tools: object = None) -> str:
        """The messages as one text, up to where the model's answer begins: behind the header of its turn, also where
        the template ignores add_generation_prompt."""
        return self._asked("prompt", messages=messages, tools=tools)["text"]

    def after_answer(self) -> str:
        """What the template puts behind an answer: a model that speaks by it ends its own so, whatever else its
        tokenizer calls the end of a text. Empty where the template refuses a question and an answer."""
        return self._asked("after answer")["text"]

    def render_marked(self, messages: _Messages, tools: object = None) -> tuple[str, tuple[tuple[int, int], ...]]:
        """The messages as one text that ends with the last of them, and the ranges of characters that the template
        marks as the assistant's."""
        answer = self._asked("marked", messages=messages, tools=tools)
        return answer["text"], _spans(answer)

    def learned(self, chats: Sequence[ChatExample], ends: Sequence[str]) -> list[MarkedText | PlaitError]:
        """What is learned of each conversation, or why nothing can be; `ends` are the texts of the tokenizer's special
        tokens."""
        found = list[MarkedText | PlaitError]()
        answers = self._process.answers([{"kind": "ends", "ends": ends}, *map(_learn_task, chats)])
        next(answers)
        for one in chats:
            try:
                answer = next(answers)
            except PlaitError as error:
                raise PlaitError(f"{one.place}: {error}") from None
            if isinstance(answer, PlaitError):
                found.append(PlaitError(f"{one.place}: {answer}"))
            else:
                remarks = tuple(answer["remarks"])
                found.append(MarkedText(text=answer["text"], learned=_spans(answer), remarks=remarks))
        return found

    def _asked(self, kind: str, **values: object) -> dict[str, Any]:
        (answer,) = self._process.answers([{"kind": kind, **values}])
        if isinstance(answer, PlaitError):
            raise answer
        return answer


def _learn_task(example: ChatExample) -> dict[str, object]:
    learned = range(example.learned_from, len(example.messages))
    return {
        "kind": "learn",
        "messages": [message.values for message in example.messages],
        "answers": [number for number in learned if example.messages[number].is_learnt],
        "tools": example.tools,
        "learned_from": example.learned_from,
    }


def _spans(answer: dict[str, Any]) -> tuple[tuple[int, int], ...]:
    return tuple((start, stop) for start, stop in answer["learned"])


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
        return read_regular_text(file, SMALL_FILE_BYTES)
    except (OSError, ValueError) as error:
        raise PlaitError(
            f"the chat template {file} cannot be read ({error}); download it again, or set data.chat_template"
        ) from None


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
    """tokenizer_config.json with the special tokens of special_tokens_map.json, which win as in transformers; empty
    where there are no such files. Raises PlaitError for a file that is there and cannot be used: without it another
    template or another end of text would be taken."""
    names = ("tokenizer_config.json", "special_tokens_map.json")
    settings, older = (_checked_settings(folder / name) for name in names)
    return settings | {key: value for key, value in older.items() if value is not None}


def _checked_settings(file: Path) -> dict[str, Any]:
    """The object in one of a tokenizer's settings files, with special tokens and chat template of the right types."""
    try:
        values = parse_json(read_regular_file(file, SMALL_FILE_BYTES))
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
