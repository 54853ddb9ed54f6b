"""A chat template sees what transformers lets it see: its rendering is the measure."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from plait.data.conversations.chat_template import ChatTemplate, find_template, special_settings

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
EACH = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
USUAL: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
Case = tuple[str, dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "no tools": ("{% if tools is not none %}TOOLS{% endif %}" + EACH, USUAL, {}),
    "tools and documents are there": (
        "{{ tools is defined }}{{ documents is defined }}{{ documents }}" + EACH,
        USUAL,
        {},
    ),
    "unknown": ("{{ unk_token }}{{ mask_token }}" + EACH, {**USUAL, "unk_token": "a", "mask_token": "b"}, {}),
    "others": (
        "{{ sep_token + cls_token + pad_token }}" + EACH,
        {**USUAL, "sep_token": "c", "cls_token": {"__type": "AddedToken", "content": "d"}, "pad_token": "e"},
        {},
    ),
    "none": ("{{ bos_token is defined }}" + EACH, {**USUAL, "bos_token": None, "add_bos_token": True}, {}),
    "extra": ("{{ tool_token + box }}" + EACH, {**USUAL, "extra_special_tokens": {"tool_token": "f", "box": "g"}}, {}),
    "own": ("{{ image_token }}" + EACH, {**USUAL, "image_token": "h"}, {}),
    "older file": (
        "{{ bos_token }}" + EACH,
        {"tokenizer_class": "PreTrainedTokenizerFast"},
        {"bos_token": "i", "eos_token": {"content": "j", "lstrip": False}},
    ),
    "older file, which wins": ("{{ bos_token }}" + EACH, USUAL, {"bos_token": "k"}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_template_writes_what_it_writes_in_transformers(name: str, tmp_path: Path, tokenizer_folder: Path) -> None:
    text, settings, older = CASES[name]
    shutil.copy(tokenizer_folder / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    (tmp_path / "chat_template.jinja").write_text(text)
    found = find_template([tmp_path])
    assert found
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(CHAT, tokenize=False)
    assert ChatTemplate(found).render_marked(CHAT)[0] == theirs
    (tmp_path / "special_tokens_map.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(special_settings(found.special)))
    again = find_template([tmp_path])
    assert again and again.special == found.special, "so a corpus keeps them"
