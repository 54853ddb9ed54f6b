"""Two collectives that torch renamed in 2.13 and warns of under their old names; plait runs from 2.11 on."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

# The arguments' order is the same under both names.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""all_gather(whole, own, group=…, async_op=…): every rank's own tensor, one after the other."""
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""reduce_scatter(own, whole, group=…, async_op=…): this rank's part of the sum of everybody's whole."""
