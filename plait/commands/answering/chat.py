"""`plait chat`: a conversation with a model, by its own chat template."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain, islice, takewhile
from typing import Any, Literal, Protocol, TextIO

import tokenizers

from plait.commands.answering.pieces import write_pieces
from plait.commands.models.found_model import template_folders
from plait.commands.models.opened_model import OpenedModel, end_tokens, open_each, open_model
from plait.commands.sample import decode_incrementally
from plait.data.conversations.chat_template import ChatTemplate, find_template, token_text, tokenizer_settings
from plait.data.preparation.end_tokens import end_of_turn
from plait.errors import PlaitError, check_utf8
from plait.launch.local.output import OptionalOutput
from plait.trainer.generate import generate
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

ADAPTER_LINE = "/adapter "
"""How a line begins that names the adapter to go on with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSettings:
    """How an answer is drawn; the same seed gives the same answers to the same messages."""

    tokens: int = 512
    """Most tokens of one answer."""
    temperature: float = 0.7
    top_p: float = 0.95
    seed: int = 1


class Conversation(Protocol):
    """Messages so far between a person and a model."""

    messages: list[dict[str, str]]
    """Each with its "role" ("user" or "assistant") and its "content"."""

    adapters: Sequence[str]
    """Names of the adapters that the model may speak with; empty where it has its own, or none."""

    def say(self, text: str) -> Iterator[str]:
        """The model's answer to a message, piece by piece; it is remembered once it was read to its end."""
        ...

    def take_adapter(self, name: str) -> None:
        """From now on the model answers with this one of `adapters`. Raises PlaitError for another name."""
        ...


class _TemplateConversation:
    """A conversation by a model's chat template."""

    def __init__(
        self, models: Mapping[str, OpenedModel], template: ChatTemplate, ends: Sequence[str], how: AnswerSettings
    ) -> None:
        self.messages: list[dict[str, str]] = []
        opened = next(iter(models.values()))
        self.adapters: Sequence[str] = tuple(name for name in models if name)
        self._models, self._opened, self._template, self._how = models, opened, template, how
        # A text's own "<|im_end|>" is ordinary text to the model's tokenizer; a template's is the token.
        self._encoder: Any = tokenizers.Tokenizer.from_str(opened.tokenizer.definition)
        self._encoder.no_truncation()
        self._encoder.no_padding()
        self._special = [one.content for one in self._encoder.get_added_tokens_decoder().values() if one.special]
        texts = (*ends, end_of_turn(template, self._encoder))
        known = (self._encoder.token_to_id(text) for text in texts if text is not None)
        self._ends: set[int] = {*end_tokens(opened), *(token for token in known if token is not None)}

    def say(self, text: str) -> Iterator[str]:
        """The model's answer to a message, piece by piece; it is remembered once it was read to its end.

        Raises PlaitError for a message that holds one of the tokenizer's special tokens, which would end it early.
        """
        check_utf8(text)
        if found := next((token for token in self._special if token in text), None):
            raise PlaitError(f'a message cannot contain "{found}", which has a special meaning; leave it out')
        self.messages.append({"role": "user", "content": text})
        ids = self._encoder.encode(self._template.render(self.messages), add_special_tokens=False).ids
        how = self._how
        new = generate(
            self._opened.model,
            ids,
            tokens=how.tokens,
            temperature=how.temperature,
            top_p=how.top_p,
            seed=how.seed + len(self.messages),
            stop=frozenset(self._ends),
        )
        said: list[str] = []
        answer = takewhile(lambda token: token not in self._ends, new)
        for piece in decode_incrementally(self._opened.tokenizer, ids, answer):
            said.append(piece)
            yield piece
        self.messages.append({"role": "assistant", "content": "".join(said).strip()})

    def take_adapter(self, name: str) -> None:
        """From now on the model answers with this one of `adapters`. Raises PlaitError for another name."""
        if name not in self.adapters:
            known = ", ".join(self.adapters) or "none: name some by --adapter"
            raise PlaitError(f'"{name}" is none of this conversation\'s adapters ({known}); write one of these')
        self._opened = self._models[name]


def open_chat(
    name: str,
    settings: AnswerSettings | None = None,
    *,
    adapters: Sequence[str] = (),
    working: WorkingFolder = CURRENT_FOLDER,
) -> Conversation:
    """A new conversation with a run's model or that of a folder, with the first of `adapters` where there are some;
    raises PlaitError where it has no chat template."""
    if adapters:
        models = dict(zip(adapters, open_each(name, adapters, working), strict=True))
    else:
        models = {"": open_model(name, working)}
    opened = next(iter(models.values()))
    folders = template_folders(opened.run, opened.tokenizer_folder, working)
    found = find_template(folders)
    if found is None:
        raise PlaitError(
            f"{name} has no chat template, so it was not trained to talk; let it go on with a text by plait sample, or "
            f"put its chat_template.jinja into {folders[0]}"
        )
    ends = [token_text(tokenizer_settings(folder), "eos_token") for folder in folders]
    template = ChatTemplate(found, "today")
    return _TemplateConversation(models, template, [end for end in ends if end], settings or AnswerSettings())


def talk(
    conversation: Conversation,
    lines: TextIO,
    output: OptionalOutput,
    person: Literal["terminal", "pipe"],
    *,
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Answer each line as a message until /quit or the end of the input; a terminal sees a hint and a prompt.
    `waiting` is open from a message to the first words of its answer."""
    others = "; /adapter NAME takes another one" if len(conversation.adapters) > 1 else ""
    output.write(f"chat     each line is a message{others}; /quit ends\n" if person == "terminal" else "")
    while True:
        output.write("> " if person == "terminal" else "")
        output.flush()
        line = lines.readline()
        if not line or line.strip() == "/quit":
            return
        if not line.strip():
            continue
        if line.startswith(ADAPTER_LINE):
            conversation.take_adapter(line.removeprefix(ADAPTER_LINE).strip())
            continue
        answer = conversation.say(line.strip())
        with waiting():
            first = list(islice(answer, 1))
        write_pieces(output, chain(first, answer))
