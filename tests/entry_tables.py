"""Tables of what the ranks of tests do: the functions of modules of tests, each by its own name."""

from __future__ import annotations

import ast
from pathlib import Path

from plait.launch.values.entries import EntryTable

ROOT = Path(__file__).parents[1]


def entries_of(*modules: str, preload: tuple[str, ...] = ()) -> EntryTable:
    """A table with every public function of these modules, which are read and not imported."""
    functions = {name: f"{module}:{name}" for module in modules for name in public_functions(module)}
    return EntryTable(functions=functions, preload=preload)


def public_functions(module: str) -> list[str]:
    """The names of the functions of a module, which is read and not imported."""
    tree = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
