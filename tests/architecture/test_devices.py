"""The table of devices (plait/devices.py) is the only place that knows one kind of device from another."""

from __future__ import annotations

import ast
from pathlib import Path

import plait

PACKAGE = Path(plait.__file__).parent
NAMES = {"cuda", "xpu", "tpu", "nccl", "xccl", "tpu_dist"}
MODULES = {"torch.cuda", "torch.xpu", "torch.tpu", "torch.mps"}
ALLOWED = {
    "devices.py": "the table",
    "machines/gpus.py": "why a build of torch does not see NVIDIA's GPUs",
    "machines/detect.py": "whose absence is explained: that of NVIDIA's GPUs, or of TPUs",
    "trainer/step_graph.py": "CUDA graphs, which only devices with CUDA's kernels are asked to record",
    "commands/monitoring/restarts.py": "words that errors of devices contain",
    "checking/watch/on_processors.py": "what programs of others ask for, so that they run without a GPU",
}
IN_CATALOGUE = {
    "machines/catalog.py",
    "planner/search/model_error.py",
    "planner/report/report.py",
    "clusters/machines.py",
}
"""Modules in which "tpu" is a kind of the catalogue's devices, most of which plait only plans for."""


def test_no_module_beside_the_table_names_a_kind_of_accelerator() -> None:
    modules = {str(path.relative_to(PACKAGE)): path for path in PACKAGE.rglob("*.py")}
    found = [
        f"{name}, line {node.lineno}: {ast.unparse(node)}"
        for name in modules.keys() - ALLOWED.keys()
        for node in ast.walk(ast.parse(modules[name].read_text(encoding="utf-8")))
        if (isinstance(node, ast.Constant) and node.value in (NAMES - {"tpu"} if name in IN_CATALOGUE else NAMES))
        or (isinstance(node, ast.Attribute) and ast.unparse(node) in MODULES)
    ]
    assert not found, "ask plait.accelerator or a row of plait/devices.py"
