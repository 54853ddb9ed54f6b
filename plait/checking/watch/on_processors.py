"""Lets a program written for GPUs run on CPUs: replaces the backend, devices, and process launches.

Each replacement is recorded, so that the report can name it. Programs that look for a GPU find none.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn
from torch.overrides import TorchFunctionMode

from plait.checking.watch.journal import Journal


class ProcessorStandIns:
    """Replaces, in this watched process, calls that need a GPU or would write outside the check's folder."""

    def __init__(self, journal: Journal, rank: int, size: int, outputs: Path, working: Path | None = None) -> None:
        """`working` is a copy of the working folder, in which the program may write freely; None if it runs in the
        folder itself."""
        self._journal, self._rank, self._size, self._outputs = journal, rank, size, outputs
        self._working = working
        self._said: set[str] = set()

    def install(self) -> None:
        self._replace(dist, "init_process_group", self._init_by_gloo)
        self._replace(dist, "new_group", self._group_by_gloo)
        self._replace(nn.parallel.DistributedDataParallel, "__init__", self._ddp_without_devices)
        self._replace(nn.parallel.DistributedDataParallel, "register_comm_hook", self._see_comm_hook)
        self._replace(processes, "spawn", self._spawn_here)
        self._replace(processes, "start_processes", self._start_here)
        self._replace(torch, "save", self._save_elsewhere)
        if not torch.cuda.is_available():
            for name in (
                "set_device",
                "synchronize",
                "empty_cache",
                "manual_seed_all",
                "manual_seed",
                "reset_peak_memory_stats",
            ):
                self._replace(torch.cuda, name, self._nothing(name))
            for name in ("max_memory_allocated", "memory_allocated", "max_memory_reserved", "memory_reserved"):
                self._replace(torch.cuda, name, self._nothing(name, 0))
            self._replace(torch, "load", self._load_on_processors)
            _OnProcessors(self._say).__enter__()

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._journal.write("stand_in", what=what)

    def _replace(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        def replaced(*arguments: Any, **keywords: Any) -> Any:
            return around(original, *arguments, **keywords)

        replaced.__name__ = name
        setattr(owner, name, replaced)

    def _nothing(self, name: str, answer: Any = None) -> Callable[..., Any]:
        def call(original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
            if "seed" not in name:
                self._say(f"torch.cuda.{name} did nothing")
            return answer

        return call

    def _init_by_gloo(self, original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        asked = arguments[0] if arguments else keywords.get("backend")
        if asked is not None and str(asked).lower() != "gloo":
            self._say(f'the backend "{asked}" was replaced by "gloo"')
        for name in ("backend", "device_id"):
            keywords.pop(name, None)
        answer = original("gloo", *arguments[1:], **keywords)
        self._journal.write("group", rank=dist.get_rank(), size=dist.get_world_size())
        return answer

    def _group_by_gloo(self, original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        if keywords.get("backend") not in (None, "gloo"):
            keywords["backend"] = "gloo"
        return original(*arguments, **keywords)

    def _ddp_without_devices(
        self, original: Callable[..., Any], ddp: Any, module: nn.Module, *arguments: Any, **keywords: Any
    ) -> None:
        if keywords.get("device_ids") or keywords.get("output_device") is not None or (arguments and arguments[0]):
            self._say("DistributedDataParallel got no device_ids")
        keywords.pop("device_ids", None)
        keywords.pop("output_device", None)
        original(ddp, module, *(None for _ in arguments[:2]), *arguments[2:], **keywords)
        self._journal.write("ddp")

    def _see_comm_hook(self, original: Callable[..., Any], ddp: Any, state: Any, hook: Any) -> None:
        self._journal.write("comm_hook", name=getattr(hook, "__name__", "hook"))
        original(ddp, state, hook)

    def _spawn_here(
        self, original: Callable[..., Any], fn: Any, args: Any = (), nprocs: int = 1, *rest: Any, **more: Any
    ) -> None:
        self._start_here(original, fn, args, nprocs)

    def _start_here(
        self, original: Callable[..., Any], fn: Any, args: Any = (), nprocs: int = 1, *rest: Any, **more: Any
    ) -> None:
        """For a program that starts its own processes: each of ours plays one of them."""
        if nprocs not in (self._size, 0):
            self._journal.write("unusable", why="spawn", wanted=nprocs)
            sys.exit(3)
        self._say("torch.multiprocessing.spawn ran its function in the processes of this check")
        fn(self._rank, *args)

    def _save_elsewhere(
        self, original: Callable[..., Any], content: Any, file: Any, *arguments: Any, **keywords: Any
    ) -> None:
        if isinstance(file, str | os.PathLike) and self._is_ours(Path(file)):
            if Path(file).is_symlink():
                Path(file).unlink()  # not through a link to the person's own file
        elif isinstance(file, str | os.PathLike):
            self._journal.write("saved_elsewhere", file=str(file))
            self._say("torch.save wrote to a temporary folder")
            # The whole path is kept: many programs save step-1/model.pt and step-2/model.pt.
            file = self._outputs / f"saved-by-rank-{self._rank}" / Path(file).resolve().relative_to("/")
            file.parent.mkdir(parents=True, exist_ok=True)
        original(content, file, *arguments, **keywords)

    def _load_on_processors(self, original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Files from a GPU, and for one: a program that resumes says where its weights go."""
        named = {**dict(zip(("f", "map_location", "pickle_module"), arguments, strict=False)), **keywords}
        place = named.get("map_location")
        if place is None:
            named["map_location"] = lambda storage, tag: storage if _is_cuda(tag) else None
        elif isinstance(place, dict):
            named["map_location"] = {key: "cpu" if _is_cuda(one) else one for key, one in place.items()}
        elif isinstance(place, str | torch.device) and torch.device(place).type in ("cuda", "cpu"):
            if _is_cuda(place):
                self._say("tensors stayed on the processor")
            named["map_location"] = "cpu"  # "cpu:0", which Accelerate's launches have, is no place for torch.load
        return original(**named)

    def _is_ours(self, file: Path) -> bool:
        """Whether a file is in a folder that the check made for this run."""
        if self._working is None:
            return False
        place = file.parent.resolve() / file.name
        return any(place.is_relative_to(one.resolve()) for one in (self._working, self._outputs.parent.parent))

    def keep_linked_files(self) -> None:
        """Turn a link in the copied working folder (large files are links) into a file before the program writes to
        it."""
        working = self._working
        assert working is not None, "only a copy of the working folder has links"

        def see(event: str, arguments: tuple[Any, ...]) -> None:
            if event != "open" or not isinstance(arguments[0], str) or not isinstance(arguments[2], int):
                return
            path, flags = Path(arguments[0]), arguments[2]
            writes = flags & (os.O_WRONLY | os.O_RDWR)
            if writes and path.is_symlink() and path.absolute().is_relative_to(working):
                target = path.resolve()
                path.unlink()
                if not flags & os.O_TRUNC and target.is_file():
                    shutil.copyfile(target, path)

        sys.addaudithook(see)


class _OnProcessors(TorchFunctionMode):
    """Keeps tensors on the CPU that would go to a GPU."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            self._say("tensors stayed on the processor")
            return args[0]
        if any(_is_cuda(one) for one in (*args[1:], *kwargs.values())):
            self._say("tensors stayed on the processor")
            args = (*args[:1], *(torch.device("cpu") if _is_cuda(one) else one for one in args[1:]))
            kwargs = {key: torch.device("cpu") if _is_cuda(one) else one for key, one in kwargs.items()}
        return func(*args, **kwargs)


def _is_cuda(value: Any) -> bool:
    return (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))
    )
