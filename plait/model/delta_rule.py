"""The gated delta rule, a chunk of tokens at a time (Yang et al. 2024, 2412.06464, section 3.3).

A head's state S [k, v] reads S ← e^g S, then S ← S + w · key ⊗ (value - S key), and gives S query; g is at most 0, the
decay's logarithm, and w in [0, 1] how much is written. Within a chunk the writes depend on each other by one triangular
system, and the state passes from chunk to chunk.

Note [documents end a state]: a token takes nothing of a state that another document wrote. Within a chunk pairs of
unlike documents count zero; what enters a chunk reaches the tokens of the document alone that wrote last before it, and
what leaves it is what the last token's document wrote.

Legend: b rows, t tokens of a row, h value heads, k width of a key, v of a value, n chunks, c tokens of a chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.model.parts.delta_attention import DELTA_CHUNK


def delta_rule(
    q_bthk: Tensor,
    k_bthk: Tensor,
    v_bthv: Tensor,
    log_decay_bth: Tensor,
    write_bth: Tensor,
    document_bt: Tensor,
    chunk: int = DELTA_CHUNK,
) -> tuple[Tensor, Tensor]:
    """What the queries read, [b, t, h, v], and the state behind the last token, [b, h, k, v].

    Queries and keys have length one. All is in one dtype, float32 at least. `document_bt` (or [1, t]) numbers the
    documents of each row.
    """
    rows, tokens = v_bthv.shape[:2]
    chunk = min(chunk, tokens)
    missing = -tokens % chunk
    heads_first = (x.transpose(1, 2) for x in (q_bthk, k_bthk, v_bthv))
    q, k, v = (F.pad(x, (0, 0, 0, missing)).unflatten(2, (-1, chunk)) for x in heads_first)
    decay, write = (
        F.pad(x.transpose(1, 2), (0, missing)).unflatten(2, (-1, chunk)) for x in (log_decay_bth, write_bth)
    )
    document_bt = torch.cat((document_bt, document_bt[:, -1:].expand(-1, missing)), dim=1)
    document = document_bt.unflatten(1, (-1, chunk)).unsqueeze(1)  # [b or 1, 1, n, c]
    last = document[..., -1:]
    before = F.pad(last, (0, 0, 1, 0), value=-1)[..., :-1, :]

    sums = decay.cumsum(-1)
    earlier = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    seen = (document.unsqueeze(-1) == document.unsqueeze(-2)) & earlier
    kept = (
        (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill(~seen, -torch.inf).exp()
    )  # Note [documents end a state]
    entering = sums.exp() * (document == before)
    leaving = (sums[..., -1:] - sums).exp() * (document == last)
    carried = sums[..., -1:].exp() * (last == before)

    q = q * q.shape[-1] ** -0.5
    written = k * write.unsqueeze(-1)
    system = (written @ k.mT) * kept
    values = torch.linalg.solve_triangular(system, v * write.unsqueeze(-1), upper=False, unitriangular=True)
    reads = torch.linalg.solve_triangular(system, written * entering.unsqueeze(-1), upper=False, unitriangular=True)
    scores, q, k = (q @ k.mT) * kept, q * entering.unsqueeze(-1), k * leaving.unsqueeze(-1)

    state = q.new_zeros(rows, q.shape[1], q.shape[-1], v.shape[-1])
    found: list[Tensor] = []
    pieces = (x.unbind(2) for x in (q, k, values, reads, scores, carried))
    for q_c, k_c, values_c, reads_c, scores_c, carried_c in zip(*pieces, strict=True):
        new = values_c - reads_c @ state
        found.append(q_c @ state + scores_c @ new)
        state = state * carried_c.unsqueeze(-1) + k_c.mT @ new
    return torch.cat(found, dim=2)[:, :, :tokens].transpose(1, 2), state


def delta_step(
    q_bhk: Tensor, k_bhk: Tensor, v_bhv: Tensor, log_decay_bh: Tensor, write_bh: Tensor, state_bhkv: Tensor
) -> tuple[Tensor, Tensor]:
    """The same for one token, from the state before it: what its queries read [b, h, v], and the state behind it."""
    state_bhkv = state_bhkv * log_decay_bh.exp()[..., None, None]
    known_bhv = torch.einsum("bhkv,bhk->bhv", state_bhkv, k_bhk)
    state_bhkv = state_bhkv + torch.einsum("bhk,bhv->bhkv", k_bhk, (v_bhv - known_bhv) * write_bh.unsqueeze(-1))
    return torch.einsum("bhkv,bhk->bhv", state_bhkv, q_bhk) * q_bhk.shape[-1] ** -0.5, state_bhkv


def convolve(x_btd: Tensor, taps_dn: Tensor, positions_bt: Tensor) -> Tensor:
    """Each number of a token times its last tap, plus those of the tokens before it in its document times the taps
    before. `positions_bt` (or [1, t]) are the tokens' places in their documents."""
    taps = taps_dn.shape[1]
    total = x_btd * taps_dn[:, -1]
    for back in range(1, min(taps, x_btd.shape[1])):
        there = (positions_bt >= back).unsqueeze(-1)
        shifted = F.pad(x_btd[:, :-back], (0, 0, back, 0))
        total = total + shifted * there * taps_dn[:, taps - 1 - back]
    return total


def of_length_one(x: Tensor) -> Tensor:
    """Vectors divided by their length, as fla does it: the root of the sum of squares and a millionth."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
