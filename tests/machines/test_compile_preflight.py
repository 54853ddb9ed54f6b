"""Where layers cannot be compiled this is known before a worker tries, and says what to install."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from plait.machines.detect import detect_machine
from plait.machines.gpus import CompileTools, find_compile_tools, why_not_compiled
from plait.machines.machine import Machine
from tests.machines.described_gpus import CUDA_13, DescribedHost, described_gpus

TOOLS = CompileTools(triton=True, compiler="/usr/bin/gcc", headers=Path("/usr/include/python3.11"))


@pytest.mark.parametrize(
    ("tools", "capability", "told"),
    [
        (TOOLS, (7, 0), ""),
        (TOOLS, (6, 1), "compute capability 7.0 and newer, and this is 6.1"),
        (replace(TOOLS, triton=False), (9, 0), "Triton is not installed"),
        (replace(TOOLS, compiler=None), (9, 0), "no C compiler; install gcc"),
        (replace(TOOLS, headers=None), (9, 0), "Python.h is not here; install python3-dev"),
    ],
)
def test_what_is_missing_is_named_with_its_mend(tools: CompileTools, capability: tuple[int, int], told: str) -> None:
    assert told in why_not_compiled(tools, capability)
    assert bool(why_not_compiled(tools, capability)) == bool(told)


def test_a_compiler_is_found_where_path_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    assert find_compile_tools(str(tmp_path)).compiler is None
    made = tmp_path / "gcc"
    shutil.copy("/bin/true", made)
    assert find_compile_tools(str(tmp_path)).compiler == str(made)


def test_a_machine_says_what_its_gpus_lack() -> None:
    built = replace(CUDA_13, kernels=("sm_70", "sm_80", "sm_90"))
    mixed = replace(described_gpus(("V100", 32), capability=(7, 0)), built=built)
    old = detect_machine(library=mixed, here=DescribedHost(), tools=replace(TOOLS, compiler=None))
    assert old.without == ("bf16",) and "no C compiler" in old.uncompiled
    assert Machine.from_fingerprint(old.fingerprint()) == old
    new = detect_machine(library=described_gpus(("H100", 80)), here=DescribedHost(), tools=TOOLS)
    assert (new.without, new.uncompiled) == ((), "")
    assert not {"without", "uncompiled"} & new.fingerprint().keys()
