"""Keyword values of a configuration in Python source, which is parsed and never executed: from a call such as
`SFTConfig(...)`, or a dataclass with defaults."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from plait.errors import PlaitError
from plait.foreign_configs.syntax import Placeholder, is_endless

CONFIGURATIONS = ("TrainingArguments", "SFTConfig", "DPOConfig", "KTOConfig", "ORPOConfig", "CPOConfig", "RewardConfig")
"""Classes of transformers and TRL whose arguments are read, including subclasses with these names."""
_BESIDE = ("LoraConfig", "ModelConfig", "BitsAndBytesConfig")
_PEFT_NAMES = {"r": "lora_r", "target_modules": "lora_target_modules"}


def python_values(text: str, where: str) -> dict[str, Any]:
    """Values by keyword; a value that is neither a literal nor a constant of the file is a Placeholder."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise PlaitError(f"{where} is not valid Python: {error}") from None
    constants = {name: value for name, value in _constants(tree) if not isinstance(value, Placeholder)}
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        name = _called(node)
        if name.endswith(CONFIGURATIONS) or name in _BESIDE:
            assert isinstance(node, ast.Call)
            for word in node.keywords:
                key = _PEFT_NAMES.get(word.arg or "", word.arg) if name == "LoraConfig" else word.arg
                if key is None:
                    continue
                value = _value(word.value, constants)
                if key in found and found[key] != value:
                    raise PlaitError(f"{where} gives {key} twice: {found[key]!r:.40} and {value!r:.40}; keep one")
                found[key] = value
            if name == "LoraConfig":
                found.setdefault("use_peft", True)
        elif name == "from_pretrained" and isinstance(node, ast.Call) and node.args:
            found.setdefault("model_name_or_path", _value(node.args[0], constants))
            for word in node.keywords:
                if word.arg in ("torch_dtype", "dtype", "attn_implementation"):
                    found.setdefault(word.arg, _value(word.value, constants))
        elif isinstance(node, ast.ClassDef) and _is_dataclass(node):
            found |= {key: value for key, value in _fields(node, constants) if value is not None}
    if not found:
        raise PlaitError(
            f"{where} has neither a call of {', '.join(CONFIGURATIONS[:3])} … nor a dataclass with defaults; give a "
            "file that has one, or give the arguments as JSON"
        )
    return found


def _called(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _constants(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, _value(node.value, {})


def _is_dataclass(node: ast.ClassDef) -> bool:
    names = [ast.unparse(one) for one in (*node.decorator_list, *node.bases)]
    return any(name.split("(")[0].endswith(("dataclass", *CONFIGURATIONS)) for name in names)


def _fields(node: ast.ClassDef, constants: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and one.value is not None:
            value = one.value
            if _called(value) == "field":
                assert isinstance(value, ast.Call)
                default = next((word.value for word in value.keywords if word.arg == "default"), None)
                if default is None:
                    continue
                value = default
            yield one.target.id, _value(value, constants)


def _value(node: ast.expr, constants: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name) and node.id in constants:
        return constants[node.id]
    if isinstance(node, ast.Attribute):  # torch.bfloat16
        return node.attr
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return _unknown(node)
    return _unknown(node) if is_endless(value) else value


def _unknown(node: ast.expr) -> Placeholder:
    try:
        return Placeholder(ast.unparse(node))
    except (ValueError, RecursionError):  # a number of thousands of digits, a sum of thousands of terms
        return Placeholder("an expression")
