"""Programs with one fault each: what is changed in a sound program, and the kind and parameter that must be named.

The first twenty were written together with the diagnosis; the second twenty after its thresholds were frozen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import program_texts as texts

from plait.checking.findings import FindingKind


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultyCase:
    """A sound program, the lines that are changed, and what must be said."""

    name: str
    program: str
    changes: Sequence[tuple[str, str]]
    kind: FindingKind
    parameter: str = ""
    """The first parameter that must be named; "" where the fault has none."""
    is_note: bool = False
    needs: str = ""
    """A package beyond the development install's core."""

    @property
    def text(self) -> str:
        return changed(self.program, self.changes)


def changed(program: str, changes: Sequence[tuple[str, str]]) -> str:
    """A program with some lines replaced; each must be there."""
    for old, new in changes:
        assert old in program, old
        program = program.replace(old, new)
    return program


_ACCUM = (
    "        for x, y in loader:\n            logits = model(x)\n            loss = F.cross_entropy(logits, y)\n"
    "            optimizer.zero_grad()\n            loss.backward()\n"
)
_TWO_MICRO = (
    "        for x, y in loader:\n            optimizer.zero_grad()\n            for a, b in zip(x.chunk(2), y.chunk(2)):\n"
    "                loss = F.cross_entropy(model(a), b)\n                loss.backward()\n"
)
_SUMS = "    for p in model.parameters():\n        dist.all_reduce(p.grad)\n        p.grad /= world\n"

FIRST_FAULTS: Sequence[FaultyCase] = (
    FaultyCase(
        name="loss multiplied by world size under DDP", program=texts.CLASSIFIER,
        changes=[("F.cross_entropy(logits, y)", "F.cross_entropy(logits, y) * world_size")],
        kind="world_size", parameter="fc1.weight",
    ),
    FaultyCase(
        name="loss divided by world size and averaged again", program=texts.CLASSIFIER,
        changes=[("F.cross_entropy(logits, y)", "F.cross_entropy(logits, y) / world_size")],
        kind="world_size", parameter="fc1.weight",
    ),
    FaultyCase(
        name="accumulation without division", program=texts.CLASSIFIER, changes=[(_ACCUM, _TWO_MICRO)],
        kind="accumulation", parameter="fc1.weight",
    ),
    FaultyCase(
        name="mean of means over ranks and micro-batches", program=texts.LANGUAGE_MODEL,
        changes=[(', reduction="sum")', ")"), ("loss = loss * world / tokens", "loss = loss / args.accum")],
        kind="mean_of_means", parameter="embed.weight",
    ),
    FaultyCase(
        name="tokens counted per rank", program=texts.LANGUAGE_MODEL,
        changes=[("        dist.all_reduce(tokens)\n", ""), ("loss * world / tokens", "loss / tokens")],
        kind="mean_of_means", parameter="embed.weight",
    ),
    FaultyCase(
        name="sum missing for the last layer", program=texts.LOOP,
        changes=[(_SUMS, _SUMS.replace("model.parameters()", "model[0].parameters()"))],
        kind="missing_sum", parameter="2.weight",
    ),
    FaultyCase(
        name="no sums at all", program=texts.LOOP, changes=[(_SUMS, "")], kind="never_summed", parameter="0.weight",
    ),
    FaultyCase(
        name="sum not divided", program=texts.LOOP, changes=[("        p.grad /= world\n", "")],
        kind="world_size", parameter="0.weight",
    ),
    FaultyCase(
        name="first weights by rank", program=texts.LOOP,
        changes=[("torch.manual_seed(3)", "torch.manual_seed(3 + rank)"),
                 ("for p in model.parameters():\n    dist.broadcast(p.data, src=0)\n", "")],
        kind="weights_apart", parameter="0.weight",
    ),
    FaultyCase(
        name="no DistributedSampler", program=texts.CLASSIFIER,
        changes=[("DistributedSampler(dataset, shuffle=True)", "torch.utils.data.SequentialSampler(dataset)"),
                 ("        sampler.set_epoch(epoch)\n", "")],
        kind="same_batch",
    ),
    FaultyCase(
        name="shuffled by each rank without a sampler", program=texts.CLASSIFIER,
        changes=[("    sampler = DistributedSampler(dataset, shuffle=True)\n", "    torch.manual_seed(rank)\n"),
                 ("batch_size=8, sampler=sampler", "batch_size=8, shuffle=True"),
                 ("        sampler.set_epoch(epoch)\n", "")],
        kind="repeated_samples",
    ),
    FaultyCase(
        name="sampler for four replicas", program=texts.CLASSIFIER,
        changes=[("DistributedSampler(dataset, shuffle=True)",
                  "DistributedSampler(dataset, num_replicas=4, rank=rank, shuffle=True)")],
        kind="samples_left_out",
    ),
    FaultyCase(
        name="one seed for dropout", program=texts.CLASSIFIER,
        changes=[("return self.head(x)", "return self.head(F.dropout(x, 0.2, self.training))")],
        kind="dropout_alike",
    ),
    FaultyCase(
        name="BatchNorm under DDP", program=texts.CLASSIFIER,
        changes=[("self.norm = nn.LayerNorm(32)", "self.norm = nn.BatchNorm1d(32)")],
        kind="batch_norm", parameter="norm",
    ),
    FaultyCase(
        name="clipped before the sum", program=texts.LOOP,
        changes=[("    loss.backward()\n",
                  "    loss.backward()\n    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)\n")],
        kind="clipping_before_sum", parameter="0.weight",
    ),
    FaultyCase(
        name="clipped by each shard's norm", program=texts.FSDP,
        changes=[("        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n",
                  "        local = [p.grad.to_local() for p in model.parameters()]\n"
                  "        norm = torch.stack([g.norm() for g in local]).norm()\n"
                  "        for g in local:\n            g.mul_(torch.clamp(0.05 / norm, max=1.0))\n")],
        kind="partial_clipping", parameter="inp.weight",
    ),
    FaultyCase(
        name="schedule stepped once for each rank", program=texts.CLASSIFIER,
        changes=[("            scheduler.step()\n",
                  "            for _ in range(world_size):\n                scheduler.step()\n"),
                 ("T_max=12", "T_max=10")],
        kind="schedule",
    ),
    FaultyCase(
        name="evaluation doubles padded examples", program=texts.CLASSIFIER,
        changes=[("    dist.destroy_process_group()\n\n\nmain()",
                  "    held = TensorDataset(torch.randn(17, 16))\n"
                  "    right = torch.zeros(2)\n"
                  "    with torch.no_grad():\n"
                  "        for (x,) in DataLoader(held, batch_size=4, sampler=DistributedSampler(held, shuffle=False)):\n"
                  "            right += torch.tensor([float((model(x).argmax(1) == 0).sum()), len(x)])\n"
                  "    dist.all_reduce(right)\n"
                  "    dist.destroy_process_group()\n\n\nmain()")],
        kind="evaluation_data",
    ),
    FaultyCase(
        name="loss printed of rank 0", program=texts.CLASSIFIER,
        changes=[("            dist.all_reduce(total)\n", ""), ("total.item() / world_size", "total.item()")],
        kind="printed_loss", is_note=True,
    ),
    FaultyCase(
        name="gradients never emptied", program=texts.CLASSIFIER, changes=[("            optimizer.zero_grad()\n", "")],
        kind="stale_gradients", parameter="fc1.weight",
    ),
)  # fmt: skip
