"""A tokenizer's settings that are there and damaged are refused: without them another chat template and another end of
text would be learned. What is refused here is what transformers cannot read either."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from plait.data.conversations.chat_template import find_template, tokenizer_settings
from plait.data.preparation.tokens import load_tokenizer
from plait.errors import PlaitError

NAMES = ("tokenizer_config.json", "special_tokens_map.json")
DAMAGED: dict[str, tuple[bytes, str]] = {
    "cut off": (b'{"eos_token": "<|endoftext|>", "chat_te', "it is not JSON"),
    "empty": (b"", "it is not JSON"),
    "a list": (b'["<|endoftext|>"]', "it is not a table of keys and values"),
    "a number": (b"5", "it is not a table of keys and values"),
    "latin 1": ('{"eos_token": "fin\u00e9"}'.encode("latin-1"), "it is not text"),
    "eos a number": (b'{"eos_token": 5}', '"eos_token" is not the text of a token'),
    "bos false": (b'{"bos_token": false}', '"bos_token" is not the text of a token'),
    "eos a table": (b'{"eos_token": {"content": 5}}', '"eos_token" is not the text of a token'),
    "extra a number": (b'{"extra_special_tokens": 5}', '"extra_special_tokens" is neither a list nor a table'),
    "extra of numbers": (b'{"extra_special_tokens": {"a": 5}}', '"extra_special_tokens" holds what is not the text'),
    "template without a text": (b'{"chat_template": [{"name": "default"}]}', '"chat_template" is neither a text nor'),
    "template of texts": (b'{"chat_template": ["a"]}', '"chat_template" is neither a text nor'),
}


@pytest.fixture
def folder(tmp_path: Path, tokenizer_folder: Path) -> Path:
    """A model's folder whose settings are whole."""
    base = tmp_path / "base"
    base.mkdir()
    shutil.copy(tokenizer_folder / "tokenizer.json", base)
    (base / "config.json").write_text('{"model_type": "llama"}')
    settings = {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "own"}
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    (base / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    return base


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_in_one_sentence(case: str, name: str, folder: Path) -> None:
    data, why = DAMAGED[case]
    for one in NAMES:
        (folder / one).unlink()
    (folder / name).write_bytes(data)
    for read in (load_tokenizer, lambda path: find_template([path]), tokenizer_settings):
        with pytest.raises(PlaitError) as caught:
            read(folder)
        assert str(caught.value).startswith(f"{folder / name} is not usable ({why}")
        assert str(caught.value).endswith("); download it again")
    if not (name == "special_tokens_map.json" and "template" in case):  # which has none
        with pytest.raises((TypeError, ValueError, AttributeError, KeyError)):
            AutoTokenizer.from_pretrained(folder)


def _link_to_nothing(file: Path) -> None:
    file.unlink()
    file.symlink_to("blobs/gone")


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_link_to_nothing, "it links to a file that is missing"),
        (_folder, "Is a directory"),
        (_pipe, "it is a named pipe, not a regular file"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(
    spoil: Callable[[Path], None], why: str, name: str, folder: Path
) -> None:
    spoil(folder / name)
    for read in (load_tokenizer, lambda path: find_template([path])):
        with pytest.raises(PlaitError, match=rf"{name} is not usable \(.*{why}.*\); download it again"):
            read(folder)


def test_a_template_file_that_links_to_nothing_is_refused(folder: Path) -> None:
    """As where the hub's files were fetched in part; the settings beside it hold another template."""
    (folder / "chat_template.jinja").symlink_to("blobs/gone")
    with pytest.raises(PlaitError, match=r"the chat template .*chat_template.jinja cannot be read"):
        find_template([folder])


def test_settings_that_are_missing_or_say_nothing_are_no_damage(folder: Path) -> None:
    for settings in ({}, {"eos_token": None, "chat_template": None, "extra_special_tokens": []}):
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        assert find_template([folder]) is None
        assert load_tokenizer(folder).eot_text == "<|endoftext|>"
    for name in NAMES:
        (folder / name).unlink()
    assert find_template([folder]) is None and load_tokenizer(folder).eot_text == "<|endoftext|>"
    for template in ({"default": "x", "rag": "y"}, [{"name": "default", "template": "x"}]):
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        found = find_template([folder])
        assert found and found.text == "x"


def test_the_command_ends_with_the_sentence_before_it_reads_a_text(folder: Path) -> None:
    (folder.parent / "d.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}) + "\n"
    )
    (folder.parent / "d.toml").write_text('[data]\nfiles = "d.jsonl"\ntokenizer = "base"\nholdout = 0\n')
    (folder / "tokenizer_config.json").write_text('{"chat_template": "own"')
    command = [sys.executable, "-m", "plait", "data", "d.toml"]
    done = subprocess.run(command, cwd=folder.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "base/tokenizer_config.json is not usable (it is not JSON" in done.stderr


def test_a_placeholder_of_pictures_behind_the_vocabulary_is_left_out(folder: Path, tmp_path: Path) -> None:
    """Gemma 3's tokenizer has one, and its small models have no row for it; a token that was added for text stays."""
    before = load_tokenizer(folder)
    definition = json.loads((folder / "tokenizer.json").read_text())
    shape = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": before.vocabulary + n, "content": text, "special": True, **shape}
        for n, text in enumerate(("<|marker|>", "<image_soft_token>"))
    ]
    definition["added_tokens"] += added
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    assert load_tokenizer(folder).vocabulary == before.vocabulary + 2, "nothing says what it stands for"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["extra_special_tokens"] = {"image_token": "<image_soft_token>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    after = load_tokenizer(folder)
    assert (after.vocabulary, after.added_entries) == (before.vocabulary + 1, before.added_entries + 1)
    assert after.encode("a <image_soft_token>") == before.encode("a <image_soft_token>")
    after.save(tmp_path)
    assert load_tokenizer(tmp_path).hash == after.hash != before.hash
