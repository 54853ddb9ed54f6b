from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.data.preparation import cuts
from plait.data.preparation.cuts import cut_into_pieces
from plait.data.preparation.tokens import (
    END_OF_TEXT,
    Tokenizer,
    bpe_vocabulary,
    encode_alike,
    load_tokenizer,
    load_trained,
    train_bpe,
)
from plait.errors import PlaitError

# The pattern that Llama 3 and Qwen 2 use (theirs differ in the length of digit groups only).
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
CHARACTERS = st.sampled_from(list("\n\n  \t\rab'sZ1.;,é中\u00a0\u3000\u2028\u200b\x1c\x85"))


def llama_like(text: str, folder: Path) -> Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(LLAMA_3), "isolated")
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, level])
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|end_of_text|>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([text.replace(".\n", ";\n\n"), text], trainer)
    backend.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


@pytest.fixture(scope="module", params=["gpt2", "llama 3"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, text: str) -> Tokenizer:
    return load_tokenizer("gpt2") if request.param == "gpt2" else llama_like(text, tmp_path_factory.mktemp("llama"))


def in_pieces(tokenizer: Tokenizer, text: str, block: int) -> tuple[int, list[int]]:
    parts = list(cut_into_pieces((text[n : n + block] for n in range(0, len(text), block)), tokenizer.cut))
    assert "".join(parts) == text
    return len(parts), list(chain.from_iterable(tokenizer.encode_pieces(parts)))


@settings(max_examples=300, deadline=None)
@given(st.text(CHARACTERS, min_size=1, max_size=40))
def test_every_cut_keeps_the_tokens_of_the_whole(tokenizer: Tokenizer, text: str) -> None:
    cuts = sorted({0, *(found.start() for found in tokenizer.cut.finditer(text))})
    parts = [text[start:stop] for start, stop in zip(cuts, [*cuts[1:], None], strict=True)]
    assert list(chain.from_iterable(tokenizer.encode_pieces(parts))) == tokenizer.encode(text)


def test_a_long_text_in_blocks_has_the_tokens_of_the_whole(tokenizer: Tokenizer, text: str) -> None:
    for variant in (text, text.replace(" ", ""), text.replace("\n", " ")):
        count, ids = in_pieces(tokenizer, variant, 7001)
        assert count > 1
        assert ids == tokenizer.encode(variant)


def test_a_text_without_any_good_place_is_cut_all_the_same() -> None:
    tokenizer = load_tokenizer("gpt2")
    endless = "x" * (2 * cuts.LONGEST_PIECE + 5)
    parts = list(cut_into_pieces(iter([endless]), tokenizer.cut))
    assert [len(part) for part in parts] == [cuts.LONGEST_PIECE, cuts.LONGEST_PIECE, 5]


def test_gpt2_ids_are_the_published_ones(text: str) -> None:
    tokenizer = load_tokenizer("gpt2")
    assert (tokenizer.eot, tokenizer.vocabulary) == (50256, 50257)
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_name_of_the_end_inside_a_text_is_ordinary_text() -> None:
    tokenizer = load_tokenizer("gpt2")
    ids = tokenizer.encode_pieces([f"a{END_OF_TEXT}b"])[0]
    assert tokenizer.eot not in ids
    assert tokenizer.decode(ids) == f"a{END_OF_TEXT}b"
    assert tokenizer.decode([tokenizer.eot]) == END_OF_TEXT


def test_a_saved_tokenizer_comes_back_the_same(tmp_path: Path, tokenizer: Tokenizer, text: str) -> None:
    tokenizer.save(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        again = load_tokenizer(path)
        assert (again.eot, again.vocabulary, again.hash) == (tokenizer.eot, tokenizer.vocabulary, tokenizer.hash)
        assert again.encode(text) == tokenizer.encode(text)


def test_truncation_padding_dropout_and_json_layout_have_no_effect(
    tmp_path: Path, tokenizer_folder: Path, text: str
) -> None:
    plain = load_tokenizer(tokenizer_folder)
    definition = json.loads(plain.definition)
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition, indent=3))
    assert load_tokenizer(tmp_path).hash == plain.hash
    definition["model"]["dropout"] = 0.5
    definition["truncation"] = {"max_length": 5, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    definition["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": END_OF_TEXT,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    odd = load_tokenizer(tmp_path)
    assert odd.encode_pieces([text, "a"]) == [plain.encode(text), plain.encode("a")]


@pytest.mark.parametrize("entry", ["<stop>", {"content": "<stop>", "special": True}])
def test_the_end_is_found_in_the_config_beside_it(tmp_path: Path, tokenizer_folder: Path, entry: object) -> None:
    definition = (tokenizer_folder / "tokenizer.json").read_text().replace(END_OF_TEXT, "<stop>")
    (tmp_path / "tokenizer.json").write_text(definition)
    with pytest.raises(PlaitError, match=r"has no end-of-text token; add eos_token to the tokenizer_config.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": entry}))
    assert load_tokenizer(tmp_path).eot_text == "<stop>"


def test_another_end_of_documents_is_another_tokenizer(tmp_path: Path, tokenizer_folder: Path) -> None:
    definition = (tokenizer_folder / "tokenizer.json").read_text().replace(END_OF_TEXT, "</s>")
    (tmp_path / "tokenizer.json").write_text(definition)
    usual = load_tokenizer(tmp_path)
    other = next(text for text in usual.backend.get_vocab() if text != usual.eot_text)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": usual.eot_text}))
    assert load_tokenizer(tmp_path).hash == usual.hash
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": other}))
    assert load_tokenizer(tmp_path).hash != usual.hash


def test_bad_tokenizers_are_told(tmp_path: Path) -> None:
    with pytest.raises(PlaitError, match=r'there is no tokenizer "gpt3"; write "gpt2", "bpe", or the path'):
        load_tokenizer("gpt3")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(PlaitError, match=r"is not a tokenizer.json \(.*\); name another file in data.tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(PlaitError, match=r"model.vocabulary = 256 is too small; choose at least 257"):
        train_bpe(["a"], 256)


def test_training_is_the_same_in_every_process_with_any_number_of_threads(text: str) -> None:
    script = (
        "import sys; from plait.data.preparation.tokens import train_bpe; text = sys.stdin.read();"
        "print(train_bpe([text[:9000], text[9000:]], 700).hash)"
    )
    hashes = {train_bpe([text[:9000], text[9000:]], 700).hash}
    for threads, seed in (("1", "1"), ("3", "2")):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, input=text, env=environment, check=True, capture_output=True, text=True)
        hashes.add(done.stdout.strip())
    assert len(hashes) == 1


def test_a_trained_tokenizer_spells_any_text_and_knows_its_end(text: str) -> None:
    tokenizer = train_bpe([text], 400)
    assert tokenizer.vocabulary == 400
    assert tokenizer.eot_text == END_OF_TEXT
    for sample in (text, "中文 \x00\x7f é", "\n\n\t x"):
        assert tokenizer.decode(tokenizer.encode(sample)) == sample
    assert len(tokenizer.encode(text)) < 0.7 * len(text)


def test_tokenizers_are_alike_by_what_they_do(text: str) -> None:
    own = train_bpe([text], 300)
    values = json.loads(own.definition)
    added = values["added_tokens"][0]
    more = [*values["added_tokens"], {**added, "id": 300, "content": "[PAD300]"}]
    padded = load_trained(json.dumps({**values, "added_tokens": more}))
    assert padded.hash != own.hash and encode_alike(own, padded, [text[:2000]])
    assert not encode_alike(padded, own, [text[:2000]])
    fewer = {**values["model"], "merges": values["model"]["merges"][:-5]}
    assert not encode_alike(own, load_trained(json.dumps({**values, "model": fewer})), [text[:2000]])
    first, second, *_ = (token for token in own.backend.get_vocab() if token != END_OF_TEXT)
    vocabulary = {**values["model"]["vocab"]}
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    swapped = load_trained(json.dumps({**values, "model": {**values["model"], "vocab": vocabulary}}))
    assert not encode_alike(own, swapped, [""])


def test_a_larger_corpus_is_given_a_larger_vocabulary() -> None:
    found = [bpe_vocabulary(size) for size in (10_000, 5_000_000, 100_000_000, 10**11)]
    assert found == sorted(found) and found[1] == 4096


def test_a_folder_with_code_for_its_tokenizer_runs_none(tmp_path: Path, tokenizer_folder: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((tokenizer_folder / "tokenizer.json").read_text())
    (tmp_path / "tokenization_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    config = {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}, "tokenizer_class": "Own"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).vocabulary == 300
    assert not (tmp_path / "ran").exists()
