"""Turns a configuration's text into the run that it describes: recognizes the format, reads it, and applies the user's
overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from plait.errors import PlaitError
from plait.foreign_configs.axolotl import AXOLOTL
from plait.foreign_configs.command_line import CommandLine, command_line
from plait.foreign_configs.deepspeed import DEEPSPEED
from plait.foreign_configs.keys import ConfigFormat, amount, as_written, description, is_known, whole, word
from plait.foreign_configs.litgpt import LITGPT
from plait.foreign_configs.megatron import MEGATRON_ARGUMENTS
from plait.foreign_configs.models import is_there
from plait.foreign_configs.python_source import python_values
from plait.foreign_configs.run_description import RunDescription
from plait.foreign_configs.syntax import json_values, toml_values, yaml_values
from plait.foreign_configs.torchtitan import TORCHTITAN_TOML
from plait.foreign_configs.training_arguments import TRAINING_ARGUMENTS, launcher_values
from plait.regular_file import read_regular_text

FORMATS = (AXOLOTL, LITGPT, TORCHTITAN_TOML, DEEPSPEED, TRAINING_ARGUMENTS, MEGATRON_ARGUMENTS)
MOST_CONFIG_BYTES = 1 << 20
"""Largest size of a configuration or script; reading YAML takes about a second per 100 KB."""
CONFIG_SUFFIXES = (".yaml", ".yml", ".toml", ".json", ".sh", ".slurm", ".sbatch")
"""Suffixes of files that are configurations."""
_CONFIG_OPTIONS = ("config", "config_file", "job.config_file", "config-file")
OVERRIDES: Mapping[str, tuple[str, Any]] = {
    "model": ("a model's name, or the path of its config.json", as_written),
    "sequence": ("tokens of a sequence", whole),
    "micro_sequences": ("sequences of a micro-batch on one device", whole),
    "accumulation": ("micro-batches that are accumulated", whole),
    "batch_sequences": ("sequences of a step on all devices", whole),
    "devices": ("devices that the run uses", whole),
    "sharded": ("what data-parallel ranks shard: nothing, optimizer, gradients, parameters", word),
    "recompute": ("none, selective, full", word),
    "weights": ("float32 or bf16: the precision of stored weights", word),
    "optimizer": ("the optimizer's name", word),
    "attention": ("flash or unfused", word),
    "vocabulary": ("size of the vocabulary", whole),
    "steps": ("optimizer steps of the run", whole),
    "samples": ("training examples of an epoch", whole),
    "epochs": ("passes over the examples", amount),
}
"""Values that the user may give in addition to the file, with the function that reads each."""
_WORDS = {
    "sharded": ("nothing", "optimizer", "gradients", "parameters"),
    "recompute": ("none", "selective", "full"),
    "weights": ("float32", "bf16"),
    "attention": ("flash", "unfused"),
}


def is_configuration(target: str, said: Sequence[str] = (), *, names_machines: bool = False) -> bool:
    """Whether the first word of `plait check` names a configuration rather than a program to run.

    A Python file is a program, unless machines are named or an argument is an override that only a configuration has.
    """
    if Path(target).suffix.lower() == ".py":
        return names_machines or (bool(said) and all(text.partition("=")[0] in OVERRIDES for text in said))
    return Path(target).suffix.lower() in CONFIG_SUFFIXES or " " in target.strip()


def read_configuration(target: str, overrides: Sequence[str] = ()) -> tuple[str, RunDescription]:
    """The format's name and the described run, of a file or of a command line given as one text.

    Raises PlaitError, in one sentence, for text that cannot be read, recognized or reconciled.
    """
    said = _overrides(overrides)
    path = Path(target)
    if " " in target.strip() and not is_there(path):
        return _of_command(command_line(target, "the command line"), path.parent, said)
    return _of_text(_text_of(path), path, said)


def _text_of(path: Path) -> str:
    try:
        return read_regular_text(path, MOST_CONFIG_BYTES)
    except FileNotFoundError:
        raise PlaitError(f"there is no file {path}") from None
    except UnicodeDecodeError:
        raise PlaitError(f"{path} is not a text in UTF-8") from None
    except (OSError, ValueError) as error:  # a name with a NUL
        raise PlaitError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _of_text(text: str, path: Path, said: Mapping[str, Any]) -> tuple[str, RunDescription]:
    where = str(path)
    if not text.strip():
        raise PlaitError(f"{where} is empty")
    match path.suffix.lower():
        case ".toml":
            return _of_values(toml_values(text, where), (TORCHTITAN_TOML,), where, said)
        case ".json":
            return _of_values(json_values(text, where), (DEEPSPEED, TRAINING_ARGUMENTS), where, said)
        case ".yaml" | ".yml":
            return _of_values(yaml_values(text, where), (AXOLOTL, LITGPT, TRAINING_ARGUMENTS), where, said)
        case ".py":
            return _of_values(python_values(text, where), (TRAINING_ARGUMENTS,), where, said)
        case _:
            return _of_command(command_line(text, where), path.parent, said)


def _of_values(
    values: Mapping[str, Any], among: Sequence[ConfigFormat], where: str, said: Mapping[str, Any]
) -> tuple[str, RunDescription]:
    likely = [one for one in among if any(mark in values for mark in one.marks)]
    if not likely:
        names = "; ".join(f"{one.name} has {' or '.join(one.marks[:3])}" for one in among)
        others = ", ".join(one.name for one in FORMATS)
        raise PlaitError(f"{where} is in no format that plait knows ({names}); it reads: {others}")
    chosen = max(likely, key=lambda one: sum(is_known(key, one.known_keys) for key in values))
    return chosen.name, _with(description(chosen, values, said), said)


def _of_command(command: CommandLine, folder: Path, said: Mapping[str, Any]) -> tuple[str, RunDescription]:
    options = dict(command.options)
    if command.program in ("litgpt", "axolotl", "trl") or any(key in options for key in _CONFIG_OPTIONS):
        found = _of_named_file(command, folder, said)
        if found is not None:
            return found[0], _on_devices(found[1], command, said)
    flags = {key.replace("_", "-"): value for key, value in options.items()}
    if len(flags) < len(options):
        raise PlaitError("an option is given twice, with - and with _; keep one")
    megatron = sum(mark in flags for mark in MEGATRON_ARGUMENTS.marks)
    trainer = {key.replace("-", "_"): value for key, value in options.items()}
    hugging = sum(mark in trainer for mark in TRAINING_ARGUMENTS.marks)
    if not megatron and not hugging:
        raise PlaitError(
            f"{command.program} is in no format that plait knows: its options include neither --num-layers and "
            "--micro-batch-size (Megatron) nor --per_device_train_batch_size (transformers, TRL)"
        )
    one, values = (MEGATRON_ARGUMENTS, flags) if megatron >= hugging else (TRAINING_ARGUMENTS, trainer)
    if one is TRAINING_ARGUMENTS:
        launcher = {**_launcher_file(command, folder, said), **launcher_values(command.launcher)}
        values = {**launcher, **values}
        if command.devices is None and launcher.get("num_processes") is not None:
            command = replace(command, devices=whole("num_processes", launcher["num_processes"]))
    return one.name, _on_devices(_with(description(one, values, said), said), command, said)


def _of_named_file(command: CommandLine, folder: Path, said: Mapping[str, Any]) -> tuple[str, RunDescription] | None:
    """The run of a command's configuration file, with the command's own options taking precedence over the file."""
    named = next((command.options[key] for key in _CONFIG_OPTIONS if isinstance(command.options.get(key), str)), None)
    words = [one for one in command.arguments if Path(one).suffix.lower() in (".yaml", ".yml", ".toml")]
    file = named or (words[0] if words else None)
    if file is None:
        return None
    path = folder / file
    if not is_there(path):
        raise PlaitError(f"the command reads {file}, which does not exist; name that file instead of the command")
    text = _text_of(path)
    own = {key.replace("-", "_"): value for key, value in command.options.items() if key not in _CONFIG_OPTIONS}
    if path.suffix.lower() == ".toml":
        values = {**toml_values(text, str(path)), **own}
        return _of_values(values, (TORCHTITAN_TOML,), str(path), said)
    values = {**yaml_values(text, str(path)), **own}
    return _of_values(values, (AXOLOTL, LITGPT, TRAINING_ARGUMENTS), str(path), said)


def _launcher_file(command: CommandLine, folder: Path, said: Mapping[str, Any]) -> Mapping[str, Any]:
    """Values of the file of `accelerate launch`; none if it is missing and the user says what is sharded."""
    name = command.launcher.get("config-file")
    if not isinstance(name, str):
        return {}
    path = folder / name
    if is_there(path):
        return yaml_values(_text_of(path), str(path))
    if "sharded" in said:
        return {}
    raise PlaitError(
        f"accelerate reads {name}, which does not exist; give sharded=nothing (DDP), sharded=parameters (FSDP, "
        "ZeRO-3), sharded=gradients (ZeRO-2) or sharded=optimizer (ZeRO-1)"
    )


def _on_devices(run: RunDescription, command: CommandLine, said: Mapping[str, Any]) -> RunDescription:
    if "devices" in said or run.devices is not None or command.devices is None:
        return run
    return replace(run, devices=command.devices, per_node=command.per_node)


def _overrides(texts: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or key not in OVERRIDES:
            raise PlaitError(
                f"{text!r:.60} is not one of the values to give with a file: {', '.join(f'{k}=…' for k in OVERRIDES)}"
            )
        if key in found:
            raise PlaitError(f"{key} is given twice; keep one")
        read = OVERRIDES[key][1](key, value)
        if key in _WORDS and read not in _WORDS[key]:
            raise PlaitError(f"{text} is not a choice; choose {', '.join(_WORDS[key])}")
        found[key] = read
    return found


def _with(run: RunDescription, said: Mapping[str, Any]) -> RunDescription:
    """The description with the user's values in place of the file's."""
    changed = {key: value for key, value in said.items() if key not in ("weights", "vocabulary", "model")}
    if "weights" in said:
        changed["weights"] = "float32" if said["weights"] == "float32" else "16 bits"
    if "model" in said:
        changed |= {"model": said["model"], "shape": {}}
    if "vocabulary" in said:
        changed["shape"] = {**changed.get("shape", run.shape), "vocabulary": said["vocabulary"]}
    if "batch_sequences" in said and "accumulation" not in said:
        changed["accumulation"] = None
    elif {"micro_sequences", "accumulation"} & said.keys() and "batch_sequences" not in said:
        changed["batch_sequences"] = None if "accumulation" in said else run.batch_sequences
    assert changed.keys() <= {one.name for one in fields(RunDescription)}
    kept = tuple(line for line in run.assumed if not any(f"{key}=" in line for key in said))
    return replace(run, **changed, assumed=kept)
