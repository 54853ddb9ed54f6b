"""What host 0 may ask of a host that joined, as frozen values: nothing else is answered."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from plait.checked_json import typed_value
from plait.commands.hosts.file_names import check_file_name
from plait.commands.hosts.file_transfer import FileEntry
from plait.errors import PlaitError

_T = TypeVar("_T")
CHECKPOINT_NAME = re.compile(r"step-[0-9]{1,12}")
STAGING_NAME = re.compile(r"\.step-[0-9]{1,12}(\.gen-[0-9]{1,12})?\.staging")
"""The folder in which ranks write a checkpoint before it is published."""

MEND_ODD_REQUEST = "the host that leads asks for it; install the same commit of plait on both"
"""The end of a sentence about what host 0 asked, and plait never does."""

StagedKind = Literal["run", "job"]
_NONCE_NAME, _NONCE = re.compile(r"nonce-[0-9a-f]{16}"), re.compile(r"[0-9a-f]{32}")
_OWN_FOLDERS = ("checkpoints", "logs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nonce:
    """A file with a random name and content that host 0 has just written into `folder`: a run's, or the cache."""

    folder: str
    name: str
    content: str

    def __post_init__(self) -> None:
        _require(_NONCE_NAME.fullmatch(self.name) and _NONCE.fullmatch(self.content), "Nonce.name or Nonce.content")
        top, _, run = self.folder.partition("/")
        _require(self.folder == ".plait" or (top == "runs" and check_file_name(run)), "Nonce.folder")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedQuestion:
    """Do you see these nonces at the same places below your working folder?"""

    nonces: tuple[Nonce, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """Have a folder ready for the run `name`, or for one job; what follows is about this folder."""

    kind: StagedKind
    name: str
    recipe: str

    def __post_init__(self) -> None:
        _require(check_file_name(self.name), "OpenRequest.name")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Which of these files are missing in a folder of the cache (prepared data, or a model to go on from), or in one
    below the current folder?"""

    root: Literal["cache", "folder"]
    path: str
    files: tuple[FileEntry, ...]

    def __post_init__(self) -> None:
        if self.root == "cache":
            top, _, name = self.path.partition("/")
            _require(top in ("data", "models") and check_file_name(name), "Offer.path")
        elif self.checkpoint is None:
            _require(check_file_name(self.path) and self.path not in _OWN_FOLDERS, "Offer.path")

    @property
    def content(self) -> Literal["data", "model"]:
        """What a folder of the cache holds."""
        return "model" if self.path.startswith("models/") else "data"

    @property
    def checkpoint(self) -> str | None:
        """The name of the checkpoint that is offered ("step-10"); None for data."""
        top, _, name = self.path.partition("/")
        return name if self.root == "folder" and top == "checkpoints" and CHECKPOINT_NAME.fullmatch(name) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockHeader:
    """The bytes beside this are those of an offered file, from `offset` on."""

    name: str
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallFile:
    """A block of a file in the joined host's working folder; the block's bytes are the frame's blob. `nbytes` is the
    size of the whole file; None if the blob is all of it."""

    name: Literal["recipe.toml", "plan.json", "routing.safetensors"]
    offset: int = 0
    nbytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """Give me at most this many bytes of a file of the current folder, or of a checkpoint that its ranks now write."""

    name: str
    offset: int
    bytes: int
    staging: str | None = None

    def __post_init__(self) -> None:
        _require(self.offset >= 0 and self.bytes >= 0, "ReadRequest.offset or ReadRequest.bytes")
        _require(self.staging is None or STAGING_NAME.fullmatch(self.staging), "ReadRequest.staging")


def parse_request(kind: type[_T], values: Mapping[str, Any]) -> _T:
    """A request's values as what they must be; raises PlaitError for anything that host 0's plait never asks."""
    try:
        return typed_value(kind, values)
    except ValueError as error:
        raise PlaitError(
            f"the host that leads asked for what plait never asks ({error}); install the same commit on both"
        ) from None


def _require(fact: object, what: str) -> None:
    if not fact:
        raise ValueError(f"{what} is not what it should be")
