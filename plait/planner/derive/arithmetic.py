"""The arithmetic on CPUs: the library for matrix products and the precision of a run, chosen by measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from plait.errors import PlaitError
from plait.machines.measured import Arithmetic, ProductRate, ProductRates
from plait.partition.execution import MatmulBackend, Precision

MAX_ERROR_RATIO = 4.0
"""oneDNN counts as exact as the default library up to this many times its error: both then round to float32."""
LEAST_BACKEND_GAIN = 1.05
"""Products must be this many times as fast by oneDNN; less is within what measuring them twice differs by."""
LEAST_STEP_GAIN = 1.25
"""A whole step must be this many times as fast in bf16 to give up float32's digits."""
BackendName = Literal["auto"] | MatmulBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionChoice:
    """The precision of a run on processors, and why."""

    precision: Precision
    reason: str
    step_gain: float | None = None
    """How many times as fast a step is in bf16, where that was timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorArithmetic:
    """How a run's processors multiply matrices: what was chosen, why, and what was measured of it."""

    backend: MatmulBackend
    host_backends: Mapping[str, MatmulBackend]
    """The library of hosts that take another one, by the digest of their machine."""
    precision: Precision
    machines: tuple[ProductRates, ...]
    """Measurements, one entry per kind of machine, the first host's first."""
    reasons: tuple[str, ...]
    step_gain: float | None = None
    """How many times as fast a step is in bf16, where that was timed."""

    @property
    def headline(self) -> str:
        """Arithmetic that is faster than torch's default, and by how much, in one line; empty if the default was
        kept."""
        if self.precision == "bf16":
            gain = self.step_gain
            return f"bf16 with float32 weights: a step is {gain:.1f} times as fast as in float32" if gain else ""
        if self.backend == "default":
            return ""
        first = self.machines[0]
        return f"matrix products by oneDNN: {speed_text(first.gain('onednn'))} {first.library}, as exact"

    @property
    def flops(self) -> float:
        """FLOP/s of the run's products on the first host's processor, in this arithmetic."""
        return self.machines[0].workers * self.machines[0].rates[self._measured].flops

    @property
    def error(self) -> float:
        """Largest relative error of the products against float64."""
        return self.machines[0].rates[self._measured].error

    @property
    def gain(self) -> float:
        """How many times as fast products are as float32 ones by the default library; of all machines the least."""
        if self.precision == "bf16":
            return min(one.gain("bf16") for one in self.machines)
        return min(one.gain(self._backend_of(one)) for one in self.machines)

    @property
    def bf16_gain(self) -> float:
        """How many times as fast products of bf16 are as float32 ones by the chosen library; of all machines the
        least."""
        return min(one.gain("bf16", over=self._backend_of(one)) for one in self.machines)

    def with_precision(self, choice: PrecisionChoice) -> ProcessorArithmetic:
        """These processors in another precision, with the reason for it."""
        reasons = (*self.reasons, choice.reason)
        return replace(self, precision=choice.precision, reasons=reasons, step_gain=choice.step_gain)

    def _backend_of(self, machine: ProductRates) -> MatmulBackend:
        return self.host_backends.get(machine.machine, self.backend)

    @property
    def _measured(self) -> Arithmetic:
        return "bf16" if self.precision == "bf16" else self.backend


def by_machine(ranks: Sequence[ProductRates]) -> tuple[ProductRates, ...]:
    """The mean speed and the largest error of the workers on each kind of machine, in the order of the ranks."""
    kinds: dict[str, list[ProductRates]] = {}
    for one in ranks:
        kinds.setdefault(one.machine, []).append(one)
    return tuple(replace(some[0], rates={name: _mean(some, name) for name in some[0].rates}) for some in kinds.values())


def _mean(workers: Sequence[ProductRates], name: Arithmetic) -> ProductRate:
    own = [worker.rates[name] for worker in workers]
    return ProductRate(
        flops=fmean(one.flops for one in own),
        error=max(one.error for one in own),
        error_ratio=max(one.error_ratio for one in own),
    )


def arithmetic_name(precision: str, backend: MatmulBackend) -> str:
    """The precision, with the library where it is not the default: steps in one say nothing about steps in another."""
    return f"{precision}-onednn" if backend == "onednn" and precision == "float32" else precision


def choose_backends(named: BackendName, precision: Precision, ranks: Sequence[ProductRates]) -> ProcessorArithmetic:
    """The library of each processor of a run; raises PlaitError for a library that was named and cannot be taken."""
    chosen = {one.machine: choose_backend(named, one) for one in by_machine(ranks)}
    backend, reason = chosen.pop(ranks[0].machine)
    unlike: dict[str, MatmulBackend] = {machine: other for machine, (other, _) in chosen.items() if other != backend}
    reasons = [reason, *(f"unlike hosts: {why}" for other, why in chosen.values() if other != backend)]
    return ProcessorArithmetic(
        backend=backend,
        host_backends=unlike,
        precision=precision,
        machines=by_machine(ranks),
        reasons=tuple(one for one in reasons if one),
    )


def choose_backend(named: BackendName, found: ProductRates) -> tuple[MatmulBackend, str]:
    """The library for a processor, with the reason (empty where it was named and costs nothing); raises PlaitError for
    a library that was named and is not there, or does not multiply in float32."""
    gain, library = found.gain("onednn"), found.library
    if named == "default":
        return "default", ""
    if not gain:
        return _refused(named, found, "this torch has no oneDNN for this processor")
    one, default = found.rates["onednn"], found.rates["default"]
    if one.error_ratio > MAX_ERROR_RATIO:
        why = f"oneDNN is less exact on this processor (error {one.error:.0e}, {library} {default.error:.0e})"
        return _refused(named, found, why)
    if named == "onednn":
        return "onednn", f"matrix products by oneDNN, as asked: {speed_text(gain)} {library} on this processor"
    if gain < LEAST_BACKEND_GAIN:
        return "default", f"matrix products by {library}: oneDNN is {speed_text(gain)} it on this processor"
    return "onednn", f"matrix products by oneDNN: {speed_text(gain)} {library} on this processor, as exact"


def _refused(named: BackendName, found: ProductRates, why: str) -> tuple[MatmulBackend, str]:
    if named == "onednn":
        raise PlaitError(f'train.matmul_backend is "onednn", and {why}; write "auto" or "default"')
    return "default", f"matrix products by {found.library}: {why}"


def bf16_price(gain: float) -> str:
    """What bf16 products cost on the processors of a run whose precision is settled; raises PlaitError where they have
    none."""
    if not gain:
        raise PlaitError('this processor has no bf16 arithmetic; write train.precision = "float32"')
    if gain < 1:
        return f"precision bf16, whose products take {1 / gain:.1f} times as long as float32's on this processor"
    return f"precision bf16, whose products are {speed_text(gain)} float32's on this processor"


def bf16_refusal(gain: float) -> str:
    """Why a step need not be timed in bf16, which gains less than its products do; empty where they gain enough."""
    if gain >= LEAST_STEP_GAIN:
        return ""
    if not gain:
        return "precision float32: this processor has no bf16 arithmetic"
    return f"precision float32: bf16 products are {speed_text(gain)} its own on this processor"


def choose_precision(step_gain: float, timed: str = "as timed here") -> PrecisionChoice:
    """The precision for a whole step that is this many times as fast in bf16, with the reason; `timed` says when that
    was found out."""
    if step_gain < LEAST_STEP_GAIN:
        reason = f"precision float32: a step in bf16 is {speed_text(step_gain)} one in float32, {timed}"
        return PrecisionChoice(precision="float32", reason=reason)
    reason = (
        f"precision bf16 with float32 weights: a step is {step_gain:.1f} times as fast as in float32, {timed}; "
        'train.precision = "float32" keeps float32'
    )
    return PrecisionChoice(precision="bf16", reason=reason, step_gain=step_gain)


def speed_text(gain: float) -> str:
    """A phrase such as "1.3 times as fast as"."""
    if gain >= 1.05:
        return f"{gain:.1f} times as fast as" if gain >= 1.15 else f"{100 * (gain - 1):.0f}% faster than"
    return "about as fast as" if gain > 0.95 else f"{1 / gain:.1f} times slower than"
