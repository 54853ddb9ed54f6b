"""The files beside a model's weights: kept with a run that goes on from the model, and handed on by an export."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from plait.regular_file import read_regular_file

LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*", "COPYING*", "USE_POLICY*")
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
CONFIGS = ("config.json", "generation_config.json")
LARGEST_FILE = 1 << 26


def copy_small_files(source: Path, target: Path, patterns: Iterable[str]) -> list[str]:
    """Copy the files of a folder that fit these patterns, their names returned; raises OSError."""
    copied: list[str] = []
    for pattern in patterns:
        for path in sorted(source.glob(pattern)):
            if path.is_file() and path.stat().st_size <= LARGEST_FILE:
                place = target / path.relative_to(source)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(read_regular_file(path, LARGEST_FILE))
                copied.append(str(path.relative_to(source)))
    return copied
