"""Pairs to learn a preference from: a prompt with the answer that is preferred and the one that is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.data.conversations.examples import (
    ChatExample,
    ChatMessage,
    Example,
    PromptExample,
    chat_message,
    check_turns,
    column_value,
    encodable_text,
    kind_of_value,
    system_column,
)
from plait.data.conversations.message_keys import refuse_columns, tools_of
from plait.data.documents import Record
from plait.errors import PlaitError

ANSWERS = ("chosen", "rejected")
"""The columns of the two answers, in the order in which they are kept."""
_WANTED = '"prompt", "chosen" and "rejected"'
_ADVICE = "correct or remove that pair"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairExample:
    """Two examples with one prompt; checked: both answers say something, and not the same."""

    place: str
    chosen: ChatExample | PromptExample
    rejected: ChatExample | PromptExample

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts of both, with the prompt twice."""
        return *self.chosen.texts, *self.rejected.texts

    @property
    def question(self) -> str:
        """The prompt up to its first answer: all pairs with the same one are held out, or none."""
        return self.chosen.question


def parts_of(example: Example | PairExample) -> tuple[Example, ...]:
    """The examples that are encoded each for itself: of a pair both."""
    return (example.chosen, example.rejected) if isinstance(example, PairExample) else (example,)


def preference_example(record: Record) -> PairExample:
    """The pair in the columns "prompt", "chosen" and "rejected": three texts, or lists of messages; raises PlaitError
    naming the record that has none.

    Where the answers are lists, what both begin with alike belongs to the prompt, and the column "prompt" may be
    missing.
    """
    chosen, rejected = (column_value(record, column, "a pair", _WANTED) for column in ANSWERS)
    if isinstance(chosen, str) and isinstance(rejected, str):
        return _pair_of_texts(record, chosen, rejected)
    for column, answer in zip(ANSWERS, (chosen, rejected), strict=True):
        if not _is_list(answer):
            raise PlaitError(
                f'{record.place}: "{column}" is {kind_of_value(answer)}',
                "write both answers as texts, or both as lists of messages",
            )
    return _pair_of_chats(record, chosen, rejected)


def _pair_of_texts(record: Record, chosen: str, rejected: str) -> PairExample:
    place, prompt = record.place, column_value(record, "prompt", "a pair", _WANTED)
    if not isinstance(prompt, str):
        raise PlaitError(
            f'{place}: "prompt" is {kind_of_value(prompt)} and the answers are texts',
            "write a text, or all three as lists of messages",
        )
    for column, answer in zip(ANSWERS, (chosen, rejected), strict=True):
        if not answer:
            raise PlaitError(f"{place}: the {column} answer is empty", _ADVICE)
    prompt, chosen, rejected = (encodable_text(place, text) for text in (prompt, chosen, rejected))
    if chosen == rejected:
        raise _equal_answers(place)
    return PairExample(
        place=place,
        chosen=PromptExample(place=f"{place}, chosen", prompt=prompt, completion=chosen),
        rejected=PromptExample(place=f"{place}, rejected", prompt=prompt, completion=rejected),
    )


def _pair_of_chats(record: Record, chosen: object, rejected: object) -> PairExample:
    refuse_columns(record)
    first, second = (
        _conversation(record, column, turns) for column, turns in ((ANSWERS[0], chosen), (ANSWERS[1], rejected))
    )
    common = next((n for n, (one, other) in enumerate(zip(first, second, strict=False)) if one != other), None)
    if common is None:
        if len(first) == len(second):
            raise _equal_answers(record.place)
        raise PlaitError(f"{record.place}: one answer is how the other begins", _ADVICE)
    for column, messages in zip(ANSWERS, (first, second), strict=True):
        check_turns(f"{record.place}, {column}", messages)
    if first[common].role != "assistant":
        raise PlaitError(
            f"{record.place}: the two conversations differ in message {common + 1}, which is the "
            f"{first[common].role}'s",
            "both need one prompt, so that only the assistant's answers differ",
        )
    for column, messages in zip(ANSWERS, (first, second), strict=True):
        if any(message.use == "read" for message in messages[common:]):
            raise PlaitError(f"{record.place}: the {column} answer is said not to be learned (weight, train)", _ADVICE)
    head, tools = system_column(record, first), tools_of(record)
    parts = (
        ChatExample(
            place=f"{record.place}, {column}",
            messages=(*head, *messages),
            learned_from=len(head) + common,
            tools=tools,
        )
        for column, messages in zip(ANSWERS, (first, second), strict=True)
    )
    return PairExample(place=record.place, chosen=next(parts), rejected=next(parts))


def _conversation(record: Record, column: str, turns: object) -> tuple[ChatMessage, ...]:
    """The whole conversation that ends with one answer: what the prompt holds, and then these messages."""
    assert isinstance(turns, Sequence)
    if not turns:
        raise PlaitError(f"{record.place}: the {column} answer is empty", _ADVICE)
    answer = _messages(f"{record.place}, {column}", turns)
    prompt = record.values.get("prompt")
    if isinstance(prompt, Sequence) and not isinstance(prompt, str):
        return *_messages(f"{record.place}, prompt", prompt), *answer
    if isinstance(prompt, str) and answer[0].role == "assistant":
        return ChatMessage(role="user", content=encodable_text(record.place, prompt)), *answer
    return answer  # a whole conversation, with its prompt


def _messages(place: str, turns: Sequence[object]) -> tuple[ChatMessage, ...]:
    return tuple(chat_message(f"{place}, message {number}", turn) for number, turn in enumerate(turns, start=1))


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _equal_answers(place: str) -> PlaitError:
    return PlaitError(f"{place}: the chosen and the rejected answer are equal, so there is no preference", _ADVICE)
