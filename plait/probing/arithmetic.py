"""What a device computes in a probe: a layer as the model runs it, the layer's parts one by one, the head, the update.

Legend: n tokens, d width, v vocabulary; b rows, t tokens of a row, h heads. A head's elements are d, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.devices import DevicePlace, traits_of
from plait.machines.measured import WorkKind, WorkTiming
from plait.model.attention import Documents, Rows, attend
from plait.model.gpt import GPT, Embedding, Layer, make_rotaries, query_growth, row_positions
from plait.model.linear import HALF_DTYPES
from plait.model.shape import ModelPart, whole_model
from plait.model.weights import kernel_width
from plait.parallel.compile import compile_layer
from plait.parallel.gradient_norm import clip_factor
from plait.parallel.sharded_model import unsharded
from plait.planner.plan import OptimizerPlan
from plait.probing.request import ProbedModel, ProbeRequest, layer_products
from plait.probing.timing import TimingSummary, summarize_readings
from plait.trainer.assemble import make_autocast
from plait.trainer.loss import sum_of_losses
from plait.trainer.optimizer.optim import make_optimizer, owned_squares, update

MAX_HEAD_FLOPS: Mapping[DevicePlace, float] = {"host": 1.6e10, "accelerator": 4e13}
HEAD_TOKENS = 256
"""A head is measured with a multiple of this many tokens, up to MAX_HEAD_FLOPS; each further token costs the same."""
KEPT_LAYER_OUTPUTS: Mapping[DevicePlace, int] = {"host": 4, "accelerator": 1}
MORE_LAYERS = 3
"""Upper bound of what a backward pass holds temporarily besides KEPT_LAYER_OUTPUTS, in layers' memory."""
MAX_TOUCHED_BYTES = 2**30
"""Most memory that is touched in advance. The arithmetic of layers that take more lasts so long that pages hardly
show."""
LEAST_REMAINDER_SHARE = 0.02
LAYERS_UPDATED = 2
PROBED_OPTIMIZER = OptimizerPlan(
    lr=1e-4, warmup_steps=0, weight_decay=0.1, betas=(0.9, 0.95), clip=1.0, schedule="constant"
)
ATTENTION_TOKENS: Mapping[DevicePlace, int] = {"host": 2048, "accelerator": 16384}
"""Number of tokens in the attention that is timed besides that of the probed models."""
COPY_BYTES = (2**18, 2**26)
"""A size that fits into a core's own cache, and one that does not."""

TOUCHED_BYTES = 2**24
"""Size of a block of touched memory; the allocator might borrow a larger one from the system each time."""

ProbedPiece = Literal["layer", "layer_backward"]
PieceKey = tuple[WorkKind | ProbedPiece, tuple[int, ...]]
PieceRuns = dict[PieceKey, Callable[[], object]]


def arithmetic_runs(request: ProbeRequest, device: torch.device) -> PieceRuns:
    """All work that the request names, as functions that are ready to be timed."""
    dtype = HALF_DTYPES.get(request.precision, torch.float32)
    runs: PieceRuns = {}
    if request.compile == "blocks":
        _let_backward_be_repeated()
    for model in request.models:
        runs |= _layer_runs(model, request, device, dtype)
        runs |= _head_runs(model, request, device)
    for sizes in request.products:
        runs |= product_runs(sizes, device, dtype)
    for length, heads, head_width in request.attentions:
        sequences = max(1, ATTENTION_TOKENS[traits_of(device.type).place] // length)
        runs |= attention_runs((sequences, length, heads, heads, head_width), device, dtype)
    runs |= memory_runs(device, dtype) | _update_runs(request, device)
    if device.type == "cpu":
        wanted = (KEPT_LAYER_OUTPUTS["host"] + MORE_LAYERS) * sum(map(_layer_bytes, request.models))
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
    """A layer's time, forward and backward, without the pieces that are timed separately."""
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


def _layer_runs(model: ProbedModel, request: ProbeRequest, device: torch.device, dtype: torch.dtype) -> PieceRuns:
    autocast = make_autocast(request.precision, device)
    shape, sizes = model.shape, _layer_sizes(model)
    layer = _small_weights(Layer(shape, 0).to(device))
    if request.compile == "blocks":
        compile_layer(layer)
    rotary, window_rotary = make_rotaries(shape, model.sequence)
    positions = row_positions(torch.empty(model.sequences, model.sequence, device=device))
    rows = Rows(
        rows=model.sequences,
        tokens=model.sequence,
        rotation=None if rotary is None else rotary(positions, torch.float32),
        window_rotation=None if window_rotary is None else window_rotary(positions, torch.float32),
        query_growth=query_growth(shape, positions, torch.float32),
        documents=Documents(lengths=(model.sequence,) * model.sequences).on(
            device, longest=model.sequence, positions_bt=positions
        ),
        cache=None,
    )
    x_nd = random_tensor((model.tokens, shape.width), device, torch.float32).requires_grad_()

    # As in a model of several layers: what the backward pass needs was written a while ago, and into other memory.
    kept: deque[Tensor] = deque(maxlen=KEPT_LAYER_OUTPUTS[traits_of(device.type).place])

    def forward() -> None:
        with autocast():
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


def _head_runs(model: ProbedModel, request: ProbeRequest, device: torch.device) -> PieceRuns:
    """The head with its loss, and the embedding; each runs forward and backward."""
    shape, autocast = model.shape, make_autocast(request.precision, device)
    pieces = MAX_HEAD_FLOPS[traits_of(device.type).place] / (6 * shape.width * shape.vocabulary * HEAD_TOKENS)
    tokens = min(model.tokens, max(1, int(pieces)) * HEAD_TOKENS)
    hidden_nd = random_tensor((tokens, shape.width), device, torch.float32).requires_grad_()
    head_vd = random_tensor((shape.vocabulary, shape.width), device, torch.float32, scale=0.02).requires_grad_()
    targets_n = torch.randint(0, shape.vocabulary, (tokens,), device=device)
    embed = _small_weights(Embedding(shape, whole_model(shape)).to(device))
    many_n = torch.randint(0, shape.vocabulary, (1, model.tokens), device=device)
    grad_nd = torch.ones(model.tokens, shape.width, device=device)
    places = torch.arange(model.tokens, device=device).remainder(shape.sequence)[None]

    def head() -> None:
        with autocast():
            loss = sum_of_losses(hidden_nd, head_vd, targets_n)
        torch.autograd.grad(loss, [hidden_nd, head_vd])

    def embedding() -> None:
        torch.autograd.grad(embed(many_n, places), list(embed.parameters()), grad_nd)

    return {
        ("head", (tokens, shape.width, shape.vocabulary)): head,
        ("embedding", (model.tokens, shape.width, shape.vocabulary)): embedding,
    }


def _update_runs(request: ProbeRequest, device: torch.device) -> PieceRuns:
    # One model per width: the time of an update depends only on its numbers of elements and of tensors.
    models = {model.shape.width: model for model in request.models}
    runs: PieceRuns = {}
    for model in models.values():
        run, numbers, tensors = _optimizer_update(model, device)
        runs["update", (numbers, tensors)] = run
    return runs


def _optimizer_update(probed_model: ProbedModel, device: torch.device) -> tuple[Callable[[], object], int, int]:
    """One optimizer step of some layers of the probed model on ready gradients, with the gradient norm."""
    part = ModelPart(embeds=False, layers=tuple(range(min(LAYERS_UPDATED, probed_model.shape.layers))), ends=False)
    units = unsharded(GPT(probed_model.shape, part).to(device)).units
    optimizer = make_optimizer(units, PROBED_OPTIMIZER)
    for unit in units:
        unit.parameter.grad = torch.full_like(unit.parameter, 1e-3)

    def run() -> None:
        norm = owned_squares(units, like=torch.zeros(1, dtype=torch.float64, device=device)).sum().sqrt()
        update(optimizer, units, factor=clip_factor(norm, PROBED_OPTIMIZER.clip), norm=norm)

    return run, sum(unit.parameter.numel() for unit in units), len(units)


def _small_weights(module: nn.Module) -> nn.Module:
    """Give a module weights of the size that models begin with: speed may depend on values that overflow or vanish."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.data = random_tensor(tuple(parameter.shape), parameter.device, parameter.dtype, scale=0.02)
    return module


def device_failure(device: torch.device) -> str | None:
    """Why a device cannot compute: it fails, or its sums are wrong; None if it can."""
    try:
        ones = torch.ones(256, 256, device=device)
        total = (ones @ ones).sum().item()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None if total == 256**3 else f"a product that must add up to {256**3} adds up to {total:g}"


def product_keys(product: tuple[int, int, int]) -> tuple[PieceKey, PieceKey, PieceKey]:
    """Keys of a linear layer's product and of the gradients of its input and of its weight."""
    rows, inner, columns = product
    return (
        ("product", (rows, inner, columns)),
        ("product_input", (rows, columns, inner)),
        ("product_weight", (columns, rows, inner)),
    )


def product_runs(sizes: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> PieceRuns:
    """A linear layer's product and its two gradients, called as autograd calls them."""
    rows, inner, columns = sizes
    x, weight, grad = (random_tensor(two, device, dtype) for two in ((rows, inner), (columns, inner), (rows, columns)))
    forward, to_input, to_weight = product_keys(sizes)
    return {
        forward: lambda: F.linear(x, weight),
        to_input: lambda: grad.mm(weight),
        to_weight: lambda: grad.t().mm(x),
    }


def attention_runs(sizes: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> PieceRuns:
    """The model's attention over sequences of equal length, forward and backward."""
    sequences, length, heads, kv_heads, head_width = sizes
    q_bthd, k_bthd, v_bthd = (
        random_tensor((sequences, length, some, head_width), device, dtype).requires_grad_()
        for some in (heads, kv_heads, kv_heads)
    )
    documents = Documents(lengths=(length,) * sequences).on(
        device, longest=length, positions_bt=torch.arange(length, device=device).expand(sequences, -1)
    )

    def forward() -> Tensor:
        return attend(q_bthd, k_bthd, v_bthd, documents)

    return {
        ("attention", sizes): forward,
        ("attention_backward", sizes): _backward(forward(), [q_bthd, k_bthd, v_bthd]),
    }


def memory_runs(device: torch.device, dtype: torch.dtype) -> PieceRuns:
    """Copies, the accumulation of gradients, and the smallest kernel there is."""
    runs: PieceRuns = {}
    for size in COPY_BYTES:
        source, target = (torch.zeros(size // 4, device=device) for _ in range(2))
        runs["copy", (size,)] = lambda target=target, source=source: target.copy_(source)
    total, more = (torch.zeros(2**22, device=device) for _ in range(2))
    one = torch.zeros(1, device=device, dtype=dtype)
    runs["accumulate", (total.numel(),)] = lambda: total.add_(more)
    runs["launch", ()] = lambda: one.add_(1)
    return runs


def touch_memory(size: int) -> None:
    """Make the process own `size` bytes of freed memory, which launch/local/heap.py keeps.

    Pages that the system must still provide would double the time of a large micro-batch, while training's steps reuse
    those of the step before.
    """
    blocks = [torch.zeros(TOUCHED_BYTES // 4).add_(1) for _ in range(-(-size // TOUCHED_BYTES))]
    del blocks


def _backward(result: Tensor, wanted: list[Tensor]) -> Callable[[], object]:
    """A backward pass that can be repeated."""
    grad = random_tensor(tuple(result.shape), result.device, result.dtype)
    return lambda: torch.autograd.grad(result, wanted, grad, retain_graph=True)


def random_tensor(sizes: tuple[int, ...], device: torch.device, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """A tensor of random numbers that repeat in blocks: drawing all of them would take longer than what is measured."""
    block = torch.randn(min(2**16, prod(sizes)), device=device, dtype=dtype) * scale
    return block.repeat(-(-prod(sizes) // len(block)))[: prod(sizes)].view(sizes)
