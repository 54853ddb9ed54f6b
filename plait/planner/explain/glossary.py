"""The planner's words for someone new: two sentences for each idea."""

from __future__ import annotations

GLOSSARY: dict[str, str] = {
    "step": "One update of the model: it reads one batch of text, finds out how each number should change, and changes "
    "it. A training run is some thousands of steps.",
    "batch": "The sequences that one step learns from, over all devices together. They are divided among the groups of "
    "devices, and each group may take its part in several micro-batches, one after the other.",
    "replicate (DP, data parallel)": "Each group of devices has a full copy of the model and learns from other "
    "sequences. At the end of a step they add up what they found, so that all copies stay the same.",
    "shard (FSDP, ZeRO-1)": "Devices that would hold the same numbers split them: the optimizer state alone "
    "(ZeRO-1), or the "
    "parameters as well (FSDP), which are gathered when they are needed. It costs messages, and saves memory in "
    "proportion to the devices.",
    "tensor (TP)": "Several devices compute one matrix product together, each with a part of the matrix. They must add "
    "up their results twice in every layer, so it wants the fastest link there is.",
    "pipeline (PP)": "The layers are divided among groups of devices, and micro-batches pass from one group to the "
    "next. Little is sent, so that slow networks will do, but at the beginning and the end of a step some groups wait.",
    "context (CP)": "Each sequence is cut in parts, one on each device of the group. They exchange what attention "
    "needs to look back on, which pays for long sequences.",
    "expert (EP)": "In a mixture of experts each token passes only a few of many feedforward parts. The experts are "
    "divided among devices, and tokens travel to theirs and back.",
    "micro-batch": "The sequences that a device takes at a time. More of them at a time make products faster and need "
    "more memory.",
    "recompute": "The backward pass needs what the forward pass found on its way. Rather than keep it in memory, a "
    "device can compute it a second time, which takes up to a third longer.",
    "schedule": "The order in which a pipeline's groups work on forward and backward passes. 1f1b alternates them, "
    "interleaved gives each group several shorter stages, and zero-bubble puts some work off into the waiting time.",
    "bubble": "The time in which a pipeline's groups wait, because the first portions have not reached them or the "
    "last have left. More micro-batches make it a smaller part of the step.",
    "MFU (model FLOPs utilisation)": "The share of the devices' arithmetic peak that goes into the model's own "
    "products. Good runs reach 35 to 55 %; some tables count all of attention's scores, others only the half that is "
    "used.",
    "nats per byte": "How badly a model guesses text that it did not learn from: the mean of minus the natural "
    "logarithm of the probability that it gave to each byte. Less is better; 1.39 nats are 2 bits, and a guess "
    "among all 256 bytes alike has 5.55.",
    "exposed": "Messages travel while devices compute, and then cost nothing. What devices must wait for is called "
    "exposed, and only that lengthens the step.",
    "bandwidth": "How many bytes a link carries in a second, written in Gbit/s for networks (8 Gbit/s are 1 GB/s). "
    "Inside a node links are often ten times faster than between nodes.",
    "simplest": "Of all layouts that are about as fast, plait takes the one with the fewest moving parts. Every way of "
    "cutting the model has points for what it makes harder; differences below the model's error count as none.",
}


def glossary_text() -> str:
    """All terms, for printing."""
    return "\n\n".join(f"{term}\n    {meaning}" for term, meaning in GLOSSARY.items()) + "\n"
