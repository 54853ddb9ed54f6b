"""How much memory a process holds: in live tensors, exactly, and as the operating system counts it."""

from __future__ import annotations

import resource
import sys
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plait.accelerator import is_accelerator, peak_memory_of, reset_peak_memory


class LiveTensorPeak:
    """Context around one step: `.bytes` is the peak size of this process's live tensors on `device`.

    On a CPU every operation is watched, backward included, which slows the step: measure one step, time others.
    `roots` are the tensors that exist already and matter: parameters, gradients, optimizer state, buckets. A storage
    counts once however many views it has; scratch memory inside a kernel is no tensor and is not counted. On a GPU it
    is the allocator's own peak, and `roots` is not needed.
    """

    def __init__(self, device: torch.device, roots: Iterable[torch.Tensor] = ()) -> None:
        self.bytes = 0
        self._device = device
        self._watch = None if is_accelerator(device) else _Watch(device, roots)

    def __enter__(self) -> Self:
        if self._watch is None:
            reset_peak_memory(self._device)
        else:
            self._watch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watch is None:
            self.bytes = peak_memory_of(self._device)
        else:
            self._watch.__exit__(kind, error, trace)
            self.bytes = self._watch.peak_bytes


def peak_rss_bytes() -> int:
    """Peak resident memory of this process since it began, shared libraries included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class _Watch(TorchDispatchMode):
    """Sees every operation after autograd took it apart, and so every tensor that is made, also in backward."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would import its compiler, which takes more than a second, to keep it from this class."""
        return False

    def __init__(self, device: torch.device, roots: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._device = device
        self._live_bytes = 0
        self._seen: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        for root in roots:
            self._see(root)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # The arguments too: they were alive during the operation, and an operation may grow one in place.
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != self._device.type:
            return
        storage = tensor.untyped_storage()
        key, nbytes = id(storage), storage.nbytes()
        known = self._seen.get(key)
        if known is None:
            # torch keeps the Python object of a storage as long as the storage lives, so its id and weak reference do.
            self._seen[key] = weakref.ref(storage, lambda _, key=key: self._forget(key)), nbytes
            self._live_bytes += nbytes
        elif known[1] != nbytes:
            self._resized(key, nbytes)
        if self._live_bytes > self.peak_bytes:
            self._look_again()
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)

    def _look_again(self) -> None:
        """Sharded parameters are freed without an operation: their storages stay and shrink to nothing."""
        for key, (reference, nbytes) in list(self._seen.items()):
            storage = reference()
            if storage is not None and storage.nbytes() != nbytes:
                self._resized(key, storage.nbytes())

    def _resized(self, key: int, nbytes: int) -> None:
        reference, before = self._seen[key]
        self._seen[key] = reference, nbytes
        self._live_bytes += nbytes - before

    def _forget(self, key: int) -> None:
        self._live_bytes -= self._seen.pop(key)[1]
