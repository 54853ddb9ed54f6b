"""Finds which part of a conversation's text is the assistant's, also where its template has no marks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.data.conversations.chat_template import ChatTemplate
from plait.data.conversations.examples import ChatExample
from plait.errors import PlaitError

# Note [answers are found by rendering prefixes]: a template without generation marks is rendered up to each answer, as
# if the model were to give it now, and again with it. What the second text adds to the first is the answer, and with it
# the end of turn that the model must learn to write. This holds only where a template leaves earlier text as it was:
# some strip earlier reasoning, or move the system message. Then what is learnt would not be what the model reads later,
# so such a conversation is refused.


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedText:
    """A text, and the ranges of its characters that are learnt, in order and apart from each other."""

    text: str
    learned: tuple[tuple[int, int], ...]


def marked_text(example: ChatExample, template: ChatTemplate, ends: Sequence[str]) -> MarkedText:
    """A conversation's text and its answers; `ends` are the texts of special tokens.

    Raises PlaitError where the template refuses it, changes earlier text, or leaves nothing to learn.
    """
    try:
        text, spans = _by_marks(example, template) if template.marks_answers else _by_prefixes(example, template)
    except PlaitError as error:
        raise PlaitError(f"{example.place}: {error}") from None
    learned = tuple(span for span in (_until_end_of_turn(text, span, ends) for span in spans) if span[1] > span[0])
    if not learned:
        raise PlaitError(f"{example.place}: the chat template marks no answer, so nothing is learnt; mend the template")
    return MarkedText(text=text, learned=learned)


def _by_marks(example: ChatExample, template: ChatTemplate) -> tuple[str, tuple[tuple[int, int], ...]]:
    chat = _chat(example)
    text, spans = template.render_marked(chat)
    for number, message in enumerate(example.messages):
        if message.use == "read":
            first, last = _range_of_answer(chat, number, text, template)
            spans = tuple((start, stop) for start, stop in spans if stop <= first or start >= last)
    if not example.learned_from:
        return text, spans
    before = template.render(chat[: example.learned_from])
    if not text.startswith(before):
        raise _changes_earlier_text(example.learned_from)
    return text, tuple((max(start, len(before)), stop) for start, stop in spans if stop > len(before))


def _by_prefixes(example: ChatExample, template: ChatTemplate) -> tuple[str, tuple[tuple[int, int], ...]]:
    chat = _chat(example)
    whole, _ = template.render_marked(chat)
    spans = []
    for number, message in enumerate(example.messages):
        if message.role == "assistant" and message.use == "learnt" and number >= example.learned_from:
            spans.append(_range_of_answer(chat, number, whole, template))
    return whole, tuple(spans)


def _range_of_answer(
    chat: Sequence[dict[str, str]], number: int, whole: str, template: ChatTemplate
) -> tuple[int, int]:
    """Where an answer begins and ends in the whole text; see Note [answers are found by rendering prefixes]."""
    before = template.render(chat[:number])
    after, _ = template.render_marked(chat[: number + 1])
    if not (whole.startswith(after) and after.startswith(before)):
        raise _changes_earlier_text(number)
    return len(before), len(after)


def _changes_earlier_text(number: int) -> PlaitError:
    return PlaitError(
        f"the chat template changes earlier text once message {number + 1} follows, so it cannot be told what "
        "the model would read; bring a template that only adds, or one with {% generation %} around answers"
    )


def _chat(example: ChatExample) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in example.messages]


def _until_end_of_turn(text: str, span: tuple[int, int], ends: Sequence[str]) -> tuple[int, int]:
    """Without the white space behind an end of turn: the model stops there, and never writes it."""
    start, stop = span
    said = text[start:stop].rstrip()
    return (start, start + len(said)) if any(end and said.endswith(end) for end in ends) else span
