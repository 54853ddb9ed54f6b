"""The target of a job as it was typed: a recipe, a program's file, or `-m` and the name of a module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from plait.commands.programs.program_file import ProgramFile
from plait.commands.programs.program_module import program_module
from plait.errors import PlaitError

MODULE_OPTION = "-m"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetProgram:
    """The user's own program, and its arguments."""

    program: ProgramFile
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name under which the job is recorded."""
        return self.program.module or self.program.path.stem


def is_program(target: Sequence[str]) -> bool:
    """Whether the target is the user's own program, not a recipe."""
    return target[0] == MODULE_OPTION or target[0].endswith(".py")


def program_of(target: Sequence[str]) -> TargetProgram | None:
    """The program of a target; None: it is a recipe. Raises PlaitError for a module that Python does not find."""
    if not is_program(target):
        return None
    if target[0] != MODULE_OPTION:
        return TargetProgram(program=ProgramFile(path=Path(target[0])), arguments=tuple(target[1:]))
    if len(target) < 2:
        raise PlaitError("-m names no module; write plait submit -m package.module")
    return TargetProgram(program=program_module(target[1]), arguments=tuple(target[2:]))
