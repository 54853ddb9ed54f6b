"""What a host that joined replies to host 0, as frozen values; and that host, as what asks it sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from plait.checked_json import typed_value
from plait.errors import PlaitError

_T = TypeVar("_T")


class PeerReply(Protocol):
    """What another host replies: JSON values and bytes."""

    @property
    def values(self) -> Mapping[str, Any]: ...
    @property
    def blob(self) -> bytes: ...


class Peer(Protocol):
    """Another host that answers requests; `ask` blocks until it has replied."""

    @property
    def name(self) -> str: ...
    def ask(self, kind: str, values: Mapping[str, Any], blob: bytes = b"") -> PeerReply: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferReply:
    """Where the offered files will lie on the other host, and which of them it lacks."""

    folder: str
    lacking: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadReply:
    """How many bytes a file has in all; some of them come beside it."""

    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedReply:
    """Whether the host works in the folder that host 0 works in."""

    shared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderReply:
    """Where the folder lies that the host was asked to have ready."""

    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesReply:
    """The names of the files in the current folder."""

    names: tuple[str, ...]


def parse_reply(kind: type[_T], peer: Peer, reply: PeerReply) -> _T:
    """A reply's values as what they must be; raises PlaitError, with the host's name, for anything else."""
    try:
        return typed_value(kind, reply.values)
    except ValueError as error:
        raise PlaitError(
            f"{peer.name} replied what plait never replies ({error}); install the same commit on both"
        ) from None
