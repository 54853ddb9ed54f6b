"""Reads an adapter of PEFT's files for a model that is known, refuses what it would compute otherwise, and puts it
beside that model's weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isclose, sqrt
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from plait.errors import PlaitError
from plait.interop.adapter_out import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE_KEY, QUANTIZATION_KEY
from plait.interop.base_model import read_json_file
from plait.interop.configs.adapter_values import alphas_of, check_adapter_values, ranks_of
from plait.interop.links import refuse_links_out
from plait.interop.peft_names import PeftModule, peft_modules, saved_key, saved_tables
from plait.model.adapter_shape import QUANTIZED_BLOCK_BYTES, AdapterShape, AdapterTarget, Quantization
from plait.model.adapters import directed_weight
from plait.model.gpt import GPT, share_kept_values
from plait.model.names import ADAPTER_A, ADAPTER_B, EMBEDDING, HEAD
from plait.model.shape import ModelShape, linear_layers, linear_layers_in, weight_sizes
from plait.model.weights import SAVED_TABLES

Factors = tuple[Tensor, Tensor]
"""A [rank, in] and B [out, rank] of a linear layer's adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAdapter:
    """An adapter in memory."""

    shape: AdapterShape
    weights: Mapping[str, Tensor]
    """By our names."""
    base: str
    """Fingerprint of the base that it was trained on; empty where its files do not say."""
    magnitudes: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """DoRA's: the length [out] of each row of an adapted weight, by the names of linear layers; empty without it."""
    unties: bool = False
    """Whether the tables that it brings are two where the base's are one."""


def read_adapter(folder: Path, family: str, shape: ModelShape) -> LoadedAdapter:
    """The adapter in a folder for a model of this family and shape; raises PlaitError where it is of another model, or
    of a kind that plait does not compute."""
    refuse_links_out(folder, (ADAPTER_CONFIG, ADAPTER_WEIGHTS))
    config = read_json_file(folder / ADAPTER_CONFIG, instead="name a folder that PEFT or plait wrote")
    check_adapter_values(folder / ADAPTER_CONFIG, config)
    tensors, metadata = _tensors(folder / ADAPTER_WEIGHTS)
    known = peft_modules(family, shape, linear_layers(shape))
    tables = _tables(folder, family, shape, config, tensors)
    unties = shape.tied and bool(tables) and _are_untied(tables, config)
    magnitude_keys = {one.magnitude_key for one in known} if config.get("use_dora") else set[str]()
    others = {*magnitude_keys, *(saved_key(module) for module in saved_tables(family).values())}
    factor_tensors = {name: one for name, one in tensors.items() if name not in others}
    modules = _modules_present(folder, known, factor_tensors, shape)
    pairs = [(tensors[module.key("A")], tensors[module.key("B")]) for module in modules]
    names = [module.name for module in modules]
    ranks = ranks_of(folder / ADAPTER_CONFIG, config, names)
    alphas = alphas_of(folder / ADAPTER_CONFIG, config, names)
    for module, pair, rank in zip(modules, pairs, ranks, strict=True):
        _check_pair(folder, module, pair, rank)
    # A module's product is multiplied by its alpha over its own rank, or over the root of it.
    variant = "rslora" if config.get("use_rslora") else "lora"
    scales = [alpha / (sqrt(own) if variant == "rslora" else own) for alpha, own in zip(alphas, ranks, strict=True)]
    usual = ranks_of(folder / ADAPTER_CONFIG, {**config, "rank_pattern": {}}, [""])[0]
    factors: dict[str, Factors] = {}
    for module, pair, scale in zip(modules, pairs, scales, strict=True):
        # Ours have one scale: where a module has another one, its B is that much larger.
        other = 1.0 if isclose(scale, scales[0], rel_tol=1e-6) else scale / scales[0]
        factors |= {name: (a, b * other) for name, (a, b) in _own_factors(module, pair, usual).items()}
    rank = max(len(a) for a, _ in factors.values())
    alpha = scales[0] * (sqrt(rank) if variant == "rslora" else rank)
    _check_sizes(folder, factors, shape)
    _refuse_not_finite(folder, tensors)
    magnitudes = _magnitudes(folder, modules, tensors) if magnitude_keys else {}
    targets = _targets(folder, modules, shape, config)
    if shape.tied and not unties:
        tables = {EMBEDDING: next(iter(tables.values()))} if tables else {}
    weights = {**_filled_up(factors, targets, rank, shape), **tables}
    kept = metadata.get(QUANTIZATION_KEY, "none")
    adapter = AdapterShape(
        rank=rank,
        alpha=alpha,
        targets=targets,
        variant=variant,
        quantization=_known_quantization(folder, kept),
        modules_to_save=tuple(SAVED_TABLES[table] for table in (EMBEDDING, HEAD) if table in tables),
    )
    return LoadedAdapter(
        shape=adapter, weights=weights, magnitudes=magnitudes, unties=unties, base=metadata.get(BASE_KEY, "")
    )


@torch.no_grad()
def with_adapter(model: GPT, adapter: LoadedAdapter) -> GPT:
    """A model of the same weights, which it shares with `model`, and an adapter of its own, with the tables that this
    brings. `model` has none. A DoRA adapter is merged into separate weights."""
    model = _with_tables(model, adapter)
    if adapter.magnitudes:
        return _with_directions(model, adapter)
    with torch.device("meta"):
        adapted = GPT(replace(model.shape, adapter=adapter.shape), model.part)
    base = dict(model.named_parameters())
    like = next(iter(base.values()))
    for name, _ in list(adapted.named_parameters()):
        own = base[name].data if name in base else adapter.weights[name].to(like.device, like.dtype)
        path, _, leaf = name.rpartition(".")
        setattr(adapted.get_submodule(path), leaf, nn.Parameter(own, requires_grad=False))
    share_kept_values(model, adapted)
    return adapted.eval()


def _with_tables(model: GPT, adapter: LoadedAdapter) -> GPT:
    """A model of the same weights, but for the tables that an adapter brings."""
    base = dict(model.named_parameters())
    like = base[EMBEDDING]
    tables = {
        name: adapter.weights[name].to(like.device, like.dtype) for name in SAVED_TABLES if name in adapter.weights
    }
    if not tables:
        return model
    if adapter.unties:
        tables = {name: tables.get(name, like.data) for name in SAVED_TABLES}
    tied, rows = model.shape.tied and not adapter.unties, len(next(iter(tables.values())))
    with torch.device("meta"):
        changed = GPT(replace(model.shape, tied=tied, vocabulary=rows), model.part)
    for name, _ in list(changed.named_parameters()):
        path, _, leaf = name.rpartition(".")
        own = tables[name] if name in tables else base[name].data
        setattr(changed.get_submodule(path), leaf, nn.Parameter(own, requires_grad=False))
    share_kept_values(model, changed)
    return changed.eval()


def _with_directions(model: GPT, adapter: LoadedAdapter) -> GPT:
    with torch.device("meta"):
        merged = GPT(model.shape, model.part)
    for name, weight in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        own = weight.data
        if leaf == "weight" and path in adapter.magnitudes:
            a, b = (adapter.weights[f"{path}.{letter}"].to(own.device) for letter in (ADAPTER_A, ADAPTER_B))
            own = directed_weight(own, a, b, adapter.shape.scale, adapter.magnitudes[path].to(own.device))
        setattr(merged.get_submodule(path), leaf, nn.Parameter(own, requires_grad=False))
    share_kept_values(model, merged)
    return merged.eval()


def _tables(
    folder: Path, family: str, shape: ModelShape, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The vocabulary's tables that were stored with an adapter, by our names; raises PlaitError for other whole modules
    and for tables that do not fit the model."""
    modules, listed = saved_tables(family), config.get("modules_to_save") or []
    listed = listed if isinstance(listed, list) else [listed]
    short = {name.rpartition(".")[2] for name in modules.values()}
    for name in listed:
        if not isinstance(name, str) or name.rpartition(".")[2] not in short:
            raise PlaitError(
                f"modules_to_save in {folder / ADAPTER_CONFIG} has {name!r:.40}, and plait reads "
                f"{' and '.join(sorted(short))} alone; merge this adapter into its model with PEFT"
            )
    found = {table: tensors[saved_key(name)] for table, name in modules.items() if saved_key(name) in tensors}
    for name in listed:
        if not any(modules[table].endswith(name.rpartition(".")[2]) for table in found):
            raise PlaitError(
                f"{folder / ADAPTER_WEIGHTS} lacks {name}, which modules_to_save names; bring the whole file"
            )
    rows = {len(one) if one.ndim == 2 and one.shape[1] == shape.width else 0 for one in found.values()}
    brings_all = len(found) == len(modules) or (shape.tied and (not listed or config.get("ensure_weight_tying")))
    if rows and (len(rows) > 1 or min(rows) < shape.vocabulary or (max(rows) > shape.vocabulary and not brings_all)):
        table, one = next(iter(found.items()))
        raise PlaitError(
            f"the adapter in {folder} is of another base: its {modules[table]} has the shape {list(one.shape)}, and "
            f"this model asks for {[shape.vocabulary, shape.width]}; name the model that it was trained on"
        )
    if rows and max(rows) > shape.vocabulary and shape.layer_input_width:
        raise PlaitError(
            f"the adapter in {folder} brings {max(rows)} tokens, and this model's layers have a table of their own for "
            f"{shape.vocabulary}; take an adapter without added tokens"
        )
    return found


def _are_untied(tables: Mapping[str, Tensor], config: Mapping[str, Any]) -> bool:
    """Whether PEFT computes with two tables where the base has one: as a module that it trains is a copy, unless it is
    to keep both the same. Tables that it stored for new rows alone are the base's own."""
    if len(tables) == 2:
        return not torch.equal(tables[EMBEDDING], tables[HEAD])
    return bool(config.get("modules_to_save")) and not config.get("ensure_weight_tying")


def _magnitudes(folder: Path, modules: Sequence[PeftModule], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """DoRA's lengths of rows by linear layer of ours."""
    found: dict[str, Tensor] = {}
    for module in modules:
        if module.magnitude_key not in tensors:
            raise PlaitError(f"{folder / ADAPTER_WEIGHTS} lacks {module.magnitude_key}; bring the whole file")
        whole, outputs = tensors[module.magnitude_key].flatten(), len(tensors[module.key("B")])
        if len(whole) != outputs:
            raise PlaitError(
                f"{module.magnitude_key} in {folder / ADAPTER_WEIGHTS} has {len(whole)} numbers beside {outputs} "
                "outputs; bring the whole file"
            )
        for part, target in module.targets.items():
            found[f"layers.{module.layer}.{target}"] = whole[module.outputs_of(part, outputs)]
    return found


def _tensors(file: Path) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    if not file.is_file():
        raise PlaitError(f"there is no {file.name} in {file.parent}; bring it from where the adapter came")
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name).float() for name in opened.keys()}, opened.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise PlaitError(f"{file} is damaged ({error}); download it again") from None


def _modules_present(
    folder: Path, known: list[PeftModule], tensors: Mapping[str, Tensor], shape: ModelShape
) -> list[PeftModule]:
    """The modules of a model that have an adapter; raises PlaitError for tensors of any other."""
    by_key = {module.key(letter): module for module in known for letter in "AB"}
    for name in tensors:
        if name not in by_key:
            raise PlaitError(
                f"the adapter in {folder} is of another base: it has {name[:120]}, and no such linear layer is among "
                f"the {shape.layers} layers of this model; name the model that it was trained on"
            )
    found = [module for module in known if module.key("A") in tensors or module.key("B") in tensors]
    if not found:
        raise PlaitError(f"{folder / ADAPTER_WEIGHTS} is empty: the adapter was saved without its weights")
    for module in found:
        for letter in "AB":
            if module.key(letter) not in tensors:
                raise PlaitError(f"{folder / ADAPTER_WEIGHTS} lacks {module.key(letter)}; bring the whole file")
    return found


def _targets(
    folder: Path, modules: list[PeftModule], shape: ModelShape, config: Mapping[str, Any]
) -> tuple[AdapterTarget, ...]:
    """The linear layers that have adapters in some layer: the same in each, unless the adapter names its layers."""
    each = [{t for m in modules if m.layer == layer for t in m.targets.values()} for layer in range(shape.layers)]
    found = set[AdapterTarget]().union(*each)
    if any(own != found & set(linear_layers_in(shape, layer)) for layer, own in enumerate(each)) and config.get(
        "layers_to_transform"
    ) in (None, []):
        raise PlaitError(
            f"the adapter in {folder} adapts other linear layers in some layers than in others, or has fewer layers "
            f"than the {shape.layers} of this model; name the model that it was trained on"
        )
    return tuple(target for target in linear_layers(shape) if target in found)


def _filled_up(
    factors: Mapping[str, Factors], targets: Sequence[AdapterTarget], rank: int, shape: ModelShape
) -> dict[str, Tensor]:
    """A and B of each target in each layer, all of one rank: what an adapter has less is filled up with zeros, which
    add nothing."""
    sizes, weights = weight_sizes(shape), dict[str, Tensor]()
    for layer in range(shape.layers):
        for target in [one for one in targets if one in linear_layers_in(shape, layer)]:
            name = f"layers.{layer}.{target}"
            outputs, inputs = sizes[f"{name}.weight"]
            whole_a, whole_b = torch.zeros(rank, inputs), torch.zeros(outputs, rank)
            if name in factors:
                a, b = factors[name]
                whole_a[: len(a)], whole_b[:, : len(a)] = a, b
            weights |= {f"{name}.{ADAPTER_A}": whole_a, f"{name}.{ADAPTER_B}": whole_b}
    return weights


def _check_pair(folder: Path, module: PeftModule, pair: tuple[Tensor, Tensor], rank: int) -> None:
    """Raise PlaitError where a module's tensors are not the A and the B of an adapter of this rank."""
    a, b = pair
    are_factors = a.ndim == b.ndim == 2 and a.numel() and a.shape[0] == b.shape[1]
    if not are_factors or (b.shape[0] % module.parts and b.shape[0] != sum(module.outputs)):
        raise PlaitError(
            f"{module.name} in {folder / ADAPTER_WEIGHTS} has the shapes {list(a.shape)} and {list(b.shape)}, which "
            "cannot be an adapter's: was it saved from one of several ranks?"
        )
    if a.shape[0] != rank:
        raise PlaitError(
            f"{module.name} in {folder} has the rank {a.shape[0]}, and {ADAPTER_CONFIG} says {rank} (r, rank_pattern); "
            "bring both files of one adapter"
        )


def _filled_blocks(module: PeftModule, pair: tuple[Tensor, Tensor], rank: int) -> dict[int, slice] | None:
    """For each part of a module that holds several adapters of ours, which rows of A and columns of B are its own; None
    where a part uses others as well."""
    a, b = pair
    if a.shape[0] % rank:
        return None
    blocks = [slice(at, at + rank) for at in range(0, a.shape[0], rank)]
    found: dict[int, slice] = {}
    for part in module.targets:
        rows = b[module.outputs_of(part, b.shape[0])]
        filled = int(rows.count_nonzero())
        columns = next((one for one in blocks if int(rows[:, one].count_nonzero()) == filled), None)
        if columns is None:
            return None
        found[part] = columns
    return found


def _own_factors(module: PeftModule, pair: Factors, rank: int) -> dict[str, Factors]:
    """A and B of each linear layer of ours in one of PEFT's modules. `rank` is that of each, where they are several
    adapters of ours."""
    a, b = pair
    blocks = _filled_blocks(module, pair, rank) if module.parts > 1 else None
    columns = blocks or dict.fromkeys(module.targets, slice(None))
    return {
        f"layers.{module.layer}.{target}": (a[columns[part]], b[module.outputs_of(part, b.shape[0]), columns[part]])
        for part, target in module.targets.items()
    }


def _check_sizes(folder: Path, factors: Mapping[str, Factors], shape: ModelShape) -> None:
    """Raise PlaitError, naming the first, where a weight does not fit the linear layer beside it."""
    sizes = weight_sizes(shape)
    for name, (a, b) in factors.items():
        outputs, inputs = sizes[f"{name}.weight"]
        for letter, found, wanted in (
            (ADAPTER_A, a, (len(a), inputs)),
            (ADAPTER_B, b, (outputs, len(a))),
        ):
            if tuple(found.shape) != wanted:
                raise PlaitError(
                    f"the adapter in {folder} is of another base: its {name}.{letter} has the shape "
                    f"{list(found.shape)}, and this model asks for {list(wanted)}; name the model that it was trained "
                    "on"
                )


def _refuse_not_finite(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise PlaitError, naming the first, where a weight is NaN or infinite."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise PlaitError(
                f"{name} in {folder / ADAPTER_WEIGHTS} holds NaN or infinity, so nothing can be computed with it; "
                "download it again, or take an earlier one"
            )


def _known_quantization(folder: Path, kept: str) -> Quantization:
    for known in get_args(Quantization):
        if kept == known:
            return known
    raise PlaitError(
        f"{folder / ADAPTER_WEIGHTS} was trained beside weights in {kept!r:.40}, which plait does not know; it knows "
        + " and ".join(QUANTIZED_BLOCK_BYTES)
    )
