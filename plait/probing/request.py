"""The request of a probe: which shapes to measure, those of typical models or of one recipe; no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from plait.checked_json import parse_json, typed_value
from plait.devices import DEVICE_TRAITS, DeviceName, DevicePlace
from plait.errors import PlaitError
from plait.machines.machine import Machine
from plait.model.shape import ModelShape, is_gated
from plait.model.sizes import named_shape
from plait.model.weights import attention_matrices, training_flops_per_token
from plait.partition.execution import Compile, MatmulBackend
from plait.planner.derive.resources import ProbeNeed

TYPICAL: Mapping[DevicePlace, tuple[tuple[str, int, int], ...]] = {
    # Size, tokens of a sequence, sequences at a time. On a processor core these take some 2 s a round.
    "host": (("1M", 256, 16), ("11M", 256, 4), ("11M", 256, 16), ("50M", 512, 2)),
    "accelerator": (("125M", 1024, 8), ("1B", 2048, 4), ("7B", 4096, 1), ("7B", 4096, 2)),
}
LAYER_FLOPS: Mapping[DevicePlace, float] = {"host": 6e10, "accelerator": 2e13}
"""Largest FLOPs of one layer's step (per thread on a processor); larger micro-batches are measured in part."""
MAX_CPU_MICROBATCH_TOKENS = 4096
"""Largest number of tokens in a measured micro-batch on a processor; larger ones gain nothing there."""
EXTRA_PRODUCTS: Mapping[DevicePlace, tuple[tuple[int, int, int], ...]] = {
    # Products beside those of the layers, so that other shapes lie between measured ones: few rows, small and large.
    "host": (
        (64, 128, 128), (4096, 128, 128), (256, 512, 512), (64, 320, 896), (256, 1024, 1024), (1024, 1024, 1024),
        (128, 640, 1728), (256, 320, 8192),
    ),
    "accelerator": (
        (256, 1024, 1024), (512, 4096, 4096), (4096, 1024, 1024), (4096, 1024, 4096), (8192, 4096, 4096),
        (2048, 8192, 8192), (8192, 2048, 2048), (1024, 4096, 14336),
    ),
}  # fmt: skip
PROBED_MESSAGE_BYTES = (2**10, 2**14, 2**17, 2**20, 2**22, 2**24, 2**26)
BRIEF_S = 0.5
"""ProbeRequest.seconds of a brief probe."""
EXTRA_ATTENTIONS: Mapping[DevicePlace, tuple[tuple[int, int, int], ...]] = {
    # Attention beside that of the layers: length of a sequence or document, heads, head width.
    "host": ((32, 4, 32), (128, 4, 64), (1024, 2, 64)),
    "accelerator": ((512, 16, 64), (2048, 16, 128), (8192, 8, 128)),
}


ProbedPrecision = Literal["float32", "bf16", "fp16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedModel:
    """A model, the tokens of its sequences, and the number of sequences that a worker takes at a time."""

    shape: ModelShape
    sequence: int
    sequences: int

    @property
    def tokens(self) -> int:
        return self.sequence * self.sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """Everything that the ranks of a probe measure; equal on all of them."""

    device: DeviceName
    precision: ProbedPrecision
    threads: int
    """Threads of each worker."""
    models: tuple[ProbedModel, ...]
    products: tuple[tuple[int, int, int], ...]
    """(rows, inner, columns) of forward passes; each is measured with its two gradients."""
    attentions: tuple[tuple[int, int, int], ...]
    """(length, heads, head width) of attention that is timed besides that of `models`."""
    messages: tuple[int, ...]
    """Message sizes in bytes, growing."""
    seconds: float
    """Approximate time for the arithmetic; each measurement of overlap takes another quarter of it."""
    matmul_backend: MatmulBackend = "default"
    """The library by which processors multiply float32 matrices."""
    host_backends: Mapping[str, MatmulBackend] = field(default_factory=dict[str, MatmulBackend])
    """The library of hosts that take another one, by the digest of their machine."""
    gpus: tuple[int, ...] = ()
    """torch's numbers of the GPUs to measure, where these are not all of them."""
    compile: Compile = "off"
    """Whether the layers that are timed are compiled, as the run's are."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> ProbeRequest:
        """The request that `to_json` wrote; raises PlaitError for anything else."""
        try:
            return typed_value(ProbeRequest, parse_json(text))
        except ValueError as error:
            raise PlaitError(
                f"what this probe should measure cannot be read ({error}); install the same commit on all hosts"
            ) from None


def typical_probe_request(device: DeviceName, threads: int, precision: ProbedPrecision | None = None) -> ProbeRequest:
    """The request for models of the usual sizes; in the device's usual precision where none is given."""
    models = [
        ProbedModel(shape=named_shape(size, vocabulary=8192, sequence=sequence), sequence=sequence, sequences=sequences)
        for size, sequence, sequences in TYPICAL[DEVICE_TRAITS[device].place]
    ]
    return _request(device, precision or ("float32" if device == "cpu" else "bf16"), threads, models)


def model_probe_request(
    shape: ModelShape,
    *,
    sequence: int,
    sequences: int,
    device: DeviceName,
    precision: ProbedPrecision,
    threads: int,
) -> ProbeRequest:
    """The request for one model with at most `sequences` sequences at a time, including the products that remain
    when its matrices are split over 2 and 4 workers. Of a model with adapters it is the one without, all of whose
    weights learn: the planner adds the adapters' own products, and leaves out those of weights that are frozen."""
    shape = replace(shape, adapter=None)
    largest = probed_sequences(shape, sequence, sequences, device=device, threads=threads)
    # A single sequence too: few tokens take longer each, and pipelines take few at a time.
    counts = sorted({1, max(1, largest // 4), largest})
    models = [ProbedModel(shape=shape, sequence=sequence, sequences=some) for some in counts]
    return _request(device, precision, threads, models)


def recipe_probe_request(
    need: ProbeNeed, machine: Machine, threads: int, *, sequences: int | Literal["auto"] = "auto"
) -> ProbeRequest:
    """The request for what the planner needs to know of a recipe's model, on machines of which `machine` is the first;
    "auto" sequences are those of a micro-batch that such a device would get."""
    sequence = need.shape.sequence
    if sequences == "auto":
        most = max(1, MAX_CPU_MICROBATCH_TOKENS // sequence) if machine.device == "cpu" else need.batch_sequences
        sequences = min(most, need.batch_sequences)
    requested = model_probe_request(
        need.shape,
        sequence=sequence,
        sequences=sequences,
        device=machine.device,
        precision="float32" if need.precision == "float64" else need.precision,
        threads=threads,
    )
    return replace(
        requested,
        matmul_backend=need.matmul_backend,
        host_backends=need.host_backends,
        gpus=machine.gpus,
        compile=need.compile,
    )


def brief_request(request: ProbeRequest) -> ProbeRequest:
    """A probe in a fraction of the time: fewer sizes of micro-batches and messages, the model's own products."""
    models = tuple(dict.fromkeys((request.models[0], request.models[-1])))
    return replace(
        request,
        models=models,
        products=tuple(dict.fromkeys(product for model in models for product in layer_products(model))),
        messages=tuple(request.messages[at] for at in (0, 3, 4)),  # with the one by which links are checked again
        seconds=BRIEF_S,
    )


def layer_products(model: ProbedModel) -> tuple[tuple[int, int, int], ...]:
    """(rows, inner, columns) of the products in one layer's forward pass, each as often as the layer has it."""
    shape, tokens = model.shape, model.tokens
    widen = [(tokens, shape.width, shape.ffn)] * (2 if is_gated(shape) else 1)
    return (
        *((tokens, inner, columns) for columns, inner in attention_matrices(shape)),
        *widen,
        (tokens, shape.ffn, shape.width),
    )


def _request(device: Any, precision: Any, threads: int, models: list[ProbedModel]) -> ProbeRequest:
    own = [product for model in models for product in layer_products(model)]
    cut = [product for model in models[-1:] for product in _cut_products(model)]
    return ProbeRequest(
        device=device,
        precision=precision,
        threads=threads,
        models=tuple(models),
        products=tuple(dict.fromkeys([*own, *cut, *EXTRA_PRODUCTS[DEVICE_TRAITS[device].place]])),
        attentions=EXTRA_ATTENTIONS[DEVICE_TRAITS[device].place],
        messages=PROBED_MESSAGE_BYTES,
        seconds=6.0 if device == "cpu" else 15.0,
    )


def _cut_products(model: ProbedModel) -> list[tuple[int, int, int]]:
    """The products of a layer whose matrices are split over 2 and 4 ranks."""
    shape, found = model.shape, []
    for parts in (2, 4) if shape.latent is None else ():
        if shape.heads % parts == 0 and shape.ffn % parts == 0:
            heads, ffn = shape.size_of("heads") // parts, shape.ffn // parts
            found += [(model.tokens, shape.width, heads), (model.tokens, heads, shape.width)]
            found += [(model.tokens, shape.width, ffn), (model.tokens, ffn, shape.width)]
    return found


def probed_sequences(shape: ModelShape, sequence: int, sequences: int, *, device: DeviceName, threads: int) -> int:
    """The given number of sequences, or as many as keep one layer's training step within LAYER_FLOPS; at least 1."""
    flops = LAYER_FLOPS[DEVICE_TRAITS[device].place] * (threads if device == "cpu" else 1)
    each = training_flops_per_token(shape, sequence, "causal") / shape.layers * sequence
    return max(1, min(sequences, int(flops / each)))
