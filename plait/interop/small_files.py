"""The files beside a model's weights: kept with a run that goes on from the model, and handed on by an export."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from plait.interop.links import inside, refuse_links_out
from plait.interop.tensor_files import INDEX
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
MODEL_FILES = (*CONFIGS, *TOKENIZER, *LICENCES, "*.safetensors", INDEX)
"""All that plait reads or copies of a model."""


def refuse_model_links(folder: Path) -> None:
    """Raise PlaitError where a file of a model that plait reads or copies is a link that leads out of its folder."""
    refuse_links_out(folder, MODEL_FILES)


def copy_small_files(source: Path, target: Path, patterns: Iterable[str]) -> list[str]:
    """Copy the files of a folder that fit these patterns, their names returned. A copy may be read by whoever may read
    new files of this user, and its source. Raises PlaitError for links out of the folder, and OSError."""
    copied: list[str] = []
    for pattern in patterns:
        for path in sorted(source.glob(pattern)):
            inside(source, path)
            if path.is_file() and path.stat().st_size <= LARGEST_FILE:
                place = target / path.relative_to(source)
                place.parent.mkdir(parents=True, exist_ok=True)
                mode = stat.S_IMODE(path.stat().st_mode) & 0o666 | 0o600
                descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
                with os.fdopen(descriptor, "wb") as copy:
                    copy.write(read_regular_file(path, LARGEST_FILE))
                copied.append(str(path.relative_to(source)))
    return copied
