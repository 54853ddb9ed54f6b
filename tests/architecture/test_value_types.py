"""Values are used whole: few types have fields of their own for a parallel degree or for the batch, by their
annotations. A type that holds a Layout, the Candidates or the job copies nothing."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import plait
from plait.layout import AXES

PACKAGE = Path(plait.__file__).parent
NUMBERS = re.compile(r"\b(int|Positive|Degree|Counts|TokenCount)\b")
"""Annotations of whole numbers: of a recipe, of one value, and of arrays over candidates."""
MOST_TYPES_WITH_A_DEGREE = 3
MOST_TYPES_WITH_THE_BATCH = 4


def types_with(name: re.Pattern[str], *rooms: str) -> set[str]:
    """The classes below these rooms that have a whole number of such a name."""
    paths = [path for room in rooms for path in (PACKAGE / room).rglob("*.py")] + [PACKAGE / "layout.py"]
    return {
        node.name
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and any(name.fullmatch(field) for field in whole_numbers(node))
    }


def whole_numbers(node: ast.ClassDef) -> list[str]:
    return [
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        if NUMBERS.search(ast.unparse(item.annotation))
    ]


def test_few_types_carry_a_parallel_degree() -> None:
    found = types_with(re.compile("|".join((*AXES, "expert"))), ".")
    assert {"LayoutSection", "Candidates", "Layout"} <= found
    assert len(found) <= MOST_TYPES_WITH_A_DEGREE, sorted(found)


def test_few_types_carry_the_batch() -> None:
    """A person's own program (custom/) and a configuration of another program (foreign_configs/) have a batch of their
    own, which no recipe names."""
    own = ("custom", "foreign_configs")
    rooms = sorted(path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name not in own)
    found = types_with(re.compile(r"(global_)?batch(_sequences|_tokens|_size)?"), *rooms)
    assert {"TrainSection", "TrainingJob", "Workload"} <= found
    assert len(found) <= MOST_TYPES_WITH_THE_BATCH, sorted(found)
