"""Cost-model parameters that could explain a gap, the value each would need, and how to check it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from plait.machines.catalog import Link
from plait.machines.cluster import Island
from plait.planner.diagnosis.layout_price import layout_items_s, layout_step_s, waited_s
from plait.planner.search.cost_breakdown import BOTTLENECKS, TIME_NAMES
from plait.planner.step_time.cost_inputs import CostInputs
from plait.planner.step_time.device_rates import STREAM_SHARE, device_rates, peak_flops
from plait.units import compared_text, format_duration, plain_number


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """A figure of the forecast that may be off by a factor."""

    name: str
    usual: float
    """Factor by which such a figure is often off: our judgement, which only ranks the explanations."""
    altered: Callable[[CostInputs, float], CostInputs]
    """The cost inputs with which this figure costs this many times the time (below 1: less), as far as physics
    allows."""
    needs: Callable[[CostInputs, CostInputs], str]
    """How the figure would have to differ, in words, from the forecast's layout and the one that explains the
    measurement."""
    look: str
    """Advice on how to tell it apart from other explanations."""


def sensitivities(inputs: CostInputs) -> Iterator[Sensitivity]:
    """All figures that play a part for a layout."""
    yield ARITHMETIC_RATE
    yield MEMORY_RATE
    yield HOST_TIME
    if inputs.cluster.n_devices > 1:
        yield ONE_SLOW_DEVICE
        yield OVERLAP
        yield from (lever for lever in (LINK_BETWEEN, LINK_INSIDE) if _affects_messages(inputs, lever))
    yield TIME_OUTSIDE_STEPS


def _affects_messages(inputs: CostInputs, lever: Sensitivity) -> bool:
    return _affected_messages(inputs, lever.altered(inputs, 2.0)) != ""


def _affected_messages(inputs: CostInputs, other: CostInputs) -> str:
    """The messages that take longer, or less long, with the other cost inputs, in words."""
    here, there = layout_items_s(inputs), layout_items_s(other)
    names = [name for name in BOTTLENECKS["links"] if abs(there[name] - here[name]) > 1e-3 * layout_step_s(inputs)]
    if not names and abs(there["hidden"] - here["hidden"]) > 1e-3 * layout_step_s(inputs):
        return "messages that run under arithmetic"
    return ", ".join(TIME_NAMES[name] for name in names)


def _slowest(inputs: CostInputs) -> Island:
    w, profile = inputs.workload, inputs.profile
    return min(inputs.cluster.islands, key=lambda i: device_rates(i.device, w.precision, profile, i.speed).linear_flops)


def _reached(inputs: CostInputs) -> float:
    """Share of the peak that the largest products reach on the slowest device."""
    island, w = _slowest(inputs), inputs.workload
    rates = device_rates(island.device, w.precision, inputs.profile, island.speed)
    return rates.linear_flops / peak_flops(island.device, w.precision)


def _with_arithmetic(inputs: CostInputs, factor: float) -> CostInputs:
    factor = max(factor, _reached(inputs))
    profile = inputs.profile
    slower = replace(profile, product_share=profile.product_share / factor, flash_share=profile.flash_share / factor)
    return replace(inputs, profile=slower)


ARITHMETIC_RATE = Sensitivity(
    name="arithmetic",
    usual=1.25,
    altered=_with_arithmetic,
    needs=lambda here, there: (
        f"large products would have to reach {_reached(there):.0%} of the peak, not {_reached(here):.0%}"
    ),
    look="time one large product on a device (plait probe), and watch the clock, power and heat of a long run",
)


def _with_islands(inputs: CostInputs, change: Callable[[Island], Island]) -> CostInputs:
    return replace(inputs, cluster=replace(inputs.cluster, islands=tuple(map(change, inputs.cluster.islands))))


def _with_memory_rate(inputs: CostInputs, factor: float) -> CostInputs:
    factor = max(factor, STREAM_SHARE)

    def slower(island: Island) -> Island:
        device = replace(island.device, memory_bytes_per_s=island.device.memory_bytes_per_s / factor)
        return replace(island, device=device)

    return _with_islands(inputs, slower)


def _stream_rate(inputs: CostInputs) -> str:
    return f"{_slowest(inputs).device.memory_bytes_per_s * STREAM_SHARE / 1e9:,.0f} GB/s"


MEMORY_RATE = Sensitivity(
    name="passes over memory",
    usual=1.4,
    altered=_with_memory_rate,
    needs=lambda here, there: (
        f"norms, activations and the update would have to stream at {_stream_rate(there)}, not {_stream_rate(here)}"
    ),
    look="look in a profile of one step for many short kernels where fused ones were expected (compile off?)",
)


def _with_host(inputs: CostInputs, factor: float) -> CostInputs:
    profile = inputs.profile
    return replace(
        inputs, profile=replace(profile, launch_s=profile.launch_s * factor, micro_s=profile.micro_s * factor)
    )


HOST_TIME = Sensitivity(
    name="the host",
    usual=2.0,
    altered=_with_host,
    needs=lambda here, there: (
        f"a kernel would have to take it {plain_number(there.profile.launch_s * 1e6, 2)} µs to launch, not "
        f"{plain_number(here.profile.launch_s * 1e6, 2)}"
    ),
    look="look at the processor: one core a device at 100 % while the devices are not fully used",
)


def _with_slow_device(inputs: CostInputs, factor: float) -> CostInputs:
    factor = max(factor, 1.0)  # a faster one than the others changes nothing

    def slower(island: Island) -> Island:
        device = replace(island.device, memory_bytes_per_s=island.device.memory_bytes_per_s / factor)
        return replace(island, device=device, speed=island.speed / factor)

    return _with_islands(inputs, slower)


ONE_SLOW_DEVICE = Sensitivity(
    name="one slow device",
    usual=1.2,
    altered=_with_slow_device,
    needs=lambda here, there: (
        f"one would have to be {compared_text(_slowest(here).speed / _slowest(there).speed, 'slower', 'faster')} "
        "compared with the others: "
        "all wait for it"
    ),
    look="compare clocks and heat over the devices, or how long each waits before the sums: the slow one does not",
)


def _with_hiding(inputs: CostInputs, factor: float) -> CostInputs:
    profile = inputs.profile
    shares = {
        name: getattr(profile, name)
        for name in ("hides_tensor", "hides_context", "hides_pipeline", "hides_gradients", "hides_updates",
                     "hides_parameters", "hides_experts")
    }  # fmt: skip
    other = {name: share / factor if factor > 1 else 1 - (1 - share) * factor for name, share in shares.items()}
    return replace(inputs, profile=replace(profile, **other))


OVERLAP = Sensitivity(
    name="messages under arithmetic",
    usual=2.0,
    altered=_with_hiding,
    needs=lambda here, there: (
        f"devices would have to wait {format_duration(waited_s(there))} a step for messages, "
        f"not {format_duration(waited_s(here))}"
    ),
    look="look in a profile of one step whether messages lie under the products or between them",
)


def _link(link: Link, factor: float) -> Link:
    return replace(link, bytes_per_s=link.bytes_per_s / max(factor, link.reached))


def _with_between(inputs: CostInputs, factor: float) -> CostInputs:
    islands = tuple(replace(i, network=_link(i.network, factor) if i.network else None) for i in inputs.cluster.islands)
    return replace(
        inputs, cluster=replace(inputs.cluster, between=_link(inputs.cluster.between, factor), islands=islands)
    )


LINK_BETWEEN = Sensitivity(
    name="the link between nodes",
    usual=2.0,
    altered=_with_between,
    needs=lambda here, there: (
        f"it would have to carry {plain_number(there.network.between_bytes_per_s / 1e9, 2)} GB/s a device, not "
        f"{plain_number(here.network.between_bytes_per_s / 1e9, 2)} ({_affected_messages(here, there)})"
    ),
    look="measure it (plait probe), or train on one node alone: is that as fast as plait plan says for it?",
)
LINK_INSIDE = Sensitivity(
    name="the link inside a node",
    usual=1.6,
    altered=lambda inputs, factor: _with_islands(inputs, lambda i: replace(i, inside=_link(i.inside, factor))),
    needs=lambda here, there: (
        f"it would have to carry {plain_number(there.network.inside_bytes_per_s / 1e9, 2)} GB/s a device, not "
        f"{plain_number(here.network.inside_bytes_per_s / 1e9, 2)} ({_affected_messages(here, there)})"
    ),
    look="measure it (plait probe): devices that do not see each other send their messages through the processor",
)
TIME_OUTSIDE_STEPS = Sensitivity(
    name="reading data, saving, reports",
    usual=4.0,
    altered=lambda inputs, factor: replace(
        inputs, profile=replace(inputs.profile, step_s=inputs.profile.step_s * factor)
    ),
    needs=lambda here, there: (
        f"what each step costs beside the model would have to take {format_duration(there.profile.step_s)}, "
        f"not {format_duration(here.profile.step_s)}"
    ),
    look="look for idle devices between two steps; train on text that lies in memory, without saving",
)
