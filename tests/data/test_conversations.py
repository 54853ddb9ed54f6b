"""Chats and prompts as tokens: what is learned of them, and what is refused in one sentence."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from plait.data.conversations.chat_template import PLAIN_TEMPLATE, ChatTemplate, MarkedText, TemplateText
from plait.data.conversations.encode import ExampleEncoder
from plait.data.conversations.examples import ChatExample, ChatMessage
from plait.data.preparation.build import DataRequest
from plait.data.preparation.prepare import find_prepared, prepare_corpus
from plait.data.preparation.tokens import Tokenizer, corpus_tokenizer, load_tokenizer
from plait.data.shards import Corpus, open_corpus
from plait.data.sources import Source
from plait.errors import PlaitError

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}{{ message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}"
    "{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
STRIPS_EARLIER = (
    "{% for message in messages %}{{ message['role'] + ': ' }}{% if loop.last %}{{ message['content'] }}{% else %}"
    "{{ message['content'][:3] }}{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
ENDS = ("<|im_start|>", "<|im_end|>")
Prepare = Callable[..., Corpus]


def chat(*texts: str, system: str = "") -> list[dict[str, str]]:
    """A system message if there is one, then user and assistant in turn."""
    turns = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *turns] if system else turns


def example(*texts: str, system: str = "") -> ChatExample:
    messages = tuple(ChatMessage(**turn) for turn in chat(*texts, system=system))  # type: ignore[arg-type]
    return ChatExample(place="here:1", messages=messages)


def template(text: str) -> ChatTemplate:
    return ChatTemplate(TemplateText(text=text, where="a test", special={"eos_token": "<|im_end|>"}))


def marked_text(one: ChatExample, by: ChatTemplate, ends: Sequence[str]) -> MarkedText:
    (found,) = by.learned([one], ends)
    if isinstance(found, PlaitError):
        raise found
    return found


def learnt_of(one: ChatExample, text: str) -> list[str]:
    marked = marked_text(one, template(text), ENDS)
    return [marked.text[start:stop] for start, stop in marked.learned]


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """The small tokenizer with ChatML's two tokens and its template."""
    folder = tmp_path_factory.mktemp("chatml")
    definition = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    first = max(definition["model"]["vocab"].values()) + 1
    shape = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    definition["added_tokens"] += [
        {"id": first + n, "content": token, "special": True, **shape} for n, token in enumerate(ENDS)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": CHATML}))
    return folder


@pytest.fixture
def prepare(tmp_path: Path, chat_tokenizer: Path) -> Prepare:
    """Prepare lines of JSON as a corpus."""

    def corpus(*rows: Any, name: str = "chats.jsonl", holdout: float = 0.0, **options: Any) -> Corpus:
        (tmp_path / name).write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        request = DataRequest(
            sources=(Source(str(tmp_path / name)),),
            tokenizer=options.pop("tokenizer", str(chat_tokenizer)),
            vocabulary=None,
            holdout=holdout,
            **options,
        )
        return open_corpus(prepare_corpus(request, tmp_path / "cache", lambda *_: None))

    return corpus


def learned_texts(corpus: Corpus) -> list[str]:
    """Each example's text, what is learned of it in brackets."""
    tokenizer, found = corpus_tokenizer(corpus), []
    for shard in corpus.train:
        bounds = [*shard.starts.tolist(), len(shard.tokens) - 1]
        for first, last in itertools.pairwise(bounds):
            found.append(
                _bracketed(tokenizer, shard.tokens[first:last], shard.mask_rows(np.array([first]), last - first)[0])
            )
    return found


def _bracketed(tokenizer: Tokenizer, ids: Any, marks: Any) -> str:
    edges = [0, *(np.flatnonzero(np.diff(marks)) + 1).tolist(), len(ids)]
    texts = [tokenizer.decode(ids[first:last].tolist()) for first, last in itertools.pairwise(edges)]
    return "".join(text if marks[first] else f"[{text}]" for text, first in zip(texts, edges, strict=False))


@pytest.mark.parametrize("text", [CHATML, MARKED])
def test_the_answers_and_their_ends_are_learnt_and_nothing_else(text: str) -> None:
    one = example("Hi", "Hello.", "Who?", "I am.", system="Be short.")
    marked = marked_text(one, template(text), ENDS)
    assert [marked.text[start:stop] for start, stop in marked.learned] == ["Hello.<|im_end|>", "I am.<|im_end|>"]
    assert marked.text.startswith("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n")


def test_the_plain_template_is_marked_and_ends_each_answer() -> None:
    one = example("Hi", "Hello.", "Who?", "I am.")
    plain = ChatTemplate(TemplateText(text=PLAIN_TEMPLATE, where="plain", special={"eos_token": "<end>"}))
    marked = marked_text(one, plain, ["<end>"])
    assert marked.text == "User:\nHi\n\nAssistant:\nHello.<end>\n\nUser:\nWho?\n\nAssistant:\nI am.<end>\n\n"
    assert [marked.text[start:stop] for start, stop in marked.learned] == ["Hello.<end>", "I am.<end>"]
    assert plain.render(chat("Hi")) == "User:\nHi\n\nAssistant:\n"


def test_where_a_template_changes_earlier_text_only_the_last_answer_is_learnt() -> None:
    assert learnt_of(example("Hi", "Hello."), STRIPS_EARLIER) == ["Hello.\n"]
    assert learnt_of(example("What", "No way.", "Why", "It is so."), STRIPS_EARLIER) == ["It is so.\n"]
    found = marked_text(example("What", "No way.", "Why", "It is so."), template(STRIPS_EARLIER), ENDS)
    assert "last answers" in found.remarks and "lost assistant" in found.remarks
    moves = "{% for m in messages|reverse %}{{ m.content }};{% endfor %}"
    with pytest.raises(PlaitError, match=r"here:1: the chat template changes earlier text once message 2 follows"):
        marked_text(example("Hi", "Hello."), template(moves), ENDS)


def test_a_template_may_not_leave_the_sandbox_and_sees_a_fixed_date() -> None:
    with pytest.raises(PlaitError, match=r"here:1: the chat template in a test refuses these messages"):
        marked_text(example("Hi", "Hello."), template("{{ ''.__class__.__mro__[1].__subclasses__() }}"), ENDS)
    assert template("{{ strftime_now('%d %b %Y') }}").render(chat("Hi")) == "26 Jul 2024"
    with pytest.raises(PlaitError, match="is not valid"):
        template("{% for %}")
    with pytest.raises(PlaitError, match="marks no answer"):
        marked_text(example("Hi", "Hello."), template("{% generation %}{% endgeneration %}"), ENDS)


def test_tokens_are_those_of_the_whole_text_and_stop_at_the_last_learnt(chat_tokenizer: Path) -> None:
    tokenizer = load_tokenizer(chat_tokenizer)
    one = example("Hi", "Hello.", "Who?", "I am.", "Thanks")
    (found,) = ExampleEncoder(tokenizer, template(CHATML)).encode([one])
    whole = template(CHATML).render_marked(chat("Hi", "Hello.", "Who?", "I am."))[0].removesuffix("\n")
    assert tokenizer.decode(found.ids.tolist()) == whole
    assert found.mask[0] == 1 and found.mask[-1] == 0
    learned = tokenizer.decode(found.ids[found.mask == 0].tolist())
    assert learned == "Hello.<|im_end|>I am.<|im_end|>" and found.learned_bytes == len(learned)
    prompt = template(CHATML).render(chat("Hi"))
    ids = tokenizer.backend.encode(prompt, add_special_tokens=False).ids
    assert len(ids) >= int(np.flatnonzero(found.mask == 0)[0]), "the model reads the prompt in no fewer tokens"


def test_chats_are_prepared_with_their_template(prepare: Prepare, chat_tokenizer: Path) -> None:
    corpus = prepare(
        {"messages": chat("Hi", "Hello."), "id": 1},
        {"messages": chat("What?", "No.", "Why?", "So.", "Oh", system="Short.")},
    )
    assert (corpus.layout, corpus.template) == ("whole", str(chat_tokenizer / "tokenizer_config.json"))
    first, second = learned_texts(corpus)
    assert first == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Hello.<|im_end|>]"
    assert second.endswith(
        "assistant\n[No.<|im_end|>]\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n[So.<|im_end|>]"
    )
    assert (corpus.folder / "chat_template.jinja").read_text() == CHATML
    assert corpus.train_bytes == len("Hello.<|im_end|>No.<|im_end|>So.<|im_end|>")


def test_the_older_form_of_chats_is_the_same_corpus_of_tokens(prepare: Prepare) -> None:
    new = prepare({"messages": chat("Hi", "Hello.")})
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]
    old = prepare({"conversations": turns}, name="old.jsonl")
    assert learned_texts(old) == learned_texts(new)
    assert old.content_hash == new.content_hash


def test_prompts_with_completions_end_with_the_end_of_text(prepare: Prepare) -> None:
    corpus = prepare({"prompt": "1 + 1 =", "completion": " 2"}, {"prompt": "", "completion": "Yes"})
    assert learned_texts(corpus) == ["<|endoftext|>1 + 1 =[ 2<|endoftext|>]", "<|endoftext|>[Yes<|endoftext|>]"]
    assert corpus.template == ""


def test_text_beside_chats_is_learnt_whole(tmp_path: Path, chat_tokenizer: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat("Hi", "Hello.")}) + "\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "A story."}) + "\n")
    sources = (Source(str(tmp_path / "a.jsonl"), 3.0), Source(str(tmp_path / "b.jsonl"), 1.0))
    request = DataRequest(sources=sources, tokenizer=str(chat_tokenizer), vocabulary=None, holdout=0.0)
    corpus = open_corpus(prepare_corpus(request, tmp_path / "cache", lambda *_: None))
    assert corpus.weights == (3.0, 1.0) and {shard.source for shard in corpus.train} == {0, 1}
    assert learned_texts(corpus)[1] == "<|endoftext|>[A story.<|endoftext|>]"


def test_without_a_template_the_plain_one_is_taken_and_kept(prepare: Prepare, tokenizer_folder: Path) -> None:
    corpus = prepare({"messages": chat("Hi", "Hello.")}, tokenizer=str(tokenizer_folder))
    assert corpus.template == "plait's plain one"
    assert learned_texts(corpus) == ["User:\nHi\n\nAssistant:\n[Hello.<|endoftext|>]"]
    assert (corpus.folder / "chat_template.jinja").read_text() == PLAIN_TEMPLATE


def test_the_same_chats_are_found_again_and_another_template_is_another_corpus(
    prepare: Prepare, tmp_path: Path, tokenizer_folder: Path
) -> None:
    rows = [{"messages": chat("Hi", "Hello.")}]
    first = prepare(*rows)
    request = DataRequest(
        sources=(Source(str(tmp_path / "chats.jsonl")),), tokenizer=str(tokenizer_folder), vocabulary=None, holdout=0.0
    )
    assert prepare(*rows).folder == first.folder
    assert find_prepared(request, tmp_path / "cache") is None
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "chat_template.jinja").write_text(MARKED)
    other = prepare(*rows, template_folders=(tmp_path / "own",))
    assert other.folder != first.folder and other.content_hash == first.content_hash, "the tokens are the same"


def test_conversations_are_held_out_by_their_prompt(prepare: Prepare) -> None:
    rows = [{"messages": chat(f"Question {n}?", f"Answer {n} {turn}.")} for n in range(60) for turn in range(3)]
    corpus = prepare(*rows, holdout=0.2)
    tokenizer = corpus_tokenizer(corpus)

    def prompts(shards: Sequence[Any]) -> list[str]:
        texts = [tokenizer.decode(shard.tokens[:-1].tolist()) for shard in shards]
        return [part.partition("<|im_end|>")[0] for text in texts for part in text.split("<|im_start|>user\n")[1:]]

    trained, held = prompts(corpus.train), prompts(corpus.heldout)
    assert len(trained) + len(held) == 180 and 9 < len(held) < 90
    assert not set(trained) & set(held) and all(held.count(one) == 3 for one in held)


BAD: dict[str, tuple[Any, str]] = {
    "assistant first": ([chat("a", "b")[1]], r"message 1: the role assistant comes first; a conversation is"),
    "user twice": ([chat("a")[0], chat("a")[0]], r"message 2: the role user follows user; a conversation is"),
    "system late": ([*chat("a", "b"), {"role": "system", "content": "c"}], r"the role system follows assistant"),
    "empty answer": (chat("a", ""), r"message 2: the assistant says nothing; correct or remove"),
    "no answer": (chat("a"), r"has no answer of the assistant, so nothing is learned"),
    "unknown role": ([{"role": "robot", "content": "a"}], r'message 1 has the role "robot"; known are system, user'),
    "no role": ([{"content": "a"}], r"message 1 has no role; known are"),
    "no text": ([{"role": "user", "content": None}], r"message 1: its content is nothing, not a text"),
    "parts": ([{"role": "user", "content": ["a"]}], r"its content is of the type list, not a text"),
    "no message": (["a"], r"message 1 is of the type str; write"),
    "no messages": ([], r'"messages" is not a list of messages; write'),
    "special": (chat("a", "b <|im_end|> c"), r'message 2 holds "<\|im_end\|>", which has a meaning of its own'),
    "half a pair": (chat("a", "b \ud800"), r"message 2: the text holds half of a surrogate pair"),
    "edges": (chat("a", "b \ufdd0"), r"holds U\+FDD0 or U\+FDD1, which are not characters"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_learnt_is_refused_with_its_line_and_nothing_is_written(
    name: str, prepare: Prepare, tmp_path: Path
) -> None:
    messages, sentence = BAD[name]
    with pytest.raises(PlaitError, match=rf"chats\.jsonl:2.*{sentence}") as raised:
        prepare({"messages": chat("x", "y")}, {"messages": messages}, format="chat")
    assert "\n" not in str(raised.value)
    assert [path for path in (tmp_path / "cache" / "data").iterdir() if path.is_dir()] == []


def test_missing_columns_and_broken_lines_are_named(prepare: Prepare, tmp_path: Path) -> None:
    with pytest.raises(PlaitError, match=r'chats\.jsonl:2 has no column "messages": a chat needs .*; there are a, b$'):
        prepare({"messages": chat("x", "y")}, {"a": 1, "b": 2})
    with pytest.raises(PlaitError, match=r'chats\.jsonl:1 has no column "completion": .*; there are prompt, answer$'):
        prepare({"prompt": "x", "answer": "y"}, format="prompt-completion")
    with pytest.raises(PlaitError, match=r'"prompt" is of the type list, not a text'):
        prepare({"prompt": chat("x"), "completion": chat("y")}, format="prompt-completion")
    with pytest.raises(PlaitError, match=r"the completion is empty, so nothing is learned"):
        prepare({"prompt": "x", "completion": ""}, format="prompt-completion")
    with pytest.raises(PlaitError, match=r"chats\.jsonl:2 is not JSON .*; write one JSON object on each line"):
        prepare({"messages": chat("x", "y")}, '{"messages": [')
    with pytest.raises(PlaitError, match=r"chats\.jsonl:2 is not a JSON object; write one JSON object on each line"):
        prepare({"messages": chat("x", "y")}, "[1]")
    with pytest.raises(PlaitError, match=r"play\.txt is plain text, which has no columns; give JSONL, CSV or Parquet"):
        prepare("words", name="play.txt", format="chat")


def test_text_beside_messages_is_learnt_where_it_is_asked_for(prepare: Prepare) -> None:
    both = {"text": "A story.", "messages": chat("Hi", "Hello.")}
    with pytest.raises(
        PlaitError, match=r'chats\.jsonl:1 has "text" and "messages", .*; write data\.format = "chat" to'
    ):
        prepare(both)
    assert prepare(both, format="text").layout == "stream"
    assert prepare(both, format="chat").layout == "whole"
    assert prepare({**both, "messages": None}).layout == "stream"


def answered(**more: Any) -> dict[str, Any]:
    """A record of a question and an answer with more keys."""
    return {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello.", **more}]}


NOTHING_MORE: dict[str, Any] = {
    "tool_calls": [],
    "function_call": {"name": None, "arguments": ""},
    "reasoning_content": "",
    "thinking": None,
    "weight": 1,
    "train": True,
    "masked": False,
}


def test_keys_that_say_nothing_more_change_nothing(prepare: Prepare) -> None:
    corpus = prepare({**answered(**NOTHING_MORE), "tools": "[]", "functions": None, "system": ""})
    assert learned_texts(corpus) == learned_texts(prepare(answered()))


LOST: dict[str, tuple[dict[str, Any], str]] = {
    "tool call": (
        answered(tool_calls=[{"function": {"name": "f"}}]),
        r'the chat template leaves out "tool_calls" \(f\); name one that writes them in data.chat_template',
    ),
    "function": (
        answered(function_call={"name": "f"}),
        r'message 2 has "function_call", which templates do not read; write',
    ),
    "half a weight": (answered(weight=0.5), r'message 2 has "weight": 0\.5, .* write 1 to learn it, 0 only to read it'),
    "a word": (answered(train="some"), r"message 2 has \"train\": 'some', and an answer is learned as a whole or not"),
    "none learned": (answered(weight=0), r"says that no answer is learned \(by weight or train\); leave such records"),
    "tools": ({**answered(), "tools": [{"name": "f"}]}, r'leaves out "tools" \(f\); name one'),
    "functions": ({**answered(), "functions": '[{"name": 1}]'}, r'has "functions", which templates do not read'),
    "system": ({**answered(), "system": ["a"]}, r'"system" is of the type list, not a text; write a string'),
    "two systems": (
        {"messages": chat("Hi", "Hello.", system="Be short."), "system": "Be kind."},
        r'has a column "system" and another system message; write both as one',
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_what_would_change_the_meaning_is_never_dropped(name: str, prepare: Prepare) -> None:
    record, sentence = LOST[name]
    with pytest.raises(PlaitError, match=rf"chats\.jsonl:2.*{sentence}") as raised:
        prepare(answered(), record)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("key", [{"weight": 0}, {"train": False}, {"masked": True}])
@pytest.mark.parametrize("form", [CHATML, MARKED])
def test_an_answer_without_weight_is_read_and_not_learnt(
    form: str, key: dict[str, Any], prepare: Prepare, tmp_path: Path
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "chat_template.jinja").write_text(form)
    first, second, *rest = chat("Hi", "Hello.", "Who?", "I am.")
    (found,) = learned_texts(
        prepare({"messages": [first, {**second, **key}, *rest]}, template_folders=(tmp_path / "own",))
    )
    assert found == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
        "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n[I am.<|im_end|>]"
    )


def test_a_system_column_is_the_first_message(prepare: Prepare) -> None:
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]
    column = prepare({"conversations": turns, "system": "Be short."})
    message = prepare({"messages": chat("Hi", "Hello.", system="Be short.")}, name="other.jsonl")
    assert learned_texts(column) == learned_texts(message)
    same = prepare({"messages": chat("Hi", "Hello.", system="Be short."), "system": "Be short."}, name="same.jsonl")
    assert learned_texts(same) == learned_texts(message)


def test_a_hold_out_that_takes_all_or_nothing_is_refused(prepare: Prepare) -> None:
    with pytest.raises(
        PlaitError, match=r"data\.holdout = 0\.001 of 2 examples holds nothing out \(those with the same"
    ):
        prepare({"messages": chat("Hi", "Hello.")}, {"messages": chat("Hi", "Hey.")}, holdout=0.001)


def test_parquet_holds_chats_too(tmp_path: Path, chat_tokenizer: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    rows = [{"messages": chat("Hi", "Hello.")}, {"messages": chat("What?", "No.")}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "chats.parquet")
    sources = (Source(str(tmp_path / "chats.parquet")),)
    request = DataRequest(sources=sources, tokenizer=str(chat_tokenizer), vocabulary=None, holdout=0.0)
    corpus = open_corpus(prepare_corpus(request, tmp_path / "cache", lambda *_: None))
    assert learned_texts(corpus)[1].endswith("[No.<|im_end|>]")


def test_a_template_tells_how_an_answer_ends() -> None:
    """A model converted from GGUF calls another token the end of a text than the one by which it ends a turn."""
    assert template(CHATML).after_answer() == "<|im_end|>\n"
    assert template("{% if messages|length > 1 %}{{ raise_exception('one') }}{% endif %}").after_answer() == ""


NO_PROMPT = CHATML.partition("{% if add_generation_prompt %}")[0]
NO_PROMPT_MARKED = MARKED.partition("{% if add_generation_prompt %}")[0]
MARKS_CONTENT = MARKED.replace("message['content'] + '<|im_end|>' }}{% end", "message['content'] }}{% end").replace(
    "{% endgeneration %}", "{% endgeneration %}<|im_end|>"
)


def transformers_mask(folder: Path, text: str, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|im_end|>")
    found: Any = theirs.apply_chat_template(
        messages, chat_template=text, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    return found["input_ids"], found["assistant_masks"]


@pytest.mark.parametrize("form", [CHATML, MARKED, NO_PROMPT, MARKS_CONTENT, NO_PROMPT_MARKED])
@pytest.mark.parametrize("texts", [("Hi", "Hello."), ("Hi", "Hello.", "Who?", "quite so"), ("a", "<|x|>", "b", " c ")])
def test_what_is_learnt_is_transformers_mask_of_the_marked_twin(
    form: str, texts: tuple[str, ...], chat_tokenizer: Path
) -> None:
    """Also where a template's marks leave out the end of turn, and where it ignores add_generation_prompt."""
    ids, mask = transformers_mask(chat_tokenizer, MARKED, chat(*texts, system="Be short."))
    (found,) = ExampleEncoder(load_tokenizer(chat_tokenizer), template(form)).encode(
        [example(*texts, system="Be short.")]
    )
    count = len(found.ids)
    assert found.ids.tolist() == ids[:count] and (1 - found.mask).tolist() == mask[:count] and not any(mask[count:])


def test_a_model_is_prompted_by_the_header_that_it_did_not_learn() -> None:
    assert template(NO_PROMPT).render(chat("Hi")) == template(CHATML).render(chat("Hi"))
    plain = "{% for m in messages %}{{ '[INST] ' + m.content + '[/INST]' if m.role == 'user' else ' ' + m.content }}"
    assert template(plain + "{% endfor %}").render(chat("Hi")) == "[INST] Hi[/INST]"
    assert learnt_of(example("Hi", "Hello."), plain + "{% endfor %}") == [" Hello."]


LOSSES = {
    "system": (
        "{% for m in messages if m.role != 'system' %}{{ m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}",
        example("Hi", "Hello.", system="Be short."),
    ),
    "reasoning": (
        "{% for m in messages %}{{ m.role + ':' + m.content.split('</think>')[-1] + '<|im_end|>' }}{% endfor %}",
        example("Hi", "<think>It is a greeting</think>Hello."),
    ),
    "user": ("{% for m in messages %}{{ m.role + ':' + m.content[:5] }}{% endfor %}", example("How are you?", "Well.")),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_text_that_a_template_leaves_out_is_remarked(kind: str) -> None:
    text, one = LOSSES[kind]
    assert f"lost {kind}" in marked_text(one, template(text), ENDS).remarks


def test_text_that_a_template_writes_in_another_way_is_not_lost() -> None:
    spaced = "{% for m in messages %}{{ m.role }}: {{ m.content | trim | tojson }}{% endfor %}"
    assert marked_text(example(" Hi\n", 'He said "no".\nTwice.'), template(spaced), ENDS).remarks == ()
    apart = example("Hi", "<think>\nHm\n</think>\n\nHello.")
    moved = "{% for m in messages %}{{ m.content.replace('<think>\n', '<think>') }}{% endfor %}"
    assert marked_text(apart, template(moved), ENDS).remarks == ()
