"""A tokenizer.json as a .gguf file holds it: byte-level BPE, with llama.cpp's name for its way of dividing text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.errors import PlaitError

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {_LLAMA3: "llama-bpe", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"): "qwen2"}
"""Patterns that divide text, with llama.cpp's names of them."""
_OTHER_BPE = ("byte_fallback", "continuing_subword_prefix", "end_of_word_suffix", "dropout")
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
"""Kinds of tokens (llama.cpp's llama_token_type)."""
_ADVICE = "export the model as a folder, and let llama.cpp's convert_hf_to_gguf.py try"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTokenizer:
    """The tokens by id with their kinds, the merges in order, and how text is divided before them."""

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]
    pre: str


def gguf_tokenizer(definition: str, vocabulary: int) -> GgufTokenizer:
    """The tokenizer of a tokenizer.json for a model with this many entries; raises PlaitError for one that llama.cpp
    would read otherwise."""
    values = json.loads(definition)
    model = values.get("model") or {}
    if model.get("type", "BPE") != "BPE" or not model.get("merges") or any(model.get(key) for key in _OTHER_BPE):
        raise PlaitError(f"the tokenizer is no byte-level BPE, which alone plait writes as .gguf; {_ADVICE}")
    pre = _pre_tokenizer(values)
    if bool(model.get("ignore_merges")) != (pre == "llama-bpe"):
        raise PlaitError(f"llama.cpp would merge in another way than this tokenizer (ignore_merges); {_ADVICE}")
    entries = {number: (text, _NORMAL) for text, number in model["vocab"].items()}
    for added in values.get("added_tokens") or ():
        entries[added["id"]] = added["content"], _CONTROL if added.get("special") else _USER_DEFINED
    if max(entries) >= vocabulary:
        raise PlaitError(f"the tokenizer has {max(entries) + 1} tokens and the model {vocabulary}; {_ADVICE}")
    every = [entries.get(number, (f"[PAD{number}]", _UNUSED)) for number in range(vocabulary)]
    return GgufTokenizer(
        tokens=tuple(text for text, _ in every),
        types=tuple(kind for _, kind in every),
        merges=tuple(merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]),
        pre=pre,
    )


def _pre_tokenizer(values: Mapping[str, Any]) -> str:
    """llama.cpp's name for how this tokenizer divides text. NFC is left to whoever writes the text, as by llama.cpp's
    own converter."""
    normalizer, divider = values.get("normalizer"), values.get("pre_tokenizer") or {}
    plain = normalizer is None or normalizer.get("type") == "NFC"
    parts: Sequence[Mapping[str, Any]] = divider.get("pretokenizers") or [divider]
    shapes = [_shape(part) for part in parts]
    if plain and shapes == [_BYTE_LEVEL]:
        return "gpt-2"
    if plain and shapes == [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL]:
        return "smollm"
    if plain and len(parts) == 2 and shapes[1] == {**_BYTE_LEVEL, "use_regex": False}:
        pattern = (parts[0].get("pattern") or {}).get("Regex")
        isolated = parts[0].get("behavior") == "Isolated" and not parts[0].get("invert")
        if parts[0].get("type") == "Split" and isolated and pattern in _SPLITS:
            return _SPLITS[pattern]
    kinds = " and ".join(str(part.get("type")) for part in parts)
    raise PlaitError(
        f"the tokenizer divides text in a way ({kinds}) that plait has no name for in a .gguf file; {_ADVICE}"
    )


def _shape(part: Mapping[str, Any]) -> dict[str, Any]:
    """What decides how a part divides text."""
    if part.get("type") == "ByteLevel":
        return {key: part.get(key, _BYTE_LEVEL[key]) for key in _BYTE_LEVEL}
    return {key: value for key, value in part.items() if key in ("type", "individual_digits")}
