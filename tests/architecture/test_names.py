"""Names that say something: no catch-all modules, public names documented and annotated, no bare booleans."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "plait"
FILES = sorted(PACKAGE.rglob("*.py"))
FORBIDDEN_NAMES = {"utils", "util", "helpers", "common", "misc", "manager"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions() -> Iterator[tuple[Path, Function]]:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, Function):
                yield path, node


def test_modules_are_named_for_a_subject() -> None:
    assert not [path for path in FILES if path.stem in FORBIDDEN_NAMES]


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
