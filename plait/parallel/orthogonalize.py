"""Newton-Schulz iterations, with which Muon (Jordan et al. 2024) makes the update of a matrix orthogonal, and the scale
of the update (Liu et al. 2025, arXiv 2502.16982)."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.partition.matrix_owners import NEWTON_SCHULZ_STEPS

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration, chosen for the steepest slope at 0; singular values end between about 0.7
and 1.2."""
EPSILON = 1e-7
"""The smallest norm by which a matrix is divided."""
RMS_OF_ADAMW = 0.2
"""Root mean square of AdamW's updates at a learning rate of 1, as Liu et al. measured it."""


def orthogonalize(x_bmn: Tensor) -> Tensor:
    """The matrices with their singular values brought close to 1 by Newton-Schulz iterations in their own dtype; m is
    at most n. Overwrites its input."""
    a, b, c = COEFFICIENTS
    norms_b11 = torch.linalg.vector_norm(x_bmn, dim=(1, 2), keepdim=True)
    x_bmn = x_bmn.div_(norms_b11.clamp(min=EPSILON))  # under one name, so that at most two of them are in memory
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram_bmm = x_bmn @ x_bmn.mT
        factor_bmm = torch.baddbmm(gram_bmm, gram_bmm, gram_bmm, beta=b, alpha=c)
        x_bmn = torch.baddbmm(x_bmn, factor_bmm, x_bmn, beta=a)
    return x_bmn
