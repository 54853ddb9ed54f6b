"""Finds which part of a conversation's text is learned, also where its template has no marks for it. Runs in the child
of render_process.py."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from plait.data.conversations.jinja_template import (
    REASONING_KEYS,
    JinjaTemplate,
    Messages,
    Spans,
    as_transformers_gives,
    holds_edges,
)
from plait.errors import PlaitError

# Note [answers are found by rendering prefixes]: a template without generation marks is rendered up to each answer, as
# if the model were to give it now, and again with it. What the second text adds to the first is the answer, with the
# end of turn that the model must learn to write. This holds only where a template leaves earlier text as it was. Some
# strip earlier reasoning, or move the system message: there, an earlier answer stands behind other text than the model
# read when it gave it, and only the last answer is learned.
#
# Note [headers are found by two answers]: a template may ignore add_generation_prompt. What it adds then begins with
# the header of the assistant's turn ("<|im_start|>assistant\n"), which is not the model's to write. Rendered with two
# answers that have no letter in common, the header is what both texts begin with. White space alone is no header: it
# is part of the answer's first token.

_PROBES = ("Quartz vow", "jumpy fix")
"""Two answers whose common prefix is empty."""
_ANSWER = "an answer that no template has"
_THINKING = re.compile(r"</?think(?:ing)?>")
_CHOOSE = 'name another template in data.chat_template, such as "chatml", or the path of one with {% generation %}'


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatToLearn:
    """A conversation as the template gets it; `answers` are the numbers of the messages that are learned."""

    messages: Messages
    answers: Sequence[int]
    tools: Any = None
    learned_from: int = 0
    """Messages before this one are only read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedChat:
    """A text, and the ranges of its characters that are learned, in order and apart from each other."""

    text: str
    learned: Spans
    remarks: tuple[str, ...] = ()
    """A remark on it: "last answers", "other prompt", or "lost" with the role whose text is lost."""


@dataclass(slots=True)
class LearnedFinder:
    """Finds what is learned of many conversations with one template; `ends` are the texts of special tokens."""

    template: JinjaTemplate
    ends: Sequence[str] = ()
    edges: Literal["possible", "none"] = "possible"
    """Whether a text of the batch may hold what stands for an answer's edge."""
    _prompts: dict[str, bool] = field(default_factory=dict[str, bool])
    """Whether a prompt for the answer adds text, by the role of the message before it."""
    _headers: dict[str, str] = field(default_factory=dict[str, str])
    _end_of_turn: str | None = None

    def find(self, chat: ChatToLearn) -> LearnedChat:
        """A conversation's text up to its last answer, and its answers.

        Raises PlaitError where its text would not be what the model reads, or nothing is learned.
        """
        messages = self.checked(chat.messages[: chat.answers[-1] + 1], chat.tools)
        find = self._by_marks if self.template.marks_answers else self._by_prefixes
        text, spans, remarks = find(chat, messages)
        spans = [span for span in (self._until_end_of_turn(text, span) for span in spans) if span[1] > span[0]]
        if not spans:
            raise PlaitError("the chat template marks no answer, so nothing is learned; correct the template")
        _refuse_lost_tools(text, messages, chat.tools)
        lost = dict.fromkeys(f"lost {kind}" for kind in _lost_texts(text, messages))
        return LearnedChat(text=text, learned=tuple(spans), remarks=(*remarks, *lost))

    def prompt(self, messages: Messages, tools: Any) -> str:
        """The messages up to where the model's answer begins, the header of its turn included."""
        messages = self.checked(messages, tools)
        text = self._prompt(messages, tools)
        if text != self._read(messages, tools):
            return text
        return text + self._header([*messages, {"role": "assistant", "content": ""}], tools, text, text)

    def checked(self, messages: Messages, tools: Any) -> Messages:
        """The messages as transformers gives them to a template; raises PlaitError where an edge is among their
        text."""
        if self.edges == "possible" and holds_edges([messages, tools]):
            raise PlaitError("a message holds U+FDD0 or U+FDD1, which are not characters; take them out")
        return [as_transformers_gives(message) for message in messages]

    def after_answer(self) -> str:
        """The template's text after an answer; empty if it refuses a question and an answer."""
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        try:
            return self._read(messages, None).rpartition(_ANSWER)[2]
        except Exception:
            return ""

    def _read(self, messages: Messages, tools: Any) -> str:
        return self.template.text(messages, tools, add_generation_prompt=False)

    def _prompt(self, messages: Messages, tools: Any) -> str:
        return self.template.text(messages, tools, add_generation_prompt=True)

    def _by_marks(self, chat: ChatToLearn, messages: Messages) -> tuple[str, list[tuple[int, int]], list[str]]:
        text, marked = self.template.marked(messages, chat.tools)
        spans = [self._with_end_of_turn(text, span) for span in marked]
        assistants = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        for number in set(assistants) - set(chat.answers):
            if number >= chat.learned_from:
                spans = self._without_answer(chat, messages, text, spans, assistants.index(number))
        if chat.learned_from:
            begin = self._before(chat, messages, text, chat.learned_from)
            spans = [(max(start, begin), stop) for start, stop in spans if stop > begin]
        return text, spans, ["last answers"] if len(spans) < len(chat.answers) else []

    def _without_answer(
        self, chat: ChatToLearn, messages: Messages, text: str, spans: list[tuple[int, int]], which: int
    ) -> list[tuple[int, int]]:
        """The marked ranges without those of the assistant's answer of this number, which is only read."""
        assistants = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        found = self._range(messages, assistants[which], text, chat.tools)
        if found is not None:
            return [(start, stop) for start, stop in spans if stop <= found[0] or start >= found[1]]
        _, marked = self.template.marked(messages, chat.tools)
        if len(marked) != len(assistants):
            raise _changes_earlier_text(assistants[which])
        return [span for span in spans if span[0] != marked[which][0]]

    def _before(self, chat: ChatToLearn, messages: Messages, text: str, number: int) -> int:
        """How many characters of the text stand before this message."""
        for render in (self._prompt, self._read):
            before = render(messages[:number], chat.tools)
            if text.startswith(before):
                return len(before)
        raise _changes_earlier_text(number)

    def _by_prefixes(self, chat: ChatToLearn, messages: Messages) -> tuple[str, list[tuple[int, int]], list[str]]:
        """See Note [answers are found by rendering prefixes]."""
        whole, remarks = self._read(messages, chat.tools), list[str]()
        spans, last = list[tuple[int, int]](), chat.answers[-1]
        for number in chat.answers[:-1]:
            span = self._range(messages, number, whole, chat.tools)
            if span is None:
                spans, remarks = [], ["last answers"]
                break
            spans.append(span)
        final = self._range(messages, last, whole, chat.tools)
        if final is None:
            before = self._read(messages[:last], chat.tools)
            if not whole.startswith(before):
                raise _changes_earlier_text(last)
            start = len(before) + len(self._header(messages, chat.tools, before, whole))
            final, remarks = (start, len(whole)), [*remarks, "other prompt"]
        return whole, [*spans, final], remarks

    def _range(self, messages: Messages, number: int, whole: str, tools: Any) -> tuple[int, int] | None:
        """Where an answer begins and ends in the whole text; None where what stands before it, or the answer itself,
        is another text there."""
        before = self._prompt(messages[:number], tools)
        after = whole if number + 1 == len(messages) else self._read(messages[: number + 1], tools)
        if not (whole.startswith(after) and after.startswith(before)):
            return None
        role = messages[number - 1]["role"] if number else ""
        if role not in self._prompts:
            self._prompts[role] = before != self._read(messages[:number], tools)
        header = "" if self._prompts[role] else self._header(messages[: number + 1], tools, before, after)
        return len(before) + len(header), len(after)

    def _header(self, messages: Messages, tools: Any, before: str, after: str) -> str:
        """See Note [headers are found by two answers]; `before` and `after` are the texts without and with the last
        message."""
        *others, answer = messages
        role = others[-1]["role"] if others else ""
        known = self._headers.get(role)
        if known is None or not after.startswith(before + known):
            texts = [self._read([*others, {**answer, "content": probe}], tools) for probe in _PROBES]
            common = _common_beginning(*(text.removeprefix(before) for text in texts))
            is_header = common.strip() and common != texts[0] and all(text.startswith(before) for text in texts)
            known = self._headers[role] = common if is_header else ""
        return known if after.startswith(before + known) or after == before else ""

    def _with_end_of_turn(self, text: str, span: tuple[int, int]) -> tuple[int, int]:
        """A marked range with the end of turn that follows it: who never learns to write it never stops."""
        if self._end_of_turn is None:
            after = self.after_answer().lstrip()
            self._end_of_turn = max((end for end in self.ends if end and after.startswith(end)), key=len, default="")
        end, (start, stop) = self._end_of_turn, span
        if not end or text[start:stop].rstrip().endswith(end):
            return span
        gap = len(text[stop:]) - len(text[stop:].lstrip()) if text[stop : stop + 1].isspace() else 0
        return (start, stop + gap + len(end)) if text.startswith(end, stop + gap) else span

    def _until_end_of_turn(self, text: str, span: tuple[int, int]) -> tuple[int, int]:
        """Without the white space behind an end of turn: the model stops there, and never writes it."""
        start, stop = span
        said = text[start:stop].rstrip()
        return (start, start + len(said)) if any(end and said.endswith(end) for end in self.ends) else span


def _common_beginning(one: str, other: str) -> str:
    same = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:same]


def _changes_earlier_text(number: int) -> PlaitError:
    return PlaitError(
        f"the chat template changes earlier text once message {number + 1} follows, so the text before that answer is "
        f"not what the model would read; {_CHOOSE}"
    )


def _refuse_lost_tools(text: str, messages: Messages, tools: Any) -> None:
    """Raise PlaitError where the text has no trace of tools or of calls of them: the model would learn to stop where it
    should go on."""
    for what, entries in (("tools", tools), *(("tool_calls", one.get("tool_calls")) for one in messages)):
        for name in _names(entries):
            if name not in text:
                raise PlaitError(
                    f'the chat template leaves out "{what}" ({name}); name one that writes them in data.chat_template, '
                    'such as "qwen2.5", or leave such records out'
                )


def _names(entries: Any) -> Iterator[str]:
    """The names of functions in a list of tools or of calls."""
    for entry in entries if isinstance(entries, list) else []:
        inner = entry.get("function", entry) if isinstance(entry, Mapping) else None
        name = inner.get("name") if isinstance(inner, Mapping) else None
        if isinstance(name, str):
            yield name


def _lost_texts(text: str, messages: Messages) -> Iterator[str]:
    """Whose text is missing from the rendering: a role, or "reasoning"."""
    for message in messages:
        content = message.get("content")
        reasoning = next((message[key] for key in REASONING_KEYS if message.get(key) is not None), None)
        parts = _THINKING.split(content) if isinstance(content, str) else []
        if parts and _is_lost(parts[-1], text):
            yield message["role"]
        thoughts = [*parts[:-1], *([reasoning] if isinstance(reasoning, str) else [])]
        if any(_is_lost(thought, text) for thought in thoughts):
            yield "reasoning"


def _is_lost(part: str, text: str) -> bool:
    part = part.strip()
    if part in text or json.dumps(part, ensure_ascii=False)[1:-1] in text:
        return False
    return " ".join(part.split()) not in " ".join(text.split())
