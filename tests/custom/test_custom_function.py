"""A function as a program of its own: what it needs is imported there, or refused, with what to do about it."""

from __future__ import annotations

import math
from collections.abc import Callable
from math import sqrt as root
from typing import Any

import pytest

from plait.commands.programs.function_source import function_program
from plait.errors import PlaitError

NUMBER = 3


def uses_modules() -> None:
    print(math.pi, root(4), [math.e for _ in range(2)])


def uses_a_number() -> None:
    print(NUMBER)


def needs_an_argument(value: int) -> None:
    print(value)


def made() -> Callable[[], None]:
    here = 5

    def closure() -> None:
        print(here)

    return closure


def test_modules_and_what_comes_from_them_are_imported(capsys: pytest.CaptureFixture[str]) -> None:
    text = function_program(uses_modules)
    assert text.startswith("import math\nfrom math import sqrt as root\n")
    exec(compile(text, "function", "exec"), {})
    assert capsys.readouterr().out.startswith(f"{math.pi} 2.0")


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (made(), "closure over here"),
        (uses_a_number, "NUMBER of this notebook"),
        (needs_an_argument, "needs the argument value"),
        (lambda: None, "written with def"),
        (print, "written with def"),
    ],
)
def test_what_lives_only_here_is_refused(function: Any, sentence: str) -> None:
    with pytest.raises(PlaitError, match=sentence):
        function_program(function)
