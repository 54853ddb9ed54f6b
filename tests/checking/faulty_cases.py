"""Programs with one fault each: what is changed in a sound program, and the kind and parameter that must be named.

The first twenty were written together with the diagnosis; the second twenty after its thresholds were frozen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import program_texts as texts

from plait.checking.findings import ProgramFindingKind


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultyCase:
    """A sound program, the lines that are changed, and what must be said."""

    name: str
    program: str
    changes: Sequence[tuple[str, str]]
    kind: ProgramFindingKind
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
    "        for x, y in loader:\n            optimizer.zero_grad()\n"
    "            for a, b in zip(x.chunk(2), y.chunk(2)):\n"
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
                  "        shards = DistributedSampler(held, shuffle=False)\n"
                  "        for (x,) in DataLoader(held, batch_size=4, sampler=shards):\n"
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

_FSDP_LOSS = "        loss = F.cross_entropy(model(x), y)\n        loss.backward()\n"
_NO_SYNC = "            with nullcontext() if last else ddp.no_sync():\n"
_LAST_PART = "    dist.destroy_process_group()\n\n\nmain()"

SECOND_FAULTS: Sequence[FaultyCase] = (
    FaultyCase(
        name="FSDP2, loss multiplied by world size", program=texts.FSDP,
        changes=[("F.cross_entropy(model(x), y)", "F.cross_entropy(model(x), y) * world")],
        kind="world_size", parameter="inp.weight",
    ),
    FaultyCase(
        name="FSDP2, three micro-batches without division", program=texts.FSDP,
        changes=[(_FSDP_LOSS, "        for a, b in zip(x.chunk(3), y.chunk(3)):\n"
                              "            F.cross_entropy(model(a), b).backward()\n")],
        kind="accumulation", parameter="inp.weight",
    ),
    FaultyCase(
        name="FSDP2, ignored labels averaged by rank", program=texts.FSDP,
        changes=[("yield x[rank::world], y[rank::world]",
                  "y[: 2 * world : world] = -100\n        yield x[rank::world], y[rank::world]")],
        kind="mean_of_means", parameter="inp.weight",
    ),
    FaultyCase(
        name="FSDP2 without zero_grad", program=texts.FSDP, changes=[("        opt.zero_grad()\n", "")],
        kind="stale_gradients", parameter="inp.weight",
    ),
    FaultyCase(
        name="Accelerate, divided by accumulation twice", program=texts.ACCELERATE,
        changes=[("accelerator.backward(loss)", "accelerator.backward(loss / 4)"),
                 ("gradient_accumulation_steps=2", "gradient_accumulation_steps=4")],
        kind="accumulation", parameter="0.weight", needs="accelerate",
    ),
    FaultyCase(
        name="Accelerate, padding counted in accuracy", program=texts.ACCELERATE,
        changes=[("torch.randn(80, 10)", "torch.randn(83, 10)"),
                 ("accelerator.gather_for_metrics", "accelerator.gather")],
        kind="evaluation_data", needs="accelerate",
    ),
    FaultyCase(
        name="Accelerate, schedule planned in optimizer steps", program=texts.ACCELERATE,
        changes=[("total_iters=len(train)", "total_iters=4")], kind="schedule", needs="accelerate",
    ),
    FaultyCase(
        name="Trainer, tokens averaged by device", program=texts.TRAINER,
        changes=[("average_tokens_across_devices=True", "average_tokens_across_devices=False")],
        kind="mean_of_means", parameter="transformer.wte.weight", needs="transformers",
    ),
    FaultyCase(
        name="Trainer, dropout with one seed", program=texts.TRAINER, changes=[("resid_pdrop=0.0", "resid_pdrop=0.1")],
        kind="dropout_alike", needs="transformers",
    ),
    FaultyCase(
        name="head outside of DDP", program=texts.CLASSIFIER,
        changes=[("    model = DDP(net)\n", "    body, head = net, nn.Linear(5, 5)\n    model = DDP(body)\n"),
                 ("torch.optim.SGD(model.parameters()", "torch.optim.SGD([*model.parameters(), *head.parameters()]"),
                 ("logits = model(x)", "logits = head(model(x))")],
        kind="missing_sum", parameter="weight",
    ),
    FaultyCase(
        name="no_sync around every micro-batch", program=texts.LANGUAGE_MODEL,
        changes=[(_NO_SYNC, "            with ddp.no_sync():\n"), ("loss * world / tokens", "loss / tokens")],
        kind="never_summed", parameter="embed.weight",
    ),
    FaultyCase(
        name="zero_grad before every micro-batch", program=texts.LANGUAGE_MODEL,
        changes=[(_NO_SYNC, "            opt.zero_grad()\n" + _NO_SYNC)],
        kind="lost_micro_batches", parameter="embed.weight",
    ),
    FaultyCase(
        name="clipped after every micro-batch", program=texts.LANGUAGE_MODEL,
        changes=[("                shown += loss.detach()\n",
                  "                shown += loss.detach()\n"
                  "                torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)\n"),
                 ("        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)\n        opt.step",
                  "        opt.step")],
        kind="clipping_before_sum", parameter="embed.weight",
    ),
    FaultyCase(
        name="learning rate by rank", program=texts.LOOP, changes=[("lr=1e-2", "lr=1e-2 * (1 + rank)")],
        kind="rates_apart", parameter="0.weight",
    ),
    FaultyCase(
        name="last layer made again by rank", program=texts.LOOP,
        changes=[("optimizer = torch", "torch.manual_seed(rank)\nmodel[2].reset_parameters()\noptimizer = torch")],
        kind="weights_apart", parameter="2.weight",
    ),
    FaultyCase(
        name="a sum as loss under DDP", program=texts.CLASSIFIER,
        changes=[("F.cross_entropy(logits, y)", 'F.cross_entropy(logits, y, reduction="sum")')],
        kind="world_size", parameter="fc1.weight",
    ),
    FaultyCase(
        name="DDP and all_reduce", program=texts.CLASSIFIER,
        changes=[("            loss.backward()\n",
                  "            loss.backward()\n            for p in model.parameters():\n"
                  "                dist.all_reduce(p.grad)\n")],
        kind="world_size", parameter="fc1.weight",
    ),
    FaultyCase(
        name="batches by one seed", program=texts.LOOP, changes=[("manual_seed(100 + rank)", "manual_seed(100)")],
        kind="same_batch",
    ),
    FaultyCase(
        name="schedule stepped for each micro-batch", program=texts.LANGUAGE_MODEL,
        changes=[("        sched.step()\n", ""),
                 ("                shown += loss.detach()\n",
                  "                shown += loss.detach()\n                sched.step()\n")],
        kind="schedule",
    ),
    FaultyCase(
        name="evaluation drops the rest", program=texts.CLASSIFIER,
        changes=[(_LAST_PART,
                  "    held = TensorDataset(torch.randn(19, 16))\n"
                  "    held_sampler = DistributedSampler(held, shuffle=False, drop_last=True)\n"
                  "    with torch.no_grad():\n"
                  "        for (x,) in DataLoader(held, batch_size=4, sampler=held_sampler):\n"
                  "            model(x)\n" + _LAST_PART)],
        kind="evaluation_data",
    ),
)  # fmt: skip
