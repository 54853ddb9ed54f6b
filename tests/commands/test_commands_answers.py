"""What `plait eval` and `plait chat` write, word for word; and a conversation with a model of a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from math import inf
from pathlib import Path

import pytest

from plait.commands.answering.chat import AnswerSettings, open_chat, talk
from plait.commands.answering.choices import ask_choices
from plait.commands.evaluate import Evaluation, evaluation_of
from plait.data.conversations.chat_template import token_text, tokenizer_settings
from plait.errors import PlaitError
from plait.launch.local.output import OptionalOutput
from plait.screen.screen import SilentScreen
from plait.working_folder import WorkingFolder
from tests.commands.golden import assert_golden
from tests.interop.folders import write_model

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
QUESTIONS = '{"question": "to be", "choices": ["or not to be", "quite"], "answer": 0}\n'


class Actor:
    """A conversation whose answers are known."""

    def __init__(self, *answers: str, adapters: Sequence[str] = ()) -> None:
        self.messages: list[dict[str, str]] = []
        self.adapters, self.taken = adapters, list[str]()
        self._answers = iter(answers)

    def take_adapter(self, name: str) -> None:
        self.taken.append(name)

    def say(self, text: str) -> Iterator[str]:
        self.messages.append({"role": "user", "content": text})
        yield from next(self._answers).split("|")


def test_an_evaluation_reads_like_this() -> None:
    found = (
        evaluation_of(800, 3900.0, 1000, 2600),
        evaluation_of(0, 117_000.0, 30_000, 100_000),
        Evaluation(step=0, questions=1000, choices_accuracy=0.412, choices_accuracy_per_byte=0.5),
    )
    assert_golden("eval", "\n".join(f"{one}\n{one.in_words()}" for one in found))
    assert evaluation_of(1, 1e6, 10, 10).perplexity == inf


def test_a_conversation_reads_like_this() -> None:
    out, actor = StringIO(), Actor("Good| day|!", "Paris|.")
    talk(
        actor, StringIO("Hello\n\nWhat is the capital of France?\n/quit\nnever read\n"), OptionalOutput(out), "terminal"
    )
    assert_golden("chat", out.getvalue().rstrip("\n"))
    assert [message["content"] for message in actor.messages] == ["Hello", "What is the capital of France?"]
    piped = StringIO()
    talk(Actor("one", "two"), StringIO("a\nb"), OptionalOutput(piped), "pipe")
    assert piped.getvalue() == "one\ntwo\n"


def test_something_moves_from_a_message_to_the_first_words_of_its_answer() -> None:
    out, shown = StringIO(), list[str]()

    @contextmanager
    def waiting() -> Iterator[None]:
        shown.append(out.getvalue())
        yield
        shown.append(out.getvalue())

    talk(Actor("Good| day", "Paris"), StringIO("Hello\nBye"), OptionalOutput(out), "pipe", waiting=waiting)
    assert shown == ["", "", "Good day\n", "Good day\n"] and out.getvalue() == "Good day\nParis\n"


def test_a_line_takes_another_adapter() -> None:
    out, actor = StringIO(), Actor("one", "two", adapters=("none", "runs/chats"))
    talk(actor, StringIO("a\n/adapter runs/chats\nb\n"), OptionalOutput(out), "terminal")
    assert actor.taken == ["runs/chats"] and [message["content"] for message in actor.messages] == ["a", "b"]
    first = out.getvalue().splitlines()[0]
    assert first == "chat     each line is a message; /adapter NAME takes another one; /quit ends"


def test_a_model_of_a_folder_talks_by_its_own_template(tmp_path: Path) -> None:
    write_model(tmp_path / "base")
    working, settings = WorkingFolder(tmp_path), AnswerSettings(tokens=6, temperature=0, seed=2)
    with pytest.raises(PlaitError, match=r"base has no chat template.*put its chat_template.jinja into .*/base"):
        open_chat("base", settings, working=working)
    config = tmp_path / "base" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    answers = []
    for _ in range(2):
        conversation = open_chat("base", settings, working=working)
        answers.append(["".join(conversation.say(text)) for text in ("to be", "or not")])
        assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 2
    assert answers[0] == answers[1] and all(answers[0])
    (tmp_path / "base" / "chat_template.jinja").write_text("{{ raise_exception('no') }}")  # is looked for first
    with pytest.raises(PlaitError, match=r"chat_template.jinja refuses these messages \(no\)"):
        list(open_chat("base", settings, working=working).say("to be"))


def test_a_model_of_a_folder_answers_questions(tmp_path: Path) -> None:
    write_model(tmp_path / "base")
    (tmp_path / "q.jsonl").write_text(QUESTIONS)
    found = ask_choices("base", tmp_path / "q.jsonl", screen=SilentScreen(), working=WorkingFolder(tmp_path))
    assert found.keys() == {"step", "questions", "choices_accuracy", "choices_accuracy_per_byte"}
    assert found["step"] == 0 and found["questions"] == 1 and found["choices_accuracy"] in (0.0, 1.0)


def test_an_answer_ends_where_a_tokenizer_without_a_longest_text_says(tmp_path: Path) -> None:
    """transformers writes int(1e30) for "no longest text": a number of 31 digits among the keys that name the end."""
    settings = {"eos_token": {"content": "<|im_end|>"}, "model_max_length": int(1e30)}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert token_text(tokenizer_settings(tmp_path), "eos_token") == "<|im_end|>"
