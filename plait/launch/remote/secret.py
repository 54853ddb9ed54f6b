"""The one-time secret of a run on several hosts: made on host 0, typed on the others, kept in memory alone."""

from __future__ import annotations

import getpass
import os
import secrets
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

from plait.errors import PlaitError

SECRET_VARIABLE = "PLAIT_SECRET"
# Without I, L, O and U, which people mistake for other characters. 28 characters of 5 bits are 140 bits.
_SIGNS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_MISREAD = str.maketrans("OIL", "011")
_GROUP = 4
_LENGTH = 28
_FILE_BYTES_AT_MOST = 4096


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Secret:
    """What proves that a host belongs to the run; `text` is for a person's eyes, and no repr, log or error shows it."""

    text: str

    @property
    def key(self) -> bytes:
        """The HMAC key of the proofs."""
        return self.text.replace("-", "").encode()

    def __repr__(self) -> str:
        return "Secret(…)"


def new_secret() -> Secret:
    """A fresh secret for one run."""
    return _grouped("".join(secrets.choice(_SIGNS) for _ in range(_LENGTH)))


def parse_secret(text: str) -> Secret:
    """The secret that a person typed: case, dashes and blanks do not matter, nor O for 0, nor I or L for 1."""
    signs = "".join(text.upper().replace("-", "").split()).translate(_MISREAD)
    if len(signs) != _LENGTH or set(signs) - set(_SIGNS):
        raise PlaitError(
            f"the secret has {_LENGTH // _GROUP} groups of {_GROUP} letters and digits, and this is not of that form; "
            "take the one that plait train printed on host 0 (it makes one if you give it none)"
        )
    return _grouped(signs)


def read_secret(secret_file: str | None) -> Secret:
    """The secret, from a file that nobody else can read, else from PLAIT_SECRET, else typed on the terminal."""
    if secret_file is not None:
        return parse_secret(_private_text(Path(secret_file)))
    if SECRET_VARIABLE in os.environ:
        return parse_secret(os.environ.pop(SECRET_VARIABLE))  # the programs that we start need not inherit it
    if not sys.stdin.isatty():
        raise PlaitError(
            f"there is no terminal to ask for the secret; give it by --secret-file or in {SECRET_VARIABLE}"
        )
    return parse_secret(getpass.getpass("secret shown by host 0: "))


def _grouped(signs: str) -> Secret:
    return Secret(text="-".join(signs[at : at + _GROUP] for at in range(0, _LENGTH, _GROUP)))


def _private_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            if about.st_mode & (stat.S_IRWXG | stat.S_IRWXO) or about.st_uid != os.geteuid():
                raise PlaitError(f"{path} can be read by other users; make it your own: chmod 600 {path}")
            return file.read(_FILE_BYTES_AT_MOST).decode("ascii", "replace")
    except OSError as error:
        raise PlaitError(f"the secret file {path} cannot be read ({error.strerror}); give the file's path") from None
