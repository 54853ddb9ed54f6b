"""Machines with GPUs that exist in a description only: the second implementations of GpuLibrary and Host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from plait.devices import DeviceName
from plait.machines.gpus import Gpu, TorchBuild

CUDA_13 = TorchBuild(version="2.13.0", cuda="13.0", kernels=("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"))
ON_PROCESSORS = TorchBuild(version="2.13.0+cpu", cuda=None)


@dataclass(frozen=True, kw_only=True)
class DescribedGpus:
    """A torch that sees these GPUs, of which so many bytes are free."""

    gpus: tuple[Gpu, ...] = ()
    free: Mapping[int, int | None] = field(default_factory=dict)
    """Free bytes by number; all of a GPU that is not named."""
    sums: Mapping[int, float | str] = field(default_factory=dict)
    """What ones come to by number, or the error's text; all the others add well."""
    built: TorchBuild = CUDA_13
    kind: DeviceName = "cuda"

    def name(self) -> DeviceName | None:
        return self.kind if self.gpus else None

    def build(self) -> TorchBuild:
        return self.built

    def count(self) -> int:
        return len(self.gpus)

    def gpu(self, number: int) -> Gpu:
        return self.gpus[number]

    def sum_of_ones(self, number: int, count: int) -> float:
        answer = self.sums.get(number, float(count))
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def free_bytes(self, number: int) -> int | None:
        return self.free.get(number, self.gpus[number].memory_bytes)


def described_gpus(*kinds: tuple[str, int], capability: tuple[int, int] = (9, 0)) -> DescribedGpus:
    """A torch that sees GPUs of these names and GiB of memory."""
    return DescribedGpus(
        gpus=tuple(Gpu(name=name, memory_bytes=memory * 2**30, capability=capability) for name, memory in kinds)
    )


@dataclass(frozen=True, kw_only=True)
class DescribedHost:
    """A host that has these files, programs and variables, and no others."""

    files: Mapping[str, str] = field(default_factory=dict)
    answers: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    def text(self, path: str) -> str | None:
        return self.files.get(path)

    def names_in(self, folder: str) -> Sequence[str]:
        inside = (path.removeprefix(f"{folder}/") for path in self.files if path.startswith(f"{folder}/"))
        return list(dict.fromkeys(path.partition("/")[0] for path in inside))

    def answer(self, command: Sequence[str]) -> str | None:
        return self.answers.get(" ".join(command))

    def variable(self, name: str) -> str | None:
        return self.variables.get(name)
