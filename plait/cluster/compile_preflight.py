"""Whether torch.compile can work on a machine, found before a worker tries: a failed compilation is pages of text."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

TRITON_CAPABILITY = (7, 0)
"""The oldest compute capability that Triton compiles for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileTools:
    """What torch.compile needs beside torch to compile for GPUs."""

    triton: bool
    compiler: str | None
    """Path of a C compiler: Triton builds a launcher for each kernel with it."""
    headers: Path | None
    """Where Python.h is, which that launcher includes."""


def find_compile_tools(path: str | None = None) -> CompileTools:
    """The tools of this Python and of the folders in `path`, which is as PATH; None for PATH itself."""
    names = [name for name in (os.environ.get("CC"), "clang", "gcc") if name]
    headers = Path(sysconfig.get_path("include"))
    return CompileTools(
        triton=importlib.util.find_spec("triton") is not None,
        compiler=next((found for name in names if (found := shutil.which(name, path=path))), None),
        headers=headers if (headers / "Python.h").is_file() else None,
    )


def why_not_compiled(tools: CompileTools, capability: tuple[int, int]) -> str:
    """Why layers cannot be compiled for a GPU, with the mend; empty where they can."""
    if capability < TRITON_CAPABILITY:
        return f"Triton compiles for compute capability 7.0 and newer, and this is {capability[0]}.{capability[1]}"
    if not tools.triton:
        return "Triton is not installed; a CUDA build of torch brings it"
    if tools.compiler is None:
        return "there is no C compiler; install gcc, or name one in CC"
    if tools.headers is None:
        return "Python.h is not here; install python3-dev (Debian, Ubuntu) or python3-devel (Fedora)"
    return ""
