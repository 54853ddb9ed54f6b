"""Parses the user's launch command: which program to run, with which arguments, on how many workers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from plait.errors import PlaitError
from plait.foreign_configs.syntax import json_values, yaml_values
from plait.regular_file import read_regular_text

_TORCHRUN_FLAGS = {"--standalone", "--no-python", "--no_python", "--run-path", "--run_path"}
_PYTHON_VALUES = {"-X", "-W", "--check-hash-based-pycs"}
_LAUNCH_MODULES = {"torch.distributed.run": "torchrun", "torch.distributed.launch": "torchrun",
                   "accelerate.commands.launch": "accelerate", "accelerate": "accelerate"}  # fmt: skip
_ACCELERATE_KINDS = {"multi_gpu", "use_deepspeed", "use_fsdp", "use_megatron_lm"}
"""Options of accelerate launch that count more than the distributed_type of its configuration file."""
_ACCELERATE_UNSUPPORTED = {"DEEPSPEED", "FSDP", "MEGATRON_LM", "TPU", "XLA"}
_CONFIG_BYTES = 1 << 20
_OTHERS = {"srun": "Slurm", "mpirun": "MPI", "mpiexec": "MPI", "deepspeed": "DeepSpeed's launcher", "uv": "uv",
           "poetry": "poetry", "conda": "conda", "bash": "a shell", "sh": "a shell"}  # fmt: skip
OUTPUT_ARGUMENTS = ("output_dir", "out_dir", "save_dir", "checkpoint_dir", "ckpt_dir", "logging_dir", "log_dir",
                    "save_folder", "output_folder", "checkpoint_folder")  # fmt: skip
"""Arguments that name a folder for the program's output, with - or _ between the words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedProgram:
    """The user's program and its arguments, without the launcher."""

    kind: Literal["file", "module"]
    name: str
    """The file's path, or the module's name."""
    arguments: tuple[str, ...] = ()
    workers: int | None = None
    """From the launcher's options; None if they do not say."""
    environment: Mapping[str, str]
    python: str = ""
    """The path of the interpreter in the command; empty for the one that runs plait."""
    changed: tuple[str, ...] = ()
    """What the launcher would have done differently, for the report."""


def read_launch_command(words: Sequence[str]) -> WatchedProgram:
    """Read `torchrun …`, `python …`, `accelerate launch …`, or a program's file alone.

    Raises PlaitError for an unknown launcher or a missing file.
    """
    environment: dict[str, str] = {}
    rest = list(words)
    if rest and rest[0] == "env":
        rest = rest[1:]
    while rest and "=" in rest[0] and rest[0].partition("=")[0].isidentifier():
        name, _, value = rest.pop(0).partition("=")
        environment[name] = value
    if not rest:
        raise PlaitError("plait check needs the command that starts your program: plait check -- torchrun train.py")
    first = Path(rest[0]).name
    if first in _OTHERS:
        raise PlaitError(
            f"plait check starts the workers itself, so it cannot use {_OTHERS[first]}",
            "give it the torchrun, python or accelerate command within: plait check -- python train.py",
        )
    if first == "torchrun":
        program = _torchrun(rest[1:])
    elif first in ("accelerate", "accelerate-launch"):
        program = _accelerate(rest[1:])
    elif first.startswith(("python", "pypy")):
        program = _python(rest[1:])
        program = replace(program, python=rest[0] if "/" in rest[0] else "")
    elif first.endswith(".py"):
        program = _file(rest[0], rest[1:])
    else:
        raise PlaitError(
            f"plait check does not know the launcher {rest[0]}",
            "use torchrun, python or accelerate launch, as in: plait check -- torchrun train.py",
        )
    return replace(program, environment={**program.environment, **environment})


def output_folders(program: WatchedProgram) -> Mapping[str, str]:
    """The values of output arguments such as --output_dir, by option."""
    found: dict[str, str] = {}
    for word, after in pairwise((*program.arguments, "")):
        option, equals, value = word.partition("=")
        if option.startswith("--") and option[2:].replace("-", "_") in OUTPUT_ARGUMENTS:
            found[option] = value if equals else after
    return found


def with_outputs_in(program: WatchedProgram, folder: Path) -> tuple[WatchedProgram, tuple[str, ...]]:
    """The program with its output arguments pointing into `folder`, and the options that were changed."""
    changed = output_folders(program)
    places = {option: str(folder / option[2:].replace("-", "_")) for option in changed}
    arguments = list(program.arguments)
    for index, word in enumerate(arguments):
        option, equals, _ = word.partition("=")
        if option not in places:
            continue
        if equals:
            arguments[index] = f"{option}={places[option]}"
        elif index + 1 < len(arguments):
            arguments[index + 1] = places[option]
    return replace(program, arguments=tuple(arguments)), tuple(changed)


def _torchrun(words: Sequence[str]) -> WatchedProgram:
    workers, kind, rest = None, "file", list(words)
    while rest and rest[0].startswith("-"):
        option, equals, value = rest.pop(0).partition("=")
        if option in ("-m", "--module"):
            kind = "module"
        elif option not in _TORCHRUN_FLAGS:
            value = value if equals else rest.pop(0) if rest else ""
            if option.replace("_", "-") == "--nproc-per-node" and value.isdecimal():
                workers = int(value)
            if option == "--nnodes" and value not in ("", "1", "1:1"):
                raise PlaitError(f"--nnodes {value}: plait check runs on one machine; leave --nnodes out")
    found = _named(kind, rest, "torchrun")
    return replace(found, workers=workers)


def _accelerate(words: Sequence[str]) -> WatchedProgram:
    kind, rest = "file", list(words[1:] if words and words[0] == "launch" else words)
    options: dict[str, str] = {}
    while rest and not rest[0].endswith(".py"):
        option, equals, value = rest.pop(0).partition("=")
        if option in ("-m", "--module"):
            kind = "module"
            break
        takes = equals or (rest and not rest[0].startswith("-") and not rest[0].endswith(".py"))
        options[option.lstrip("-").replace("-", "_")] = value if equals else rest.pop(0) if takes else ""
    for name in ("use_deepspeed", "use_fsdp", "use_megatron_lm"):
        if name in options:
            raise PlaitError(
                f"accelerate launch --{name} is not supported by plait check", "check the plain DDP form of the program"
            )
    settings = {**_accelerate_config(options), **options}
    machines, workers = _number(settings.get("num_machines")), _number(settings.get("num_processes"))
    if machines is not None and machines > 1:
        raise PlaitError(
            f"num_machines {machines}: plait check runs on one machine",
            "give it one: accelerate launch --num_machines 1 --num_processes 2 train.py",
        )
    found = _named(kind, rest, "accelerate launch")
    precision, changed = str(settings.get("mixed_precision") or "no"), ()
    if precision in ("fp16", "fp8"):
        changed = (f"accelerate's mixed precision {precision}, which needs a GPU, is off",)
        precision = "no"
    environment = {"ACCELERATE_MIXED_PRECISION": precision} if settings.get("mixed_precision") else {}
    return replace(found, workers=workers, environment=environment, changed=changed)


def _accelerate_config(options: Mapping[str, str]) -> Mapping[str, Any]:
    """What the configuration file says that accelerate launch would read: the named one, else the person's default.

    Raises PlaitError for a launch that plait check does not support.
    """
    named = options.get("config_file", "")
    path = Path(named) if named else _default_accelerate_config()
    if not named and ("cpu" in options or not path.is_file()):
        return {}
    try:
        text = read_regular_text(path, _CONFIG_BYTES)
    except (OSError, ValueError) as error:
        why = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise PlaitError(f"{path}, accelerate's configuration, {why}", "check the path after --config_file") from None
    values = json_values(text, str(path)) if path.suffix == ".json" else yaml_values(text, str(path))
    kind = str(values.get("distributed_type", "NO")).upper()
    if kind in _ACCELERATE_UNSUPPORTED and _ACCELERATE_KINDS.isdisjoint(options):
        raise PlaitError(
            f"{path} asks for {kind}, which plait check does not support",
            "check the plain DDP form of the program: accelerate launch --multi_gpu train.py",
        )
    # A file of one process, as `accelerate config` writes for one GPU, says nothing about how many to compare.
    found = {name: values.get(name) for name in ("num_machines", "num_processes", "mixed_precision")}
    return {**found, "num_processes": None} if found["num_processes"] == 1 else found


def _default_accelerate_config() -> Path:
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "accelerate" / "default_config.yaml"


def _number(value: object) -> int | None:
    """A whole number of an option or a configuration; None for another value."""
    text = str(value)
    return int(text) if text.isdecimal() and len(text) <= 6 else None


def _python(words: Sequence[str]) -> WatchedProgram:
    rest = list(words)
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option == "-c":
            raise PlaitError("plait check cannot check python -c", "write the program to a file")
        if option == "-m":
            module = rest[0] if rest else ""
            if module in _LAUNCH_MODULES:
                return _torchrun(rest[1:]) if _LAUNCH_MODULES[module] == "torchrun" else _accelerate(rest[1:])
            return _named("module", rest, "python -m")
        if option in _PYTHON_VALUES and rest:
            rest.pop(0)
    return _named("file", rest, "python")


def _named(kind: str, rest: Sequence[str], launcher: str) -> WatchedProgram:
    if not rest:
        raise PlaitError(
            f"the {launcher} command names no program", "write it after the options: plait check -- torchrun train.py"
        )
    if kind == "module":
        return WatchedProgram(kind="module", name=rest[0], arguments=tuple(rest[1:]), environment={})
    return _file(rest[0], rest[1:])


def _file(name: str, arguments: Sequence[str]) -> WatchedProgram:
    if not Path(name).is_file():
        raise PlaitError(f"{name} does not exist", "check the path, which is relative to the current folder")
    return WatchedProgram(kind="file", name=name, arguments=tuple(arguments), environment={})
