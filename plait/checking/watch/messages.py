"""Records what ranks send each other and print: calls of torch.distributed, and numbers on the terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join

from plait.checking.watch.call_site import call_site, called_below
from plait.checking.watch.gradients import GradientWatch
from plait.checking.watch.journal import Journal

_CALLS = ("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor",
          "reduce_scatter", "all_to_all", "all_to_all_single", "gather", "scatter", "send", "recv", "barrier",
          "all_gather_object", "broadcast_object_list", "gather_object", "isend", "irecv")  # fmt: skip
_NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d{2,}(?:[eE][-+]?\d+)?(?![\w.])")
_LINES_AT_MOST = 2000
_FSDP = ("torch/distributed/fsdp", "torch/distributed/_composable", "torch/distributed/tensor", "torch/nn/parallel",
         "torch/distributed/optim", "torch/distributed/algorithms")  # fmt: skip


class MessageWatch:
    """Records calls of torch.distributed and the numbers that a rank prints."""

    def __init__(self, journal: Journal, gradients: GradientWatch) -> None:
        self._journal, self._gradients, self._lines = journal, gradients, 0

    def install(self) -> None:
        for name in _CALLS:
            self._watch_call(name)
        self._watch_join()
        sys.stdout = _WatchedText(sys.stdout, self._see_text)
        sys.stderr = _WatchedText(sys.stderr, self._see_text)

    def _watch_call(self, name: str) -> None:
        original = getattr(dist, name)

        def watched(*arguments: Any, **keywords: Any) -> Any:
            if called_below(*_FSDP):
                return original(*arguments, **keywords)
            tensor = next((one for one in (*arguments, *keywords.values()) if isinstance(one, Tensor)), None)
            self._journal.write(
                "message",
                call=name,
                site=call_site(),
                elements=tensor.numel() if tensor is not None else 0,
                gradient=tensor is not None and self._gradients.holds_gradient(tensor),
                number_kind=str(tensor.dtype).removeprefix("torch.") if tensor is not None else "",
                trained=any(one.requires_grad and one.numel() > 1 for one in arguments if isinstance(one, Tensor)),
                in_forward=self._gradients.depth > 0 and torch.is_grad_enabled(),
                in_backward=self._gradients.in_backward,
                norm=called_below("torch/nn/modules/_functions.py"),
            )
            return original(*arguments, **keywords)

        watched.__name__ = name
        watched.__wrapped__ = original  # pyright: ignore[reportFunctionMemberAccess]
        setattr(dist, name, watched)
        if getattr(dist.distributed_c10d, name, None) is original:
            setattr(dist.distributed_c10d, name, watched)

    def _watch_join(self) -> None:
        """Ranks inside Join that run out of data may take fewer steps than others."""
        original = Join.__enter__

        def entered(join: Join) -> Any:
            self._journal.write("join", site=call_site())
            return original(join)

        setattr(Join, "__enter__", entered)  # noqa: B010

    def _see_text(self, text: str) -> None:
        if self._lines < _LINES_AT_MOST and (found := _NUMBER.findall(text)):
            self._lines += 1
            self._journal.write("printed", numbers=found[:20], site=call_site())


class _WatchedText:
    """A text stream that also passes its text to a callback."""

    def __init__(self, stream: Any, see: Callable[[str], None]) -> None:
        self._stream, self._see = stream, see

    def write(self, text: str) -> int:
        self._see(text)
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
