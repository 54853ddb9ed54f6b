"""The house's floors: who may import whom, without circles, and what must start without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import plait

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "plait"
FLOORS = {
    "errors": 0, "units": 0, "layout": 0,
    "model": 1,
    "recipe": 2, "cluster": 2, "data": 2, "checkpoint": 2, "report": 2,
    "plan": 3,
    "launch": 4, "parallel": 4,
    "train": 5,
    "run": 6,
    "api": 7, "cli": 7, "__main__": 8,
}  # fmt: skip
SCHEMA_READERS = ("recipe.", "plan.", "train.assemble", "run.", "api", "cli")
WITHOUT_TORCH = ("plait.cli", "plait.api", "plait.plan.choose", "plait.recipe.load", "plait.model.shape",
                 "plait.model.sizes", "plait.model.names", "plait.cluster.topology", "plait.data.prepare",
                 "plait.data.order", "plait.checkpoint.store", "plait.report.sinks", "plait.launch.local",
                 "plait.run.folder", "plait.run.train", "plait.run.plan")  # fmt: skip


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path) -> Iterator[str]:
    """Every module of plait that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "plait")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            if node.module and node.module.split(".")[0] == "plait":
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                known = modules()
                yield from (name if name in known else node.module for name in names)


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@pytest.mark.parametrize("module", [name for name in modules() if name != "plait"])
def test_a_room_imports_only_from_floors_below(module: str) -> None:
    here = room(module)
    for other in imports(modules()[module]):
        there = room(other)
        below = FLOORS[there] < FLOORS[here] or FLOORS[here] == 0 == FLOORS[there]
        assert there == here or below, f"{module} imports {other}"


def test_no_import_circles() -> None:
    graph = {name: {other for other in imports(path) if other != name} for name, path in modules().items()}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


def test_init_files_are_empty() -> None:
    for path in PACKAGE.rglob("__init__.py"):
        assert path.parent == PACKAGE or path.read_text() == "", path


def test_only_few_rooms_read_the_recipe() -> None:
    for name, path in modules().items():
        if "plait.recipe.schema" in set(imports(path)):
            assert name.removeprefix("plait.").startswith(SCHEMA_READERS), name


def test_the_loop_knows_neither_recipe_nor_model_nor_mesh() -> None:
    known = {room(other) for other in imports(PACKAGE / "train" / "loop.py")}
    assert not known & {"recipe", "model", "parallel"}


def test_nothing_of_ours_imports_benchmarks_or_tests() -> None:
    for path in modules().values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                assert not any((name or "").split(".")[0] in ("benchmarks", "tests") for name in names), path


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_starts_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT, timeout=60).returncode == 0


def test_no_pickle() -> None:
    for path in modules().values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [getattr(node, "module", None), *(alias.name for alias in node.names)]
                assert not {"pickle", "dill", "cloudpickle", "shelve", "marshal"} & set(names), path
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
                assert node.attr not in ("load", "save"), f"{path}: torch.{node.attr} pickles"


def test_public_names_do_not_collide_with_folders() -> None:
    """Importing plait.train.worker binds `plait.train` to the folder, whatever it was before."""
    assert not set(plait.__all__) & {room(name) for name in modules()}
