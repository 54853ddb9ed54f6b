"""Ratchets on length and shape: a file one subject, a function one level, names with types."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

PACKAGE = Path(__file__).parents[2] / "plait"
FILES = sorted(PACKAGE.rglob("*.py"))
FILE_LINES = 260
FUNCTION_LINES = 62
PARAMETERS = 8
FORBIDDEN_NAMES = {"utils", "util", "helpers", "common", "misc", "manager"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions() -> Iterator[tuple[Path, Function]]:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, Function):
                yield path, node


def lines(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_are_short_and_named_for_a_subject(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= FILE_LINES
    assert path.stem not in FORBIDDEN_NAMES


def test_functions_are_short() -> None:
    long = {f"{path.name}:{f.name}": lines(f) for path, f in functions() if lines(f) > FUNCTION_LINES}
    assert not long
    assert median(lines(f) for _, f in functions()) <= 10


def test_functions_take_few_parameters() -> None:
    for path, f in functions():
        count = len(f.args.args) + len(f.args.kwonlyargs) - (f.args.args[:1] != [] and f.args.args[0].arg == "self")
        if path.name == "cli.py" or path.parent.name == "command_line":  # a command's options are its parameters
            count -= 5
        assert count <= PARAMETERS + (f.name == "__init__"), f"{path}:{f.name} takes {count}"


def test_public_names_are_documented_and_annotated() -> None:
    for path in FILES:
        tree = ast.parse(path.read_text())
        if path.name != "__init__.py":
            assert ast.get_docstring(tree), f"{path} says nothing of itself"
        for node in tree.body:
            if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{path}:{node.name} says nothing of itself"
    for path, f in functions():
        assert f.returns is not None, f"{path}:{f.name} does not say what it returns"


def test_no_bare_boolean_parameters() -> None:
    """A call f(True) says nothing; booleans are named at the call, or a Literal."""
    for path, f in functions():
        for argument in f.args.args:
            annotation = ast.unparse(argument.annotation) if argument.annotation else ""
            if annotation == "bool":
                assert f.name.startswith(("_", "agree")), f"{path}:{f.name}({argument.arg}: bool)"
