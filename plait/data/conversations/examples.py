"""Examples to learn from: conversations, and prompts with their completions, read from the columns of records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from plait.data.conversations.message_keys import (
    Use,
    further_keys,
    reasoning_of,
    refuse_columns,
    texts_in,
    tools_of,
    use_of_answer,
)
from plait.data.documents import Record
from plait.errors import PlaitError

SampleFormat = Literal["text", "chat", "prompt-completion", "preference"]

MessageRole = Literal["system", "user", "assistant", "tool"]
_ROLES: tuple[MessageRole, ...] = ("system", "user", "assistant", "tool")
_OLDER_ROLES: dict[str, MessageRole] = {"human": "user", "gpt": "assistant", **{role: role for role in _ROLES}}
_MAY_FOLLOW: dict[MessageRole | None, tuple[MessageRole, ...]] = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
_MOST_NAMES = 12
QUESTION_COLUMNS = ("question", "instruction", "prompt", "query")
ANSWER_COLUMNS = ("answer", "response", "output", "reply")
"""The usual names, in tables and data sets, of a question and its answer: a chat of two messages."""
_BESIDE_QUESTION = ("input", "context")
"""The column for a question's context, as Alpaca's and Dolly's data sets name it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a conversation."""

    role: MessageRole
    content: str
    use: Use = "learned"
    """Whether an assistant's message is learned, or only read, which does not teach the model to answer so."""
    further: Mapping[str, object] = field(default_factory=dict[str, object])
    """Other values that a template may read: tool calls, reasoning, a tool's name."""

    @property
    def values(self) -> Mapping[str, object]:
        """The message as a template gets it; a call of tools may say nothing else."""
        said = {} if not self.content and "tool_calls" in self.further else {"content": self.content}
        return {"role": self.role, **said, **self.further}

    @property
    def every_text(self) -> Iterator[str]:
        """Its content, and every text beside it."""
        yield self.content
        if self.further:
            yield from texts_in(self.further)

    @property
    def is_learnt(self) -> bool:
        """Whether it is an answer that is learned."""
        return self.role == "assistant" and self.use == "learned"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatExample:
    """A validated chat whose assistant turns are trained on: roles alternate, at least one answer, none empty."""

    place: str
    messages: tuple[ChatMessage, ...]
    learned_from: int = 0
    """Messages before this one are only read, those of the assistant too."""
    tools: object = None
    """The tools that the model may call, as a list; None: none."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Its texts, in order."""
        return tuple(text for one in self.messages for text in (*reasoning_of(one.further), one.content))

    @property
    def question(self) -> str:
        """Everything before the first answer: conversations with the same one are held out together, or not at all."""
        return "\0".join(message.content for message in self.messages[: _first_answer(self.messages)])


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptExample:
    """A prompt, and the text that is learned after it."""

    place: str
    prompt: str
    completion: str

    @property
    def texts(self) -> tuple[str, ...]:
        """Its texts, in order."""
        return self.prompt, self.completion

    @property
    def question(self) -> str:
        """The prompt: all examples with the same one are held out, or none."""
        return self.prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class TextExample:
    """A document that is learned from its first token to its last."""

    place: str
    text: str

    @property
    def texts(self) -> tuple[str, ...]:
        """The text."""
        return (self.text,)

    @property
    def question(self) -> str:
        """The text itself: equal ones are held out together."""
        return self.text


Example = ChatExample | PromptExample | TextExample


def chat_example(record: Record, column: str) -> ChatExample:
    """The conversation in one column, a "system" column before it; raises PlaitError naming the record where it is
    none, or nothing in it can be learned."""
    place = record.place
    turns = column_value(record, column, "a chat", 'the list of messages ("messages")')
    if column in QUESTION_COLUMNS and isinstance(turns, str):
        turns = _turns_of_columns(record, column)
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise PlaitError(f'{place}: "{column}" is not a list of messages', 'write [{"role": …, "content": …}, …]')
    refuse_columns(record)
    messages = tuple(chat_message(f"{place}, message {number}", turn) for number, turn in enumerate(turns, start=1))
    check_turns(place, messages)
    if all(message.use == "read" for message in messages if message.role == "assistant"):
        raise PlaitError(f"{place} says that no answer is learned (by weight or train)", "leave such records out")
    return ChatExample(place=place, messages=(*system_column(record, messages), *messages), tools=tools_of(record))


def answer_column(values: Mapping[str, object]) -> str:
    """The column that holds the answer, of a usual name; empty where there is none."""
    return next((column for column in ANSWER_COLUMNS if column in values), "")


def question_column(values: Mapping[str, object]) -> str:
    """The column that holds a question, where there is a column with its answer as well; else empty."""
    column, answer = (
        next((one for one in QUESTION_COLUMNS if isinstance(values.get(one), str)), ""),
        answer_column(values),
    )
    return column if answer and isinstance(values[answer], str) else ""


def _turns_of_columns(record: Record, column: str) -> list[dict[str, object]]:
    """A question and its answer as messages; what stands beside the question as "input" or "context" belongs to it."""
    named = answer_column(record.values) or ANSWER_COLUMNS[0]
    answer = column_value(record, named, "a question", f'its answer ("{named}")')
    given = [text for name in _BESIDE_QUESTION if isinstance(text := record.values.get(name), str) and text]
    question = "\n\n".join([str(record.values[column]), *given])
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def system_column(record: Record, messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """What a column "system" says, as the message that comes first; none where it is empty, or is that message.
    Raises PlaitError where the conversation has another one."""
    text = record.values.get("system")
    if text is None or text == "":
        return ()
    if not isinstance(text, str):
        raise PlaitError(f'{record.place}: "system" is {kind_of_value(text)}, not a text', "write a string")
    first = messages[0]
    if first.role != "system":
        return (ChatMessage(role="system", content=encodable_text(record.place, text)),)
    if first.content != text:
        raise PlaitError(
            f'{record.place} has a column "system" and another system message', "write both as one, in the message"
        )
    return ()


def prompt_example(record: Record) -> PromptExample:
    """The texts in the columns "prompt" and "completion"; raises PlaitError naming the record that has none."""
    texts = []
    for column in ("prompt", "completion"):
        text = column_value(record, column, "a prompt with its completion", '"prompt" and "completion"')
        if not isinstance(text, str):
            raise PlaitError(
                f'{record.place}: "{column}" is {kind_of_value(text)}, not a text',
                'write a string (lists of messages are read as a chat: one list under "messages")',
            )
        texts.append(encodable_text(record.place, text))
    if not texts[1]:
        raise PlaitError(
            f"{record.place}: the completion is empty, so nothing is learned", "correct or remove that record"
        )
    return PromptExample(place=record.place, prompt=texts[0], completion=texts[1])


def column_value(record: Record, column: str, what: str, wanted: str) -> object:
    """The value in a column; raises PlaitError, naming the existing columns, if it is missing."""
    if column in record.values:
        return record.values[column]
    raise PlaitError(f'{record.place} has no column "{column}": {what} needs {wanted}', f"there are {_names(record)}")


def _names(record: Record) -> str:
    names = [ascii(name)[1:-1][:40] for name in record.values]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return (", ".join(names[:_MOST_NAMES]) + more) or "none"


def chat_message(place: str, turn: object) -> ChatMessage:
    """A message as {"role", "content"}, or in the older form {"from", "value"}; raises PlaitError for what is none."""
    if not isinstance(turn, Mapping):
        raise PlaitError(f"{place} is {kind_of_value(turn)}", 'write {"role": "user", "content": "…"}')
    role, content = (turn.get(key, turn.get(older)) for key, older in (("role", "from"), ("content", "value")))
    known = _OLDER_ROLES.get(role) if isinstance(role, str) else None
    if known is None:
        named = f'has the role "{role}"' if isinstance(role, str) else "has no role"
        raise PlaitError(f"{place} {named}", f"known are {', '.join(_ROLES)}")
    further = further_keys(place, turn)
    content = "" if content is None and "tool_calls" in further else content
    if not isinstance(content, str):
        raise PlaitError(f"{place}: its content is {kind_of_value(content)}, not a text", "write a string")
    use = use_of_answer(place, turn) if known == "assistant" else "learned"
    return ChatMessage(role=known, content=encodable_text(place, content), use=use, further=further)


def check_turns(place: str, messages: Sequence[ChatMessage]) -> None:
    """Raise PlaitError unless system comes first, if at all, then user and assistant in turn, calls of tools with their
    results between them, and there is an answer."""
    for number, message in enumerate(messages, start=1):
        before = messages[number - 2].role if number > 1 else None
        if message.role not in _MAY_FOLLOW[before]:
            after = f"follows {before}" if before else "comes first"
            raise PlaitError(
                f"{place}, message {number}: the role {message.role} {after}",
                "a conversation is an optional system, then user and assistant in turn",
            )
        if message.role == "assistant" and not message.content and "tool_calls" not in message.further:
            raise PlaitError(f"{place}, message {number}: the assistant says nothing", "correct or remove that chat")
    if _first_answer(messages) == len(messages):
        raise PlaitError(f"{place} has no answer of the assistant, so nothing is learned", "correct or remove it")


def _first_answer(messages: Sequence[ChatMessage]) -> int:
    return next((n for n, message in enumerate(messages) if message.role == "assistant"), len(messages))


def encodable_text(place: str, text: str) -> str:
    """The text; raises PlaitError where it has no bytes in UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise PlaitError(f"{place}: the text holds half of a surrogate pair", "correct or remove that record") from None
    return text


def kind_of_value(value: object) -> str:
    """The kind of a value that should have been another, in words."""
    return "nothing" if value is None else f"of the type {type(value).__name__}"
