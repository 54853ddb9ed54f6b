"""The house's floors: who may import whom, without circles, and what must start without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import plait

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "plait"
FLOORS = {
    "errors": 0, "units": 0, "layout": 0, "private_folder": 0, "checked_json": 1, "regular_file": 0,
    "version": 0, "devices": 0, "accelerator": 0,
    "arguments": 1, "working_folder": 2,
    "model": 1,
    "partition": 2,
    "recipe": 3, "machines": 3, "data": 3, "checkpoint": 3, "report": 3,
    "planner": 4, "screen": 4, "parallel": 4, "launch": 4, "proof": 4, "interop": 4,
    "trainer": 5, "workers": 5, "run_folder": 5,
    "probing": 6, "run_files": 6, "tracking": 6,
    "custom": 7, "hosts": 7, "checking": 7, "foreign_configs": 5,
    "commands": 8, "process_exit": 8, "clusters": 9, "page": 9,
    "api": 10, "api_models": 10, "pytest_plugin": 11, "command_line": 10, "cli": 11, "__main__": 12,
}  # fmt: skip
# Inside a folder with sub-folders: modules at its root count as rooms of their own.
INNER_FLOORS = {
    "commands": {"python_call": 0, "preparing": 0, "planning": 1, "verifying": 2, "monitoring": 2, "programs": 3,
                 "data": 4, "evaluate": 4, "join": 4, "plan": 4, "check": 4, "check_resume": 5, "check_file": 4,
                 "probe": 4, "prove": 4, "timeline": 4, "runs": 4, "export": 4, "sample": 3, "models": 2,
                 "train": 5, "verify": 4, "new": 4,
                 "answering": 5, "evaluating": 3, "drilling": 6},
    "custom": {"process": 0, "message_order": 0, "seeds": 0, "structure": 0, "cutting": 1, "group": 1, "program": 1,
               "collectives": 2, "gathering": 3, "data": 2, "arithmetic": 3, "likeness": 2, "muon": 0,
               "agreement": 3, "exact_norm": 2, "layouts": 3, "stepping": 4, "saving": 4, "verifying": 5, "planning": 6,
               "run": 7, "spread": 8, "worker": 9},
    "checking": {"launch_command": 0, "findings": 0, "recorded": 0, "watch": 0, "launching": 1, "reference": 1,
                 "working_copy": 0, "data_order": 1, "updates": 1, "resuming": 1, "gradient_findings": 2,
                 "rest_findings": 2, "judging": 3},
    "data": {"choices": 0, "documents": 0, "folders": 0, "micro_sizes": 0, "tables": 1, "file_faults": 2, "sources": 3,
             "holdout": 4, "conversations": 4, "index": 5, "shards": 6, "preparation": 7, "balance": 7, "integrity": 7,
             "order": 7, "packing": 7, "rows": 7, "samples": 8, "loader": 9},
    "interop": {"stored_names": 0, "links": 0, "configs": 0, "families": 1, "tensor_files": 1, "small_files": 2,
                "mxfp4": 2, "config_in": 2, "gguf": 2, "gguf_tokenizer": 0,
                "gguf_out": 5, "peft_names": 2, "config_out": 3, "base_model": 3, "hub": 4,
                "base_fingerprint": 4, "read_weights": 4, "write_weights": 4, "adapter_out": 4, "adapter_in": 5},
    "launch": {"values": 0, "network": 0, "watching": 1, "in_memory": 1, "local": 2},
    "model": {"names": 0, "adapter_shape": 0, "rope_scaling": 0, "matmul": 0, "parts": 0, "shape": 1, "router": 1,
              "weights": 2, "sizes": 2, "requested_size": 3, "norm": 2, "rotary": 2, "blocked_attention": 2,
              "quantization": 1, "masked_attention": 1, "expert_blocks": 0, "dropout": 0,
              "linear": 2, "attention": 3, "feedforward": 3, "prediction_heads": 3, "mixture": 4,
              "delta_rule": 2, "delta_attention": 4, "latent_attention": 5, "gpt": 6, "init": 7, "adapters": 7},
    "parallel": {"watched": -1, "collectives": 0, "launcher_store": 0, "communicator": 0, "sharded_model": 0,
                 "pipeline_links": 0, "mesh": 1, "tpu_slice": 0, "exchange": 1, "gradient_norm": 0,
                 "compile": 1, "frozen": 1, "materialize": 1, "recompute": 1, "reduction": 1, "gradient_buckets": 1,
                 "expert": 2, "context": 2, "gradient_reducer": 2, "tensor": 2, "tied_embedding": 2, "pipeline": 3,
                 "whole_matrices": 2, "orthogonalize": 0,
                 "fully_sharded": 3, "sharding": 4, "replicate": 4, "apply": 5},
    "planner": {"calibration": 0, "plan": 1, "plan_file": 2, "settings": 2, "problem": 1, "step_time": 2,
                "derive": 3, "memory": 3, "heterogeneous": 4, "search": 5, "rebalancing": 5, "explain": 6,
                "resolve": 7, "bottleneck": 7, "report": 8, "pools": 9},
    "trainer": {"choices": 6, "samples": 6, "first_weights": 1, "state": 0, "optimizer": 0, "score_passes": 0,
                "loss_scale": 0, "experts": 1, "loss": 1, "divergence": 0, "step": 3, "step_graph": 4, "assemble": 5,
                "rank_sinks": 5, "checkpointing": 6, "pair_reference": 6, "loop": 7, "balance": 7, "auxiliary": 2,
                "preference": 2, "recording": 8, "actions": 9, "observers": 8, "worker": 10, "time_steps": 11,
                "record_steps": 11},
}  # fmt: skip
SCHEMA_READERS = ("recipe.", "planner.", "trainer.assemble", "probing.steps", "probing.processor_arithmetic",
                  "probing.survey", "run_folder", "hosts.", "commands.", "clusters.", "api", "cli")  # fmt: skip
WITHOUT_TORCH = ("plait.cli", "plait.api", "plait.planner.resolve.resolve", "plait.recipe.load", "plait.model.shape",
                 "plait.model.sizes", "plait.model.names", "plait.model.weights",
                 "plait.machines.machine", "plait.probing.survey", "plait.probing.measurements", "plait.commands.probe",
                 "plait.data.preparation.prepare",
                 "plait.data.order", "plait.checkpoint.store", "plait.report.sinks", "plait.launch.local.run",
                 "plait.partition.boxes", "plait.partition.pipeline_schedule", "plait.run_folder",
                 "plait.commands.train", "plait.commands.plan", "plait.run_files.summary", "plait.page.app",
                 "plait.page.serve")  # fmt: skip


@cache
def modules() -> dict[str, Path]:
    """Every module of plait by name; read once, as the tests change nothing."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Every module of plait that a file imports, also inside functions."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
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


@pytest.mark.parametrize("module", [name for name in modules() if room(name) in INNER_FLOORS and name.count(".") > 1])
def test_rooms_within_a_room_have_floors_too(module: str) -> None:
    floors, here = INNER_FLOORS[room(module)], module.split(".")[2]
    for other in imports(modules()[module]):
        if room(other) == room(module) and other.count(".") > 1:
            there = other.split(".")[2]
            assert there == here or floors[there] < floors[here], f"{module} imports {other}"


def test_every_folder_with_folders_has_inner_floors() -> None:
    inner = {path.parents[1] for path in PACKAGE.glob("*/*/__init__.py")}
    assert {folder.name for folder in inner} == set(INNER_FLOORS)


def test_no_import_circles() -> None:
    graph = {name: {other for other in imports(path) if other != name} for name, path in modules().items()}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


SAME_IDEA = {
    # The command, and who parses or exports it.
    "check", "evaluate", "join", "load_recipe", "plan", "probe", "sample", "train", "verify",
    "main",  # what a program does when it is started
    "rank",  # the entry of a job, looked up by its name; and which rank one is
}  # fmt: skip
"""Public names that several modules define because they mean the same thing."""


def test_a_public_name_means_one_thing() -> None:
    homes: dict[str, list[str]] = {}
    for module, path in modules().items():
        for name in public_names(path):
            homes.setdefault(name, []).append(module)
    assert {name for name, where in homes.items() if len(where) > 1} <= SAME_IDEA


def public_names(path: Path) -> Iterator[str]:
    """Functions, classes and variables that a module defines, without what it imports."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        else:
            continue
        yield from (name for name in names if not name.startswith("_"))


def test_init_files_are_empty() -> None:
    for path in PACKAGE.rglob("__init__.py"):
        assert path.parent == PACKAGE or path.read_text() == "", path


def test_only_few_rooms_read_the_recipe() -> None:
    for name, path in modules().items():
        if "plait.recipe.schema" in set(imports(path)):
            assert name.removeprefix("plait.").startswith(SCHEMA_READERS), name


def test_the_loop_knows_neither_recipe_nor_model_nor_mesh() -> None:
    known = {room(other) for other in imports(PACKAGE / "trainer" / "loop.py")}
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


def test_import_and_dir_import_no_more_than_the_version() -> None:
    code = "import sys, plait; dir(plait); print(*[m for m in sys.modules if m.startswith('plait')])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert told.stdout.split() == ["plait", "plait.version"] or told.stdout.split() == ["plait.version", "plait"]
    assert {*plait.__all__, "__version__"} <= set(dir(plait))
    assert all(hasattr(plait, name) for name in dir(plait))


def test_no_pickle() -> None:
    for path in modules().values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [getattr(node, "module", None), *(alias.name for alias in node.names)]
                assert not {"pickle", "dill", "cloudpickle", "shelve", "marshal"} & set(names), path
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
                assert node.attr not in ("load", "save"), f"{path}: torch.{node.attr} pickles"


def test_public_names_do_not_collide_with_folders() -> None:
    """Importing plait.trainer.worker binds `plait.trainer` to the folder, whatever it was before."""
    assert not set(dir(plait)) & {room(name) for name in modules()}
