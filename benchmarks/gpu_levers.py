"""Changes to a training step on one GPU that gpu_experiment.py measures before any of them enters plait.

Each lever is a context manager around the building and the running of a model: it replaces a part of plait for as long
as it is open. On a processor each does the same mathematics by plain operations, so that the whole way can be run
before there is a card.

Legend: n tokens, h heads, d numbers of a head, i numbers of a product's input, o of its result.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from plait.model import attention, gpt
from plait.model.attention import Documents
from plait.model.feedforward import FeedForward
from plait.model.linear import Linear
from plait.trainer import step
from plait.trainer.assemble import Assembly
from plait.trainer.optimizer import optim

ENDS = 64
"""To how many ends the list of documents is padded: cuDNN builds a plan for each number of them."""


@contextmanager
def replaced(owner: Any, **parts: Any) -> Iterator[None]:
    """Attributes of a module or class, replaced within the block."""
    before = {name: getattr(owner, name) for name in parts}
    for name, part in parts.items():
        setattr(owner, name, part)
    try:
        yield
    finally:
        for name, part in before.items():
            setattr(owner, name, part)


# Attention over documents by cuDNN.


@torch.library.custom_op("plait_levers::ragged_forward", mutates_args=())
def ragged_forward(q_nhd: Tensor, k_nhd: Tensor, v_nhd: Tensor, ends: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Causal attention inside documents, and the logarithm of each row's sum of exponentials, flattened."""
    if q_nhd.device.type != "cuda":
        return _by_document(q_nhd, k_nhd, v_nhd, ends), q_nhd.new_zeros(q_nhd.shape[0] * q_nhd.shape[1]).float()
    mixed_nhd, kept_nh1 = _cudnn().sdpa_fwd(
        q_nhd, k_nhd, v_nhd, q_nhd.shape[2] ** -0.5, is_causal=True, cu_seqlens_q=ends, cu_seqlens_kv=ends,
        max_seqlen_q=longest, max_seqlen_kv=longest, return_lse=True,
    )  # fmt: skip
    return mixed_nhd, kept_nh1.reshape(-1)


def _cudnn() -> Any:
    """The operations that NVIDIA's package nvidia-cudnn-frontend registers. torch's own way to cuDNN's kernel for
    ragged lengths takes 43 ms of the host at each call (torch 2.11)."""
    importlib.import_module("cudnn.torch")
    return torch.ops.cudnn


@ragged_forward.register_fake
def _(q_nhd: Tensor, k_nhd: Tensor, v_nhd: Tensor, ends: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q_nhd), q_nhd.new_empty(q_nhd.shape[0] * q_nhd.shape[1], dtype=torch.float32)


@torch.library.custom_op("plait_levers::ragged_backward", mutates_args=())
def ragged_backward(
    grad_nhd: Tensor,
    q_nhd: Tensor,
    k_nhd: Tensor,
    v_nhd: Tensor,
    mixed_nhd: Tensor,
    logsumexp: Tensor,
    ends: Tensor,
    longest: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the queries, keys and values."""
    if q_nhd.device.type != "cuda":
        return _by_document_backward(grad_nhd, q_nhd, k_nhd, v_nhd, ends)
    padded = importlib.import_module("cudnn.sdpa.fwd.torch_op").thd_lse_to_padded
    return _cudnn().sdpa_bwd(
        grad_nhd, q_nhd, k_nhd, v_nhd, mixed_nhd, padded(logsumexp.view(q_nhd.shape[:2]), ends, longest),
        q_nhd.shape[2] ** -0.5, is_causal=True, cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )  # fmt: skip


@ragged_backward.register_fake
def _(
    grad_nhd: Tensor,
    q_nhd: Tensor,
    k_nhd: Tensor,
    v_nhd: Tensor,
    mixed_nhd: Tensor,
    logsumexp: Tensor,
    ends: Tensor,
    longest: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q_nhd), torch.empty_like(k_nhd), torch.empty_like(v_nhd)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_nhd, k_nhd, v_nhd, ends, ctx.longest = inputs
    ctx.save_for_backward(q_nhd, k_nhd, v_nhd, *output, ends)


def _gradients(ctx: Any, grad_nhd: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q_nhd, k_nhd, v_nhd, mixed_nhd, logsumexp, ends = ctx.saved_tensors
    found = ragged_backward(grad_nhd.contiguous(), q_nhd, k_nhd, v_nhd, mixed_nhd, logsumexp, ends, ctx.longest)
    return (*found, None, None)


ragged_forward.register_autograd(_gradients, setup_context=_keep)


def _by_document(q_nhd: Tensor, k_nhd: Tensor, v_nhd: Tensor, ends: Tensor) -> Tensor:
    """The same by plain operations, one document after the other."""
    mixed_nhd = torch.empty_like(q_nhd)
    for part, q, k, v in _documents(q_nhd, k_nhd, v_nhd, ends):
        mixed_nhd[part] = (_shares(q, k) @ v).transpose(0, 1)
    return mixed_nhd


def _by_document_backward(
    grad_nhd: Tensor, q_nhd: Tensor, k_nhd: Tensor, v_nhd: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    found = tuple(torch.empty_like(one) for one in (q_nhd, k_nhd, v_nhd))
    scale = q_nhd.shape[2] ** -0.5
    for part, q, k, v in _documents(q_nhd, k_nhd, v_nhd, ends):
        shares, grad = _shares(q, k), grad_nhd[part].transpose(0, 1)
        of_shares = grad @ v.transpose(1, 2)
        of_scores = shares * (of_shares - (of_shares * shares).sum(2, keepdim=True))
        parts = (of_scores @ k * scale, of_scores.transpose(1, 2) @ q * scale, shares.transpose(1, 2) @ grad)
        for own, all_heads in zip(found, parts, strict=True):
            own[part] = all_heads.unflatten(0, (own.shape[1], -1)).sum(1).transpose(0, 1)
    return found[0], found[1], found[2]


def _documents(
    q_nhd: Tensor, k_nhd: Tensor, v_nhd: Tensor, ends: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Each document that is not empty: its tokens, and its queries, keys and values with all heads first."""
    sharing = q_nhd.shape[1] // k_nhd.shape[1]
    for begin, end in pairwise(ends.tolist()):
        if begin < end:
            q, k, v = (one[begin:end].transpose(0, 1) for one in (q_nhd, k_nhd, v_nhd))
            k, v = (one.repeat_interleave(sharing, dim=0) for one in (k, v))
            yield slice(begin, end), q, k, v


def _shares(q_hnd: Tensor, k_hnd: Tensor) -> Tensor:
    """How much of each earlier token a token takes."""
    scores = q_hnd @ k_hnd.transpose(1, 2) * q_hnd.shape[2] ** -0.5
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(2)


def attend_by_cudnn(
    q_bthd: Tensor, k_bthd: Tensor, v_bthd: Tensor, documents: Documents | None, window: int = 0
) -> Tensor:
    """In place of attention._attend_packed."""
    assert documents is not None and documents.ends is not None and not window
    q, k, v = (x.flatten(0, 1).contiguous() for x in (q_bthd, k_bthd, v_bthd))
    mixed, _ = ragged_forward(q, k, v, documents.ends, documents.longest)
    return mixed.view(q_bthd.shape)


def padded_on(documents: Documents, device: torch.device, *, longest: int, positions_bt: Tensor) -> Documents:
    """In place of Documents.on: the same number of documents in every batch, those at the end empty. It grows where
    that is not enough."""
    count = -(-len(documents.lengths) // ENDS) * ENDS
    ends = attention.cumulative_lengths((*documents.lengths, *[0] * (count - len(documents.lengths))))
    if device.type == "cuda":
        ends = ends.pin_memory().to(device, non_blocking=True)
    return Documents(documents.lengths, ends, longest, positions_bt)


@contextmanager
def cudnn_documents() -> Iterator[None]:
    """Attention inside documents by cuDNN's kernel for ragged lengths."""
    with replaced(Documents, on=padded_on), replaced(attention, _attend_packed=attend_by_cudnn):
        yield


# The path of the parameters: weights of products in bfloat16 as leaves, and one kernel for AdamW that reads their
# gradients as they are and writes the next step's weights.


class ProductWeights:
    """bfloat16 copies of the layers' matrices, which the layers compute with, beside the float32 ones that AdamW
    keeps. For steps of one micro-batch: gradients in bfloat16 must not be added up."""

    def __init__(self, assembly: Assembly) -> None:
        self.copies: dict[Tensor, nn.Parameter] = {}
        trained = {unit.parameter for unit in assembly.model.units}
        for chunk in assembly.model.chunks:
            for module in chunk.layers.modules():
                if isinstance(module, Linear) and module.weight in trained:
                    copy = nn.Parameter(module.weight.detach().to(torch.bfloat16))
                    self.copies[module.weight] = copy
                    module.weight = copy

    def gradients(self) -> list[Tensor]:
        """Of the matrices, in bfloat16."""
        return [cast(Tensor, copy.grad) for copy in self.copies.values()]

    def forget(self) -> None:
        """Begin a step without gradients."""
        for copy in self.copies.values():
            copy.grad = None

    def squares(self, units: Any, *, like: Tensor) -> Tensor:
        """In place of optim.owned_squares."""
        others = [unit.parameter.grad for unit in units if unit.parameter.grad is not None]
        norms = torch._foreach_norm(others)  # pyright: ignore[reportPrivateImportUsage]
        norms += torch._foreach_norm(self.gradients(), 2, torch.float32)  # pyright: ignore[reportPrivateImportUsage]
        return torch.stack(norms).to(like.dtype).square().sum().reshape(1)

    def update(self, optimizer: Any, units: Any, *, factor: Tensor, norm: Tensor) -> None:
        """In place of optim.update."""
        optim.update(optimizer, units, factor=factor, norm=norm)  # all that have a float32 gradient
        for group in optimizer.groups:
            for master in group.parameters:
                copy = self.copies.get(master)
                if copy is None:
                    continue
                state = optimizer.state[master]
                state["step"] += 1 - optimizer.found_inf
                adamw = adamw_kernel if master.is_cuda else adamw_plain
                adamw(
                    master, copy, cast(Tensor, copy.grad), state["exp_avg"], state["exp_avg_sq"], state["step"],
                    optimizer.grad_scale, optimizer.found_inf, lr=float(optimizer.lr), betas=optimizer.betas,
                    decay=group.weight_decay,
                )  # fmt: skip
        self.forget()


@contextmanager
def product_weights(assembly: Assembly) -> Iterator[None]:
    """Steps of an assembly whose layers compute with bfloat16 copies that AdamW writes."""
    held = ProductWeights(assembly)
    with replaced(step, owned_squares=held.squares, update=held.update):
        yield


def adamw_plain(
    weight: Tensor,
    copy: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    count: Tensor,
    scale: Tensor,
    skip: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    decay: float,
) -> None:
    """AdamW as torch's fused kernel computes it, by plain operations."""
    if bool(skip):
        return
    with torch.no_grad():
        grad = (gradient.double() / scale.double()).float()
        weight.sub_((lr * decay * weight.double()).float())
        mean.copy_(betas[0] * mean.double() + (1 - betas[0]) * grad.double())
        square.copy_(betas[1] * square.double() + (1 - betas[1]) * grad.double() * grad.double())
        corrections = [
            (1 - torch.pow(torch.tensor(beta, dtype=torch.float64), count.double())).float() for beta in betas
        ]
        size = (lr / corrections[0].double()).float()
        weight.sub_(size * mean / ((square.sqrt() / corrections[1].sqrt()).double() + 1e-8).float())
        copy.copy_(weight)


def adamw_kernel(
    weight: Tensor,
    copy: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    count: Tensor,
    scale: Tensor,
    skip: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    decay: float,
    math: Literal["float64", "float32"] = "float32",
) -> None:
    """The same in one pass, by Triton: reads 4 + 2 + 8 bytes a number and writes 4 + 2 + 8."""
    one_pass: Any = importlib.import_module("benchmarks.gpu_adamw")
    one_pass.adamw[(-(-weight.numel() // one_pass.BLOCK),)](
        weight, copy, gradient, mean, square, count, scale, skip, weight.numel(), lr, betas[0], betas[1], decay,
        BLOCK=one_pass.BLOCK, MATH=math,
    )  # fmt: skip


# The stream between layers in bfloat16: a change of the numbers, for what it would save.


@contextmanager
def bf16_stream() -> Iterator[None]:
    """The residual stream in bfloat16 from the embedding on."""
    plain = gpt.Embedding.forward

    def rounded(self: gpt.Embedding, tokens_bt: Tensor, positions_bt: Tensor) -> Tensor:
        return plain(self, tokens_bt, positions_bt).bfloat16()

    with replaced(gpt.Embedding, forward=rounded):
        yield


# Products of the feed-forward in 8 bits, a scale a row: a change of the numbers.

LARGEST_FP8 = 448.0


def _rounded_to_fp8(x_ri: Tensor) -> tuple[Tensor, Tensor]:
    """Each row in float8_e4m3fn, and what to multiply it by: [rows, 1]."""
    scale_r1 = (x_ri.abs().amax(dim=1, keepdim=True).float() / LARGEST_FP8).clamp(min=1e-12)
    return (x_ri.float() / scale_r1).to(torch.float8_e4m3fn), scale_r1


def _fp8_product(x_ri: Tensor, y_oi: Tensor) -> Tensor:
    """x @ y.T, rows of both rounded to 8 bits."""
    (x, of_x), (y, of_y) = _rounded_to_fp8(x_ri), _rounded_to_fp8(y_oi)
    if not x_ri.is_cuda:
        return ((x.float() * of_x) @ (y.float() * of_y).T).to(x_ri.dtype)
    return torch.ops.aten._scaled_mm(x, y.t(), of_x, of_y.t(), out_dtype=x_ri.dtype, use_fast_accum=True)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ni: Tensor, weight_oi: Tensor) -> Tensor:
        ctx.save_for_backward(x_ni, weight_oi)
        return _fp8_product(x_ni, weight_oi)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (grad_no,), (x_ni, weight_oi) = grads, ctx.saved_tensors
        return _fp8_product(grad_no, weight_oi.t().contiguous()), grad_no.t() @ x_ni


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """In place of F.linear: forward and the input's gradient in 8 bits, the weight's gradient in bfloat16."""
    assert bias is None
    return cast(Tensor, _Fp8Linear.apply(x.bfloat16(), weight.bfloat16()))


def fp8_feedforward(assembly: Assembly) -> None:
    """Give the feed-forward layers of a model products in 8 bits."""
    for chunk in assembly.model.chunks:
        for module in chunk.modules():
            if isinstance(module, FeedForward):
                for part in module.children():
                    if isinstance(part, Linear):
                        part.product = fp8_linear
