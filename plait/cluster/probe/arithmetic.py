"""What a device computes in a probe: a layer as the model runs it, the layer's parts one by one, the head, the update.

Legend: n tokens, d width, v vocabulary; b rows, t tokens of a row, h heads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plait.cluster.measured import WorkKind, WorkTiming
from plait.cluster.probe.pieces import (
    ATTENTION_TOKENS,
    PieceKey,
    PieceRuns,
    attention_runs,
    memory_runs,
    product_keys,
    product_runs,
    random_tensor,
    touch_memory,
)
from plait.cluster.probe.request import ProbedModel, ProbeRequest, layer_products
from plait.cluster.probe.timing import TimingSummary, summarize_readings
from plait.model.attention import Documents, Rows
from plait.model.gpt import Embedding, Layer, row_positions
from plait.model.rotary import Rotary
from plait.model.shape import whole_model
from plait.model.weights import kernel_width, rotary_width

MAX_HEAD_FLOPS: Mapping[str, float] = {"cpu": 1.6e10, "cuda": 4e13}
HEAD_TOKENS = 256
"""A head is measured with a multiple of this many tokens, up to MAX_HEAD_FLOPS; each further token costs the same."""
KEPT_LAYER_OUTPUTS: Mapping[str, int] = {"cpu": 4, "cuda": 1}
MORE_LAYERS = 3
"""Upper bound of what a backward pass holds temporarily besides KEPT_LAYER_OUTPUTS, in layers' memory."""
MAX_TOUCHED_BYTES = 2**30
"""Most memory that is touched in advance. The arithmetic of layers that take more lasts so long that pages hardly
show."""
LEAST_REMAINDER_SHARE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOperations:
    """Functions of training that a probe times but that are in packages above this one."""

    autocast: Callable[[], AbstractContextManager[object]]
    loss: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Hidden states [n, d], head [v, d] and targets [n] to the summed loss."""
    make_update: Callable[[ProbedModel, torch.device], tuple[Callable[[], object], int, int]]
    """Makes a probed model's optimizer: a function that runs one update, and the numbers of elements and of tensors
    that it updates."""
    prepare_layer: Callable[[nn.Module], None]
    """Compiles a layer in place, where the run's are."""


def arithmetic_runs(request: ProbeRequest, device: torch.device, training: TrainingOperations) -> PieceRuns:
    """All work that the request names, as functions that are ready to be timed."""
    dtype = torch.bfloat16 if request.precision == "bf16" else torch.float32
    runs: PieceRuns = {}
    if request.compile == "blocks":
        _let_backward_be_repeated()
    for model in request.models:
        runs |= _layer_runs(model, device, dtype, training)
        runs |= _head_runs(model, device, training)
    for sizes in request.products:
        runs |= product_runs(sizes, device, dtype)
    for length, heads, head_width in request.attentions:
        sequences = max(1, ATTENTION_TOKENS[device.type] // length)
        runs |= attention_runs((sequences, length, heads, heads, head_width), device, dtype)
    runs |= memory_runs(device, dtype) | _update_runs(request, device, training)
    if device.type == "cpu":
        wanted = (KEPT_LAYER_OUTPUTS["cpu"] + MORE_LAYERS) * sum(map(_layer_bytes, request.models))
        touch_memory(min(wanted, MAX_TOUCHED_BYTES))
    return runs


def select_comparison_runs(runs: PieceRuns, model: ProbedModel) -> PieceRuns:
    """One piece of each kind of work, and all pieces of one probed model's layer: what is timed to compare workers
    side by side with one worker alone."""
    kept = {key for product in layer_products(model) for key in product_keys(product)}
    kept |= {(work, attention_sizes(model)) for work in ("attention", "attention_backward")}
    kept |= {(piece, _layer_sizes(model)) for piece in ("layer", "layer_backward")}
    once = dict.fromkeys(work for work, _ in runs if work not in {work for work, _ in kept})
    kept |= {next(key for key in runs if key[0] == work) for work in once}
    return {key: run for key, run in runs.items() if key in kept}


def timed_pieces(figures: Mapping[PieceKey, TimingSummary], models: Sequence[ProbedModel]) -> tuple[WorkTiming, ...]:
    """The times in the form in which they are stored: each probed model's layer time, less its products and
    attention, becomes "stream" and "stream_backward"."""
    plain = [_timed(key[0], key[1], one) for key, one in figures.items() if not key[0].startswith("layer")]
    return (*plain, *(one for model in models for one in _streams(model, figures)))


def attention_sizes(model: ProbedModel) -> tuple[int, ...]:
    """The sizes of a probed model's attention, in the order of WORK_SIZES."""
    shape = model.shape
    return model.sequences, model.sequence, shape.heads, shape.kv_heads, kernel_width(shape)


def _timed(work: str, sizes: tuple[int, ...], took: TimingSummary) -> WorkTiming:
    known: WorkKind = work  # type: ignore[assignment]  # pieces of a layer never come here
    return WorkTiming(work=known, sizes=sizes, seconds=took.seconds, spread=took.spread)


def _streams(model: ProbedModel, figures: Mapping[PieceKey, TimingSummary]) -> Iterable[WorkTiming]:
    """What a layer takes, forward and backward, besides the pieces that have times of their own."""
    attention, sizes = attention_sizes(model), _layer_sizes(model)
    keys = [product_keys(product) for product in layer_products(model)]
    there: list[PieceKey] = [forward for forward, _, _ in keys]
    back: list[PieceKey] = [key for _, *both in keys for key in both]
    there.append(("attention", attention))
    back.append(("attention_backward", attention))
    yield _timed("stream", sizes, _remainder(figures["layer", sizes], [figures[part] for part in there]))
    yield _timed(
        "stream_backward", sizes, _remainder(figures["layer_backward", sizes], [figures[part] for part in back])
    )


def _remainder(whole: TimingSummary, parts: Sequence[TimingSummary]) -> TimingSummary:
    """How much longer a whole takes than its parts: never nothing, since a layer has norms, whatever noise says.

    Differences are taken round by round, so that a disturbance of a whole round affects both sides.
    """
    rounds = zip(whole.rounds, *(part.rounds for part in parts), strict=True)
    rests = [max(all_of_it - sum(some), LEAST_REMAINDER_SHARE * all_of_it) for all_of_it, *some in rounds]
    return summarize_readings([(rest, 0.0) for rest in rests])


def _layer_sizes(model: ProbedModel) -> tuple[int, ...]:
    return model.tokens, model.shape.width, model.shape.ffn


def _layer_bytes(model: ProbedModel) -> int:
    """Approximate bytes that a layer keeps for its backward pass, in float32."""
    return 4 * model.tokens * (12 * model.shape.width + 4 * model.shape.ffn)


def _layer_runs(
    model: ProbedModel, device: torch.device, dtype: torch.dtype, training: TrainingOperations
) -> PieceRuns:
    shape, sizes = model.shape, _layer_sizes(model)
    layer = _small_weights(Layer(shape, 0).to(device))
    training.prepare_layer(layer)
    rotary = Rotary(sequence=model.sequence, head_width=rotary_width(shape), theta=shape.rope_theta, scaling=shape.rope)
    positions = row_positions(torch.empty(model.sequences, model.sequence, device=device))
    rows = Rows(
        rows=model.sequences,
        tokens=model.sequence,
        rotation=rotary(positions, torch.float32) if shape.positions == "rope" else None,
        documents=Documents(lengths=(model.sequence,) * model.sequences).on(device, longest=model.sequence),
        cache=None,
    )
    x_nd = random_tensor((model.tokens, shape.width), device, torch.float32).requires_grad_()

    # As in a model of several layers: what the backward pass needs was written a while ago, and into other memory.
    kept: deque[Tensor] = deque(maxlen=KEPT_LAYER_OUTPUTS[device.type])

    def forward() -> None:
        with training.autocast():
            kept.append(layer(x_nd, rows))

    def backward() -> None:
        torch.autograd.grad(kept[0], wanted, grad_nd, retain_graph=True)

    forward()
    wanted = [x_nd, *layer.parameters()]
    grad_nd = random_tensor(tuple(kept[0].shape), device, kept[0].dtype)
    return {
        ("layer", sizes): forward,
        ("layer_backward", sizes): backward,
        **attention_runs(attention_sizes(model), device, dtype),
    }


def _let_backward_be_repeated() -> None:
    """Compiled backward passes of this process, which a probe calls over and over, do not reuse the memory of what they
    need. torch looks at the setting when it compiles and again at each call."""
    import torch._functorch.config as functorch  # only where a layer is compiled does it matter

    functorch.donated_buffer = False


def _head_runs(model: ProbedModel, device: torch.device, training: TrainingOperations) -> PieceRuns:
    """The head with its loss, and the embedding; each runs forward and backward."""
    shape = model.shape
    pieces = MAX_HEAD_FLOPS[device.type] / (6 * shape.width * shape.vocabulary * HEAD_TOKENS)
    tokens = min(model.tokens, max(1, int(pieces)) * HEAD_TOKENS)
    hidden_nd = random_tensor((tokens, shape.width), device, torch.float32).requires_grad_()
    head_vd = random_tensor((shape.vocabulary, shape.width), device, torch.float32, scale=0.02).requires_grad_()
    targets_n = torch.randint(0, shape.vocabulary, (tokens,), device=device)
    embed = _small_weights(Embedding(shape, whole_model(shape)).to(device))
    many_n = torch.randint(0, shape.vocabulary, (1, model.tokens), device=device)
    grad_nd = torch.ones(model.tokens, shape.width, device=device)
    places = torch.arange(model.tokens, device=device).remainder(shape.sequence)[None]

    def head() -> None:
        with training.autocast():
            loss = training.loss(hidden_nd, head_vd, targets_n)
        torch.autograd.grad(loss, [hidden_nd, head_vd])

    def embedding() -> None:
        torch.autograd.grad(embed(many_n, places), list(embed.parameters()), grad_nd)

    return {
        ("head", (tokens, shape.width, shape.vocabulary)): head,
        ("embedding", (model.tokens, shape.width, shape.vocabulary)): embedding,
    }


def _update_runs(request: ProbeRequest, device: torch.device, training: TrainingOperations) -> PieceRuns:
    # One model per width: the time of an update depends only on its numbers of elements and of tensors.
    models = {model.shape.width: model for model in request.models}
    runs: PieceRuns = {}
    for model in models.values():
        run, numbers, tensors = training.make_update(model, device)
        runs["update", (numbers, tensors)] = run
    return runs


def _small_weights(module: nn.Module) -> nn.Module:
    """Give a module weights of the size that models begin with: speed may depend on values that overflow or vanish."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.data = random_tensor(tuple(parameter.shape), parameter.device, parameter.dtype, scale=0.02)
    return module
