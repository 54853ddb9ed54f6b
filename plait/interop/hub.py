"""A model of a hub ("hub:OWNER/NAME"): its files are fetched once, by huggingface_hub, into that library's cache."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from plait.errors import PlaitError, installing
from plait.interop.small_files import MODEL_FILES

PREFIX = "hub:"
_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def fetch_model(source: str) -> Path:
    """The folder with the files of "hub:OWNER/NAME": config, tokenizer, licence and safetensors, nothing else.

    Which hub, and where the files lie, follows huggingface_hub's own settings (HF_ENDPOINT, HF_HOME); where the hub
    does not answer, files that were fetched before are taken. Raises PlaitError.
    """
    name = source.removeprefix(PREFIX)
    if not _NAME.fullmatch(name):
        raise PlaitError(f'"{source}" names no model of a hub; write for example hub:HuggingFaceTB/SmolLM2-135M')
    try:
        import huggingface_hub
    except ImportError:
        raise PlaitError(
            f"{source} needs the package huggingface_hub; bring it: {installing('huggingface_hub')}"
        ) from None
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(MODEL_FILES)))
    except Exception as error:  # its own kinds, those of its HTTP library, and OSError: none has a common parent
        raise PlaitError(
            f"{source} cannot be fetched ({_reason(error)}); check the name, the network and HF_TOKEN"
        ) from None


def _reason(error: Any) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200].rstrip(".")
