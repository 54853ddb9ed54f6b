"""The English of a run's bottleneck: a sentence for what limits it, and one phrase for each change that would help."""

from __future__ import annotations

from plait.machines.cluster import Cluster
from plait.planner.explain.changes import LinkPlace, link_rate
from plait.planner.plan import Plan
from plait.planner.search.found import Search
from plait.report.bottleneck import BottleneckCause, Remedy
from plait.units import counted, format_bytes, format_duration, plain_number, times_text

_WORK_TEXTS: dict[BottleneckCause, str] = {
    "products": "Matrix products take",
    "attention": "Attention takes",
    "head": "The head and the loss take",
    "memory rate": "Passes over memory (norms, activations) take",
    "optimizer": "The optimizer's update and other work once per step take",
    "kernel launches": "Launching kernels takes",
    "recomputation": "Computing activations a second time takes",
    "network": "Waiting for other workers takes",
    "pipeline": "Waiting for other pipeline stages takes",
    "data": "Waiting for training data takes",
}


def work_sentence(cause: BottleneckCause, share: float, plan: Plan) -> str:
    """Names the largest part of a step, when no remedy is known."""
    if plan.world_size == 1 and cause == "network":
        return f"Waiting takes {share:.0%} of each step."
    return f"{_WORK_TEXTS[cause]} {share:.0%} of each step; no known change would gain 5%."


# Starting up and data.


def start_sentence(share: float, start_s: float) -> str:
    """Says that a run is short compared with its start."""
    return f"Starting takes {share:.0%} of the run's time: {format_duration(start_s)} before steps reach their speed."


def longer_run(plan: Plan, times: int, gain: float) -> Remedy:
    """A larger budget."""
    steps = plan.job.steps * times
    return Remedy(
        change=f'a longer run (train.budget = "{steps} steps", {times} times as many)',
        gain=gain,
        setting=f"train.budget={steps} steps",
    )


def data_sentence(share: float) -> str:
    """Says that workers wait for their samples."""
    return f"Waiting for training data takes {share:.0%} of each step."


def faster_reading(gain: float) -> Remedy:
    """A faster disk for the prepared text. The next step's samples are read while a step computes."""
    return Remedy(
        change=f"the prepared text (.plait/data) on a disk that is {times_text(gain)} as fast", gain=gain, factor=gain
    )


# Hosts.


def host_name(plan: Plan, home: int, rank: int) -> str:
    """A host by its name, or a GPU of the only one by its rank."""
    return f"host {plan.machines.hosts[home].name}" if len(plan.machines.hosts) > 1 else f"the GPU of rank {rank}"


def host_sentence(name: str, times: float, share: float) -> str:
    """Says that all others wait for one host."""
    return (
        f"{_capital(name)} takes {times_text(times)} as long as the others to compute, and they wait for it "
        f"{share:.0%} of each step."
    )


def as_fast_as_others(name: str) -> str:
    """The change that makes a slow host normal again."""
    return f"{name} as fast as the others (check it for other programs, heat and a power limit)"


def balanced(gain: float) -> Remedy:
    """Shares of the batch that follow the speeds."""
    return Remedy(
        change='shares of the batch that follow the speeds (balance.every = "10 steps")',
        gain=gain,
        setting="balance.every=10 steps",
    )


def left_out(name: str) -> str:
    """Removing a host."""
    return f"leaving {name} out"


# Messages.


def network_sentence(plan: Plan, share: float, *, link: LinkPlace) -> str:
    """Says that ranks wait for messages."""
    names = [host.name for host in plan.machines.hosts]
    if link == "inside" or not names:
        return f"Messages between workers take {share:.0%} of each step."
    way = f"The cable to host {names[1]} takes" if len(names) == 2 else "The network between the hosts takes"
    return f"{way} {share:.0%} of each step."


def faster_links(cluster: Cluster, times: float, gain: float) -> Remedy:
    """Links between hosts of a higher rate."""
    bits_per_s = link_rate(cluster, "between") * 1e9
    change = f"a network of {_rate(times * bits_per_s)} instead of {_rate(bits_per_s)}"
    return Remedy(change=change, gain=gain, factor=times)


def _rate(bits_per_s: float) -> str:
    unit, size = ("Gbit/s", 1e9) if bits_per_s >= 0.9995e9 else ("Mbit/s", 1e6)
    return f"{plain_number(bits_per_s / size, 2)} {unit}"


def smaller_gradients(gain: float) -> Remedy:
    """Gradients sent in bf16."""
    return Remedy(
        change='gradients sent in bf16, which rounds them (train.gradient_transfer = "bf16")',
        gain=gain,
        setting="train.gradient_transfer=bf16",
    )


def smaller_stages(gain: float) -> Remedy:
    """Activations sent in bf16."""
    return Remedy(
        change='messages between stages in bf16, which rounds them (train.stage_transfer = "bf16")',
        gain=gain,
        setting="train.stage_transfer=bf16",
    )


# The layout.


def recomputation_sentence(mode: str, share: float) -> str:
    """Says that the recipe asks for recomputation although memory suffices."""
    return f'Computing activations a second time (layout.recompute = "{mode}") takes {share:.0%} of each step.'


def without_recomputation(gain: float) -> Remedy:
    """Keeping activations."""
    return Remedy(
        change='keeping activations, which fit into memory (layout.recompute = "none")',
        gain=gain,
        setting="layout.recompute=none",
    )


def micro_text(sequences: int) -> str:
    """Micro-batches by their size."""
    return f"micro-batches of {counted(sequences, 'sequence')}"


def micro_sentence(sequences: int, share: float) -> str:
    """Says that micro-batches are too small."""
    return (
        f"{_capital(micro_text(sequences))} are too small for this device to reach its speed: {share:.0%} of each step."
    )


def other_micro_batch(sequences: int, gain: float) -> Remedy:
    """Micro-batches of another size."""
    return Remedy(
        change=f"{micro_text(sequences)} (layout.micro_sequences = {sequences})",
        gain=gain,
        setting=f"layout.micro_sequences={sequences}",
    )


def memory_sentence(because: str, share: float) -> str:
    """Says that memory is short; `because` is what that forces."""
    return f"Memory is short: it forces {because}, which takes {share:.0%} of each step."


def more_memory(found: Search, gain: float) -> Remedy:
    """Devices with enough memory."""
    needed = found.bytes_per_device(found.chosen) / found.memory_budget.share
    return Remedy(change=f"{format_bytes(needed)} of memory for each worker", gain=gain)


def pipeline_sentence(share: float) -> str:
    """Says that pipeline stages wait for each other."""
    return f"Waiting for other pipeline stages takes {share:.0%} of each step."


def other_schedule(name: str, gain: float) -> Remedy:
    """Another order of a pipeline's work."""
    return Remedy(change=f'another schedule (layout.schedule = "{name}")', gain=gain, setting=f"layout.schedule={name}")


def launch_sentence(share: float) -> str:
    """Says that layers are not compiled."""
    return f"Launching kernels one by one takes {share:.0%} of each step."


def compiled(gain: float) -> Remedy:
    """Compiled layers."""
    return Remedy(change='compiled layers (train.compile = "on")', gain=gain, setting="train.compile=on")


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
