"""A person's program, a file or a module: how it is found, its hash, and how the workers of this host get to know
which one it is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from plait.custom.process.launcher import MODULE_VARIABLE, PROGRAM_VARIABLE
from plait.errors import PlaitError
from plait.launch.values.entries import EntryTable
from plait.regular_file import read_regular_file

PROGRAM_ENTRY, COUNT_ENTRY = "program", "count_workers"
PROGRAM_ENTRIES = EntryTable(
    functions={PROGRAM_ENTRY: "plait.custom.worker:main", COUNT_ENTRY: "plait.custom.worker:count_workers"},
    # torch's optimizers import torch._dynamo when the first is made, a second for each rank: so once for all of them.
    preload=("torch._dynamo", "plait.custom.worker", "plait.custom.spread", "plait.custom.layouts.replicated"),
)
"""All that a worker of a program can do: run the file that this host's own user named."""
LARGEST_PROGRAM = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFile:
    """A program as its user named it: a file, or a module, which Python finds by its name."""

    path: Path
    module: str = ""
    """The module's full name; "" for a file."""

    @property
    def name(self) -> str:
        """Its name for the user."""
        return self.module or self.path.name

    @property
    def join_options(self) -> str:
        """The arguments after HOST:PORT on the other hosts."""
        return f" -m {self.module}" if self.module else f" --program {self.path.name}"


def program_bytes(path: Path) -> bytes:
    """The file's bytes; raises PlaitError where it is none."""
    try:
        if not path.is_file():
            raise PlaitError(
                f"{path} is no file; name the program to run: plait run PROGRAM.py, or plait run -m MODULE"
            )
        if path.stat().st_size > LARGEST_PROGRAM:
            raise PlaitError(f"{path} is too large for a program; name a Python file")
        return read_regular_file(path, LARGEST_PROGRAM)
    except OSError as error:
        raise PlaitError(f"{path} cannot be read ({error.strerror}); check its rights") from None


def program_hash(path: Path) -> str:
    """SHA-256 of a program file; raises PlaitError where it is none, or no Python."""
    data = program_bytes(path)
    if path.suffix == ".toml":
        raise PlaitError(f"{path} is a recipe, no program; type plait train {path}")
    try:
        compile(data, str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise PlaitError(
            f"{path}{line} is no Python program ({error.args[0]}); correct it, or name another file"
        ) from None
    return sha256(data).hexdigest()


@contextmanager
def program_in_environment(program: ProgramFile | None) -> Iterator[None]:
    """Within the block processes that are started learn of this program."""
    names = (PROGRAM_VARIABLE, MODULE_VARIABLE)
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    if program is not None:
        os.environ[PROGRAM_VARIABLE] = str(program.path.absolute())
        if program.module:
            os.environ[MODULE_VARIABLE] = program.module
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)
