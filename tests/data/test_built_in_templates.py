"""Built-in chat templates against transformers: what they let a model read before its last answer is what the template
of the family gives it, and what is learned is transformers' mask.

The templates of families below are in our own words; each writes the same text as the published one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from plait.data.conversations.built_in_templates import BUILT_IN_TEMPLATES, named_template
from plait.data.conversations.chat_template import ChatTemplate, TemplateText
from plait.data.conversations.encode import ExampleEncoder
from plait.data.conversations.examples import ChatExample, chat_example
from plait.data.documents import Record
from plait.data.preparation.build import DataRequest
from plait.data.preparation.prepare import prepare_corpus
from plait.data.preparation.tokens import load_tokenizer
from plait.data.sources import Source
from plait.errors import PlaitError

TOKENS = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|im_sep|>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>",
    "<start_of_turn>", "<end_of_turn>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|user|>",
    "<|assistant|>", "<|system|>", "<|end|>", "[INST]", "[/INST]",
)  # fmt: skip
PLAIN_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m['role'] ~ '\n' ~ m['content'] ~ '<|im_end|>' ~ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALLS = (
    "{% for c in m.tool_calls %}{% if c.function is defined %}{% set c = c.function %}{% endif %}"
    """{{ '\n<tool_call>\n{"name": "' ~ c.name ~ '", "arguments": ' ~ c.arguments|tojson ~ '}\n</tool_call>' }}"""
    "{% endfor %}"
)
RESULTS = (
    "{% elif m.role == 'tool' %}{% if loop.first or loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)
TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function "
    "signatures within <tools></tools> XML tags:\n<tools>{% for t in tools %}{{ '\n' }}{{ t|tojson }}{% endfor %}"
    "{{ '\n' }}</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}'
    "{{ '\n' }}</tool_call><|im_end|>{{ '\n' }}"
)
OPENED = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
QWEN25 = (
    "<|im_start|>system{{ '\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}You are Qwen, "
    "created by Alibaba Cloud. You are a helpful assistant.{% endif %}{% if tools %}{{ '\n\n' }}" + TOOLS + "{% else %}"
    "<|im_end|>{{ '\n' }}{% endif %}{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}"
    "<|im_start|>assistant{% if m.content %}{{ '\n' ~ m.content }}{% endif %}" + CALLS + "{{ '<|im_end|>\n' }}"
    + RESULTS + "{% elif not (loop.first and m.role == 'system') %}"
    "{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endif %}{% endfor %}" + OPENED
)  # fmt: skip
QWEN3 = (
    "{% if tools %}<|im_start|>system{{ '\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content ~ '\n\n' }}"
    "{% endif %}" + TOOLS + "{% elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' ~ messages[0].content ~ "
    "'<|im_end|>\n' }}{% endif %}{% set s = namespace(asked=messages|length - 1, found=false) %}"
    "{% for m in messages|reverse %}{% if not s.found and m.role == 'user' and not (m.content.startswith("
    "'<tool_response>') and m.content.endswith('</tool_response>')) %}{% set s.found = true %}"
    "{% set s.asked = messages|length - loop.index %}{% endif %}{% endfor %}{% for m in messages %}"
    "{% set text = m.content if m.content is string else '' %}"
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{ '<|im_start|>' ~ m.role ~ '\n' ~ text ~ '<|im_end|>\n' }}{% elif m.role == 'assistant' %}{% set why = '' %}"
    "{% if m.reasoning_content is string %}{% set why = m.reasoning_content %}{% elif '</think>' in text %}"
    "{% set why = text.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > s.asked and (loop.last or why) %}"
    "{{ '<think>\n' ~ why.strip('\n') ~ '\n</think>\n\n' ~ text.lstrip('\n') }}{% else %}{{ text }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{% if not loop.first or text %}{{ '\n' }}{% endif %}"
    """{{ '<tool_call>\n{"name": "' ~ c.function.name ~ '", "arguments": ' ~ c.function.arguments|tojson }}"""
    "{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}" + RESULTS + "{% endif %}{% endfor %}" + OPENED
)
LLAMA = (
    "{% for m in messages %}{% set part = '<|start_header_id|>' ~ m['role'] ~ '<|end_header_id|>\n\n' ~ "
    "m['content']|trim ~ '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set part = bos_token ~ part %}{% endif %}{{ part }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA31 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set sys = messages[0].content|trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set sys = '' %}{% endif %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: ' }}"
    "{{ '26 Jul 2024' ~ '\n\n' ~ sys ~ '<|eot_id|>' }}" + LLAMA.replace("bos_token ~ ", "")
)
MISTRAL = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set sys = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{% if loop.last and sys is defined %}{{ '[INST] ' ~ sys ~ '\n\n' }}"
    "{{ m.content ~ '[/INST]' }}"
    "{% else %}{{ '[INST] ' ~ m.content ~ '[/INST]' }}{% endif %}{% else %}{{ ' ' ~ m.content|trim ~ eos_token }}"
    "{% endif %}{% endfor %}"
)
R1 = (
    "{% set s = namespace(sys='') %}{% for m in messages %}{% if m.role == 'system' %}{% set s.sys = m.content %}"
    "{% endif %}{% endfor %}{{ bos_token ~ s.sys }}{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '<｜User｜>' ~ m.content }}{% elif m.role == 'assistant' %}"
    "{{ '<｜Assistant｜>' ~ m.content.split('</think>')[-1] ~ '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% set first = '' %}{% if messages[0].role == 'system' %}"
    "{% set first = messages[0].content ~ '\n\n' %}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}"
    "{% set role = 'model' if m.role == 'assistant' else m.role %}{{ '<start_of_turn>' ~ role ~ '\n' }}"
    "{{ first if loop.first else '' }}{{ m.content|trim ~ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' ~ m.role ~ '|>\n' ~ m.content ~ '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
PHI4 = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '<|im_sep|>' ~ m.content ~ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
FAMILIES = {
    "chatml": PLAIN_CHATML,
    "deepseek": R1.replace("<think>\n'", "'").replace(".split('</think>')[-1]", ""),
    "deepseek-r1": R1,
    "gemma": GEMMA,
    "llama3": LLAMA,
    "llama3.1": LLAMA31,
    "mistral": MISTRAL,
    "phi3": PHI3,
    "phi4": PHI4,
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
}


def turns(*texts: str, system: str = "") -> list[dict[str, Any]]:
    head = [{"role": "system", "content": system}] if system else []
    return [*head, *({"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts))]


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Köln", "days": 2}}}
CALLING = [
    {"role": "user", "content": "Will it rain?"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "content": '{"rain": "yes"}'},
    {"role": "assistant", "content": "Yes, it will."},
]
CHATS: dict[str, tuple[list[dict[str, Any]], Any]] = {
    "one turn": (turns("Hi", "Hello."), None),
    "two turns": (turns("Hi", " Hello. ", "Who?", "I am."), None),
    "system": (turns("Hi", "Hello.", "Who?", "I am.", system="Be short."), None),
    "reasoning": (turns("Hi", "<think>\nHm.\n</think>\n\nHello.", "Who?", "<think>\nSo.\n</think>\n\nI am."), None),
    "reasoning apart": ([*turns("Hi", "Hey", "Who?"), {**turns("", "I.")[1], "reasoning_content": "Hm"}], None),
    "tools": (CALLING, [WEATHER]),
    "tools after turns": ([*turns("Hi", "Hello.", system="Be short."), *CALLING], [WEATHER]),
}
WITH_TOOLS = ("qwen2.5", "qwen3")
CASES = [
    (family, chat)
    for family in FAMILIES
    for chat in CHATS
    if "tools" not in chat or family in WITH_TOOLS
    # transformers' own rendering has no place for it
    if chat != "reasoning apart" or family in ("qwen3", "deepseek-r1")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """A tokenizer with the special tokens of all families."""
    own = tmp_path_factory.mktemp("families")
    definition = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    first = max(definition["model"]["vocab"].values()) + 1
    shape = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    definition["added_tokens"] += [
        {"id": first + n, "content": token, "special": True, **shape} for n, token in enumerate(TOKENS)
    ]
    (own / "tokenizer.json").write_text(json.dumps(definition))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (own / "tokenizer_config.json").write_text(json.dumps(settings))
    return own


def example_of(chat: str) -> ChatExample:
    messages, tools = CHATS[chat]
    return chat_example(Record("here:1", {"messages": messages, "tools": tools}), "messages")


def test_every_built_in_template_has_its_family_here() -> None:
    assert set(FAMILIES) == set(BUILT_IN_TEMPLATES)


@pytest.mark.parametrize(("family", "chat"), CASES)
def test_what_is_learnt_is_transformers_mask_behind_the_familys_own_prompt(
    family: str, chat: str, folder: Path
) -> None:
    messages, tools = CHATS[chat]
    found = named_template(family, [folder])
    tokenizer, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    (ours,) = ExampleEncoder(tokenizer, ChatTemplate(found)).encode([example_of(chat)])

    marked = theirs.apply_chat_template(
        messages, tools, chat_template=found.text, return_dict=True, return_assistant_tokens_mask=True
    )
    count = len(ours.ids)
    assert ours.ids.tolist() == marked["input_ids"][:count]
    assert (1 - ours.mask).tolist() == marked["assistant_masks"][:count] and not any(marked["assistant_masks"][count:])

    original = FAMILIES[family]
    prompt = theirs.apply_chat_template(
        messages[:-1], tools, chat_template=original, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    last = np.flatnonzero(np.diff(ours.mask.astype(int)) == -1)[-1] + 1  # the last answer's first token
    assert ours.ids[:last].tolist() == prompt
    if family == "mistral" and chat == "system":
        return  # its own rendering of a whole chat leaves the system text out
    if family != "deepseek-r1":  # which cannot write the reasoning that its prompt begins
        whole = theirs.apply_chat_template(messages, tools, chat_template=original, return_dict=True)["input_ids"]
        assert marked["input_ids"] == whole


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_learns_to_end_its_turn(family: str, folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    tokenizer, template = load_tokenizer(folder), ChatTemplate(named_template(family, [folder]))
    (ours,) = ExampleEncoder(tokenizer, template).encode([example_of("two turns")])
    assert int(ours.ids[-1]) in theirs.all_special_ids or theirs.decode([int(ours.ids[-1])]) in TOKENS


def test_the_familys_own_templates_teach_what_they_can(folder: Path) -> None:
    """Of unmarked ones too: the whole chat, or the last answer where earlier ones change, which is remarked."""
    tokenizer = load_tokenizer(folder)

    def learned(family: str, chat: str) -> tuple[str, tuple[str, ...]]:
        special = {"bos_token": "<s>", "eos_token": "</s>"}
        template = ChatTemplate(TemplateText(text=FAMILIES[family], where="its own", special=special))
        (found,) = ExampleEncoder(tokenizer, template).encode([example_of(chat)])
        return tokenizer.decode(found.ids[found.mask == 0].tolist()), found.remarks

    assert learned("llama3", "two turns") == ("Hello.<|eot_id|>I am.<|eot_id|>", ())
    assert learned("mistral", "two turns") == (" Hello.</s> I am.</s>", ())
    assert learned("deepseek-r1", "two turns") == ("I am.<｜end▁of▁sentence｜>", ("last answers", "other prompt"))
    assert learned("qwen3", "two turns") == ("<think>\n\n</think>\n\nI am.<|im_end|>", ("last answers",))
    text, remarks = learned("qwen3", "reasoning")
    assert text == "<think>\nSo.\n</think>\n\nI am.<|im_end|>" and remarks == ("last answers", "lost reasoning")
    with pytest.raises(PlaitError, match=r"here:1: the chat template changes earlier text .* in data\.chat_template"):
        learned("mistral", "system")


def test_a_template_that_writes_no_tools_refuses_chats_with_them(folder: Path) -> None:
    template = ChatTemplate(named_template("llama3", [folder]))
    with pytest.raises(PlaitError, match=r'here:1: the chat template (leaves out "tools"|in plait\'s llama3 refuses)'):
        ExampleEncoder(load_tokenizer(folder), template).encode([example_of("tools")])


def test_a_tokenizer_without_the_tokens_is_refused(tmp_path: Path, tokenizer_folder: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns("Hi", "Hello.")}) + "\n")
    request = DataRequest(
        sources=(Source(str(tmp_path / "chats.jsonl")),),
        tokenizer=str(tokenizer_folder),
        vocabulary=None,
        holdout=0.0,
        chat_template="chatml",
    )
    with pytest.raises(PlaitError, match=r'data\.chat_template = "chatml" writes <\|im_start\|>, which the tokenizer'):
        prepare_corpus(request, tmp_path / "cache", lambda *_: None)


def test_a_name_that_is_none_is_refused_with_those_that_are() -> None:
    with pytest.raises(PlaitError, match=r'data\.chat_template = "qwen" cannot be read .* chatml, .*qwen3'):
        named_template("qwen", [])
